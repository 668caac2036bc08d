"""What the port gives for each golden key: forward, gradients, paged decode and rotary tables.

Golden values come from Hugging Face transformers on small fp32 models; keys and layouts are its own, so that a
checker compares name by name.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from longstraw_jax import forward, sampling
from longstraw_jax.config import ModelConfig, RopeParameters
from longstraw_jax.io import hf_layout
from longstraw_jax.model import rope
from longstraw_jax.prefix import capture
from longstraw_jax.types import Model, Params

CHUNK = 13  # divides neither a page nor a usual prompt, so that captured chunks meet pages at all offsets


@functools.partial(jax.jit, static_argnames="model")
def _run(model, base, ids, positions):
    hidden, layers = forward.forward(model, base, None, ids, positions=positions, collect=True)
    return hidden, forward.logits(model, base, None, hidden), layers


def model_values(
    model: Model, base: Params, ids: Int[np.ndarray, "B T"], positions: Int[np.ndarray, "B T"] | None = None
) -> dict[str, np.ndarray]:
    """Everything a full forward gives, by golden key.

    Args:
      positions: rotary positions, 0..T-1 by default.

    Returns:
      fp32 logits [B, T, V], final_norm and hidden.i [B, T, D] (the residual stream before layer i; hidden.0 the
      embeddings), attn_out.i [B, T, D], topk_indices.i [B, T, K] with -1 for none, index_scores.i [B, T, T] with
      -inf where not causal, router_logits.i [B, T, E], router_experts.i ascending and router_weights.i [B, T, K].
    """
    hidden, logits, layers = _run(model, base, jnp.asarray(ids, jnp.int32), positions)
    values = {"final_norm": hidden, "logits": logits, "hidden.0": base["embed_tokens"]["weight"][ids]}
    for i, layer in enumerate(layers):
        values |= {
            f"hidden.{i + 1}": layer["hidden"],
            f"attn_out.{i}": layer["attn_out"],
            f"topk_indices.{i}": layer["selection"],
        }
        if "index_scores" in layer:
            values[f"index_scores.{i}"] = layer["index_scores"]
        if "router_logits" in layer:
            order = np.argsort(layer["router_ids"], axis=-1)
            rows = {
                f"router_logits.{i}": layer["router_logits"],
                f"router_experts.{i}": np.take_along_axis(np.asarray(layer["router_ids"]), order, axis=-1),
                f"router_weights.{i}": np.take_along_axis(
                    np.asarray(layer["router_weights"]), order, axis=-1
                ),
            }
            values |= {key: np.asarray(x).reshape(*ids.shape, -1) for key, x in rows.items()}
    return {key: np.asarray(x) for key, x in values.items()}


@functools.partial(jax.jit, static_argnames="model")
def _loss(model, base, ids, positions, labels):
    hidden, _ = forward.forward(model, base, None, ids, positions=positions)
    logprobs = jax.nn.log_softmax(forward.logits(model, base, None, hidden)[:, :-1])
    target = labels[:, 1:]
    counted = target >= 0
    picked = jnp.take_along_axis(logprobs, jnp.where(counted, target, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(counted, picked, 0.0).sum() / counted.sum()


def gradient_values(
    model: Model,
    base: Params,
    ids: Int[np.ndarray, "B T"],
    positions: Int[np.ndarray, "B T"] | None,
    labels: Int[np.ndarray, "B T"],
) -> dict[str, np.ndarray]:
    """loss, grad.TENSOR of every checkpoint tensor ([out, in]) and grad_norm over them; all fp32 or fp64.

    Args:
      labels: ids, -100 where not counted; the label at t is predicted at t - 1. The loss is the mean NLL.
    """
    ids, labels = jnp.asarray(ids, jnp.int32), jnp.asarray(labels, jnp.int32)
    loss, grads = jax.value_and_grad(_loss, argnums=1)(model, base, ids, positions, labels)
    if model.config.pad_token_id is not None:
        # torch's Embedding(padding_idx) gives the pad row no gradient.
        embed = grads["embed_tokens"]["weight"]
        grads["embed_tokens"]["weight"] = embed.at[model.config.pad_token_id].set(0.0)
    named = checkpoint_tensors(model.config, jax.device_get(grads))
    norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in named.values()))
    values = {"loss": np.asarray(loss).reshape(1), "grad_norm": norm.reshape(1)}
    return values | {f"grad.{name}": g for name, g in named.items()}


def checkpoint_tensors(config: ModelConfig, tree: Params) -> dict[str, np.ndarray]:
    """A tree shaped like the base weights as checkpoint tensors by name, linear maps as [out, in]."""
    named: dict[str, np.ndarray] = {}

    def add(parameter, value):
        rows = np.asarray(value) if parameter.stacked else np.asarray(value)[None]
        for names, row in zip(parameter.names, rows, strict=True):
            for name, tensor in zip(names, row if parameter.experts else row[None], strict=True):
                named[name] = tensor.T if parameter.transposed else tensor

    jax.tree.map(add, hf_layout.parameters(config), tree)
    return named


def decode_values(
    model: Model, base: Params, ids: Int[np.ndarray, "B T"], prompt: int
) -> dict[str, np.ndarray]:
    """The first `prompt` tokens captured in pages, the others decoded one by one; a prompt a row, row after row.

    Returns:
      fp32 decode.logits [B, T - prompt, V]; cache.kv_latent.i, cache.k_rope.i and (full layers) cache.index_key.i
      [B, T, ..]: the pages' rows, then the decoded tails'.
    """
    rows = [_decode_row(model, base, row, prompt) for row in np.asarray(ids, np.int32)]
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


@functools.partial(jax.jit, static_argnames="model")
def _decode(model, base, state, tokens):
    """Logits after each of tokens [n], and the tails they leave."""

    def step(tails, item):
        index, token = item
        logits, tails, _ = sampling.decode_step(
            model, base, None, state, tails, token[None], index, jnp.ones((1,), bool), None
        )
        return tails, logits[0]

    tails = sampling.empty_tails(model, 1, tokens.shape[0])
    tails, logits = jax.lax.scan(step, tails, (jnp.arange(tokens.shape[0], dtype=jnp.int32), tokens))
    return logits, tails


def _decode_row(model, base, row, prompt):
    config = model.config
    unused = jnp.zeros((2,), jnp.uint32)
    state = capture.capture(model, base, None, row[:prompt], chunk=CHUNK, fingerprint=unused)
    logits, tails = _decode(model, base, state, row[prompt:])
    state, tails = jax.device_get((state, tails))
    values = {"decode.logits": logits}
    for s, segment in enumerate(config.segments()):
        for j, run in enumerate(segment.runs):
            for index in range(segment.stack(j)):
                i, (group, place) = segment.layer_index(index, j), divmod(index, run.count)
                pool = state.latents[s][group, segment.offset(j) + place]
                latents = _joined(pool, tails[s][j][0][index, 0], prompt)
                values[f"cache.kv_latent.{i}"] = latents[:, : config.kv_lora_rank]
                values[f"cache.k_rope.{i}"] = latents[:, config.kv_lora_rank :]
                if run.indexer == "full":
                    values[f"cache.index_key.{i}"] = _joined(
                        state.index_keys[s][group], tails[s][j][1][index, 0], prompt
                    )
    return {key: np.asarray(x) for key, x in values.items()}


def _joined(pages, tail, prompt):
    return np.concatenate([pages.reshape(-1, pages.shape[-1])[:prompt], tail])


def rotary_values(
    rotary: RopeParameters, dim: int, positions: Int[np.ndarray, "T"]
) -> dict[str, Float[np.ndarray, "..."]]:
    """inv_freq [dim / 2], cos and sin [T, dim / 2] of one rotary setting, fp32."""
    cos, sin = rope.cos_sin(jnp.asarray(positions, jnp.int32), rotary, dim)
    return {"inv_freq": rope.inverse_frequencies(rotary, dim), "cos": np.asarray(cos), "sin": np.asarray(sin)}
