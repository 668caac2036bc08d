"""Times other projects' kernels where they can be had: one row each, or one that says why not.

FlashMLA and DeepGEMM come as files of vLLM's wheel: vllm/_flashmla_C.abi3.so and vllm/third_party/deep_gemm.
"""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from bench.grouped_matmul import D, F, group_sizes
from bench.indexer_topk import seconds_of

HEADS, WIDTH, VALUES, K = 64, 576, 512, 2048  # GLM-5.2's attention
QUERIES, LATENTS = 2112, 2**20
SCORE_QUERIES, SCORE_KEYS, SCORE_HEADS, SCORE_DIM = 1024, 262_144, 32, 128
ROWS, GROUPS = 65_536, 64


def bench(
    matmul_tflops: float, copy_tbps: float, *, flashmla: str | None = None, deep_gemm: str | None = None
) -> list[dict]:
    """Rows with op, shape, backend (the peer), seconds, tflops, fraction_of_matmul; or with error in place of numbers.

    Args:
      copy_tbps: not used; every bench takes both rates.
      flashmla: path of _flashmla_C.abi3.so; None looks for an installed vllm.
      deep_gemm: path of the folder that holds the package deep_gemm; None looks for an installed one.
    """
    del copy_tbps
    sparse = f"{QUERIES} x {K} of {LATENTS}"
    grouped = f"{ROWS} x {D} x {F}, {GROUPS} groups, uneven"
    scores = f"{SCORE_QUERIES} x {SCORE_KEYS}"
    attention = 2.0 * HEADS * K * (WIDTH + VALUES) * QUERIES
    product, pairs = 2.0 * ROWS * D * F, 2.0 * SCORE_HEADS * SCORE_DIM * SCORE_QUERIES * SCORE_KEYS
    peers = (
        ("sparse_mla, random ids", sparse, "FlashMLA", attention, lambda: _flashmla(flashmla, "random")),
        ("sparse_mla, local ids", sparse, "FlashMLA", attention, lambda: _flashmla(flashmla, "local")),
        ("index_scores", scores, "DeepGEMM, fp8", pairs, lambda: _deep_gemm_scores(deep_gemm)),
        ("grouped_matmul", grouped + ", in whole tiles", "DeepGEMM", product, lambda: _deep_gemm_grouped(deep_gemm)),
        ("grouped_matmul", grouped, "tokamax", product, _tokamax),
        ("grouped_matmul", grouped, "jax ragged_dot_mgpu", product, _ragged_dot_mgpu),
    )
    table = []
    for op, shape, name, flops, run in peers:
        row = dict(op=op, shape=shape, backend=name)
        try:
            seconds = run()
        except Exception as error:  # a peer that is absent or does not run is a row, not an end
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            table.append(row | dict(error=reason[:300]))
            continue
        tflops = flops / seconds / 1e12
        table.append(row | dict(seconds=seconds, tflops=tflops, fraction_of_matmul=tflops / matmul_tflops))
    return table


def _torch_seconds(call: Callable, repeats: int = 7) -> float:
    """Median of the card's own event times, after warm-up."""
    import torch

    times = []
    for i in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _flashmla(path, kind):
    import torch

    if path is None:
        import vllm._flashmla_C  # noqa: F401
    else:
        torch.ops.load_library(path)
    options = dict(device="cuda", dtype=torch.bfloat16)
    q, rows = torch.randn(QUERIES, HEADS, WIDTH, **options), torch.randn(LATENTS, 1, WIDTH, **options)
    if kind == "random":
        ids = torch.randint(0, LATENTS, (QUERIES, 1, K), device="cuda", dtype=torch.int32)
    else:  # neighbouring queries share most of their rows
        ids = torch.arange(QUERIES, device="cuda")[:, None, None] * 8 + torch.arange(K, device="cuda") * 2
        ids = (ids % LATENTS).int()
    call = torch.ops._flashmla_C.sparse_prefill_fwd
    return _torch_seconds(lambda: call(q, rows, ids, WIDTH**-0.5, VALUES, None, None, None))


def _import_deep_gemm(path):
    if path is not None and path not in sys.path:
        if not (Path(path) / "deep_gemm").is_dir():
            raise ValueError(f"deep_gemm={path!r}; accepted: a folder that holds deep_gemm")
        sys.path.insert(0, path)
    import deep_gemm

    return deep_gemm


def _deep_gemm_scores(path):
    deep_gemm = _import_deep_gemm(path)
    import torch

    q = torch.randn(SCORE_QUERIES, SCORE_HEADS, SCORE_DIM, device="cuda").to(torch.float8_e4m3fn)
    keys = torch.randn(SCORE_KEYS, SCORE_DIM, device="cuda").to(torch.float8_e4m3fn)
    scales, weights = torch.rand(SCORE_KEYS, device="cuda"), torch.randn(SCORE_QUERIES, SCORE_HEADS, device="cuda")
    first = torch.zeros(SCORE_QUERIES, device="cuda", dtype=torch.int32)
    last = torch.full_like(first, SCORE_KEYS)
    call = deep_gemm.fp8_mqa_logits
    return _torch_seconds(lambda: call(q, (keys, scales), weights, first, last, clean_logits=False))


def _deep_gemm_grouped(path):
    """Its groups must be whole tiles of 128 rows, so its sizes are ours rounded."""
    deep_gemm = _import_deep_gemm(path)
    import torch

    tiles = group_sizes("uneven", GROUPS, ROWS // 128)
    group = torch.from_numpy(np.repeat(np.arange(GROUPS, dtype=np.int32), 128 * tiles)).cuda()
    options = dict(device="cuda", dtype=torch.bfloat16)
    x, w = torch.randn(ROWS, D, **options), torch.randn(GROUPS, F, D, **options)
    y = torch.empty(ROWS, F, **options)
    return _torch_seconds(lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x, w, y, group))


def _jax_inputs():
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (ROWS, D), jnp.bfloat16)
    w = jax.random.normal(keys[1], (GROUPS, D, F), jnp.bfloat16)
    return x, w, jnp.asarray(group_sizes("uneven", GROUPS, ROWS))


def _tokamax():
    import tokamax

    return seconds_of(jax.jit(tokamax.ragged_dot), *_jax_inputs(), repeats=5)


def _ragged_dot_mgpu():
    """JAX's own example of a grouped product, with the tiles that were fastest here."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    tiles = dict(block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=1)
    call = jax.jit(lambda x, w, sizes: ragged_dot(x, w, group_sizes=sizes, **tiles))
    return seconds_of(call, *_jax_inputs(), repeats=5)
