"""Kernels for TPU: numbers in interpret mode against the references, and compilation for absent v5p and v6e chips."""

import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.chunked_logprob import api as chunked_logprob
from pallas_kernels.grouped_matmul import tpu as grouped_tpu
from pallas_kernels.indexer_topk import reference as index_reference
from pallas_kernels.indexer_topk import tpu as index_tpu
from pallas_kernels.sparse_mla import reference as mla_reference
from pallas_kernels.sparse_mla import tpu as mla_tpu
from pallas_kernels.sparse_mla import tpu_backward as mla_tpu_backward

SCALE = 0.1


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.fixture(scope="module")
def attention():
    """Two buffers of selected rows; a query with none, one with holes; a width short of a tile."""
    rng = np.random.default_rng(0)
    q, rows = normal(1, 3, 8, 72), normal(2, 150, 72)
    ids = np.stack([rng.permutation(150)[:130] for _ in range(3)]).astype(np.int32)
    ids[1], ids[2, ::3] = -1, -1
    # Row 0 and whatever is not selected may hold anything.
    ids = np.where(ids == 0, -1, ids)
    poisoned = rows.at[0].set(jnp.nan)
    wide = [x.astype(jnp.float32) for x in (q, rows)]
    out, lse = mla_reference.sparse_mla(*wide, jnp.asarray(ids), scale=SCALE, value_dim=64)
    return q, poisoned, jnp.asarray(ids), wide, out, lse


@pytest.mark.parametrize("collect", [True, False])
def test_attention_backward_in_interpret_mode(attention, collect):
    """Three queries add to rows that they share, on top of what the accumulator holds."""
    q, rows, ids, wide, out, lse = attention
    dout, accumulator = normal(3, 3, 8, 64, dtype=jnp.float32), normal(4, 150, 72, dtype=jnp.float32)
    shift = mla_reference.softmax_shift(out, lse, dout, jnp.zeros_like(lse))
    start = accumulator if collect else None
    run = jax.jit(functools.partial(mla_tpu_backward.backward, scale=SCALE, interpret=True))
    dq, total = run(q, rows, ids, lse, dout, shift, start)
    want_dq, want = mla_reference.sparse_mla_backward(
        *wide, ids, lse, dout, shift, accumulator, scale=SCALE, deterministic=True
    )
    np.testing.assert_allclose(dq, want_dq, atol=1e-2 * float(jnp.abs(want_dq).max()))
    if collect:
        np.testing.assert_allclose(total, want, atol=1e-2 * float(jnp.abs(want - accumulator).max()))
        untouched = np.setdiff1d(np.arange(150), np.asarray(ids))
        np.testing.assert_array_equal(total[untouched], accumulator[untouched])
    else:
        assert total is None


def test_index_topk_in_interpret_mode():
    """Pages out of order, a partly filled last one, queries with fewer keys than k or none, equal keys."""
    q, w = normal(0, 5, 4, 64), normal(1, 5, 4, dtype=jnp.float32)
    pages, table = normal(2, 9, 64, 64), jnp.asarray(np.random.default_rng(3).permutation(9), jnp.int32)
    pages = pages.at[table[2]].set(pages[table[1]])  # ties
    limit = jnp.asarray([9 * 64 - 5, 3, 0, 190, 16], jnp.int32)
    best, ids = jax.jit(functools.partial(index_tpu.index_topk, k=16, interpret=True))(q, w, pages, table, limit)
    want_best, want = index_reference.index_topk(q, w, pages[table].reshape(-1, 64), limit, 16)
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_allclose(best, want_best, atol=1e-4)


def _cases():
    """Name, function, shapes with types: GLM-5.2's widths, short in everything else."""
    f32, i32, b16 = jnp.float32, jnp.int32, jnp.bfloat16
    t, n, k, s = 16, 64, 2048, 4096
    attend = ((t, n, 576), b16), ((s, 576), b16), ((t, k), i32)
    back = *attend, ((t, n), f32), ((t, n, 512), f32), ((t, n), f32)

    def logprob(hidden, head, targets, a, b):
        run = lambda hidden, a, b: chunked_logprob.token_logprobs(hidden, head, targets, a=a, b=b)[0].sum()  # noqa: E731
        return jax.grad(run, (0, 1, 2))(hidden, a, b)

    return {
        "sparse_mla": (functools.partial(mla_tpu.forward, scale=SCALE, value_dim=512), *attend),
        "sparse_mla_backward": (functools.partial(mla_tpu_backward.backward, scale=SCALE), *back, ((s, 576), f32)),
        "sparse_mla_detached": (lambda *x: mla_tpu_backward.backward(*x, None, scale=SCALE)[0], *back),
        "indexer_topk": (
            functools.partial(index_tpu.index_topk, k=2048),
            *(((128, 32, 128), b16), ((128, 32), f32), ((64, 64, 128), b16), ((64,), i32), ((128,), i32)),
        ),
        "grouped_matmul": (grouped_tpu.grouped_matmul, ((1024, 512), b16), ((16, 512, 256), b16), ((16,), i32)),
        "grouped_matmul_dx": (
            functools.partial(grouped_tpu.grouped_matmul, transposed=True),
            *(((1024, 256), b16), ((16, 512, 256), b16), ((16,), i32)),
        ),
        "grouped_matmul_dw": (
            grouped_tpu.transposed_grouped_matmul,
            *(((1024, 512), f32), ((1024, 8), f32), ((16,), i32)),
        ),
        "chunked_logprob": (
            logprob,
            *(((256, 512), b16), ((512, 4840), b16), ((256,), i32), ((512, 8), f32), ((8, 4840), f32)),
        ),
    }


MOSAIC = {"sparse_mla", "sparse_mla_backward", "sparse_mla_detached", "indexer_topk", "grouped_matmul_dw"}


@pytest.fixture(scope="module", params=["v5p:2x2x1", "v6e:2x2"])
def chip(request):
    """Sharding on one chip of an absent topology."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5p-64"),
        ("TPU_WORKER_ID", "0"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),  # compiling holds no chip
    ):
        os.environ.setdefault(name, value)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=request.param)
    return NamedSharding(Mesh(np.asarray(topology.devices).reshape(-1)[:1], "x"), PartitionSpec())


@pytest.mark.aot
@pytest.mark.parametrize("name", _cases())
def test_compiles_for_absent_chips(name, chip):
    run, *shapes = _cases()[name]
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=chip) for shape, dtype in shapes]
    compiled = jax.jit(run).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**30
    assert ("tpu_custom_call" in compiled.as_text()) == (name in MOSAIC or name.startswith("grouped"))


@pytest.mark.parametrize("name", sorted(MOSAIC))
def test_lowers_with_mosaic(name):
    run, *shapes = _cases()[name]
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    assert "tpu_custom_call" in jax.jit(run).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
