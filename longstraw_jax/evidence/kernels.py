"""Which implementation serves each operation of a model on this machine, as receipts record it."""

import jax
import jax.numpy as jnp

from longstraw_jax.types import Model
from pallas_kernels.chunked_logprob import api as chunked_logprob
from pallas_kernels.grouped_matmul import api as grouped_matmul
from pallas_kernels.indexer_topk import api as indexer_topk
from pallas_kernels.sparse_mla import api as sparse_mla


def implementations(model: Model) -> dict[str, str]:
    """Operation -> the implementation that the model's shapes and types get here; nothing runs.

    Two joined by "+", as "hopper+reference", where the operation's arrays get different ones.
    """
    c, name = model.config, model.kernels

    def array(*shape, dtype=c.dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    index_q, index_keys = array(1, c.index_n_heads, c.index_head_dim), array(1, c.index_head_dim)
    q, rows = array(1, c.num_attention_heads, c.latent_dim), array(1, c.latent_dim)
    ids = array(1, c.index_topk, dtype="int32")
    found = {
        "indexer_topk": indexer_topk.backend(index_q, index_keys, c.index_topk, name),
        "sparse_mla": sparse_mla.backend(q, rows, ids, c.kv_lora_rank, name),
        "chunked_logprob": chunked_logprob.backend(name),
    }
    if "sparse" in c.mlp_layer_types:
        ranks = {target: rank for target, rank, _ in model.lora.targets} if model.lora is not None else {}
        experts, d, f = c.n_routed_experts // model.devices, c.hidden_size, c.moe_intermediate_size
        # gate_proj, up_proj [d, f] and down_proj [f, d]
        served = [
            grouped_matmul.backend(array(1, x), array(experts, x, y), ranks.get("routed", 0), name)
            for x, y in ((d, f), (f, d))
        ]
        found["grouped_matmul"] = "+".join(dict.fromkeys(served))
    return found
