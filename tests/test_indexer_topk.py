"""Exact index top-k: every backend gives the ids of a sort, with the ties, NaNs and limits that kernels get wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, PartitionSpec

from experiments.bench import indexer_topk as bench
from pallas_kernels.indexer_topk import api, hopper, hopper_scores, reference

BACKENDS = ["reference", "interpret", pytest.param("hopper", marks=pytest.mark.gpu)]
HEADS, DIM = 8, 64


def sorted_ids(scores, limit, k):
    """The specification in numpy: NaN first, then larger scores, then lower positions; ids in ascending order."""
    ids = np.full((len(scores), min(k, scores.shape[1])), -1)
    for t, n in enumerate(limit):
        row = np.where(np.isnan(scores[t, :n]), np.inf, scores[t, :n])
        best = np.lexsort((np.arange(n), -row, ~np.isnan(scores[t, :n])))[:k]
        ids[t, : len(best)] = np.sort(best)
    return ids


def with_scores(values, queries):
    """Queries, weights and keys whose scores are exactly 2 `values` [S], of a few bits each: 2 relu - 2 relu."""
    keys = np.zeros((len(values), DIM), np.float32)
    keys[:, 0], keys[:, 1] = np.maximum(values, 0), np.maximum(-values, 0)
    keys[np.isnan(values)] = np.nan
    q, w = np.zeros((queries, HEADS, DIM), np.float32), np.zeros((queries, HEADS), np.float32)
    q[:, 0, 0] = q[:, 1, 1] = 1
    w[:, 0], w[:, 1] = 2, -2
    with np.errstate(over="ignore"):
        scores = np.tile(2 * values.astype(np.float32), (queries, 1))
    return jnp.asarray(q, jnp.bfloat16), jnp.asarray(w), jnp.asarray(keys, jnp.bfloat16), scores


def small_integers(seed, queries, keys, heads=HEADS):
    """Inputs whose scores every backend computes without rounding, with many ties."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.integers(-2, 3, shape)  # noqa: E731
    q, w, k = draw(queries, heads, DIM), draw(queries, heads) / 4, draw(keys, DIM)
    scores = (w[..., None] * np.maximum(np.einsum("tih,sh->tis", q, k), 0)).sum(1)
    return jnp.asarray(q, jnp.bfloat16), jnp.asarray(w, jnp.float32), jnp.asarray(k, jnp.bfloat16), scores


def index_topk(q, w, keys, limit, k, *, page_table=None, implementation="auto"):
    """Under jit: one program instead of one an operation. A new one each time, as some tests change the blocks."""

    def run(q, w, keys, limit, page_table):
        return api.index_topk(q, w, keys, limit, k, page_table=page_table, implementation=implementation)

    return jax.jit(run)(q, w, keys, jnp.asarray(limit), page_table)


def check(result, scores, limit, k):
    found, ids, count = map(np.asarray, result)
    want = sorted_ids(scores, limit, k)
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_array_equal(count, np.minimum(limit, min(k, scores.shape[1])))
    values = np.where(want < 0, -np.inf, np.take_along_axis(scores, np.maximum(want, 0), axis=1))
    np.testing.assert_array_equal(found, values.astype(np.float32))


SPECIAL = {
    "all_equal": lambda rng, n: np.zeros(n),
    "two_values": lambda rng, n: rng.integers(0, 2, n).astype(float),
    "nan": lambda rng, n: np.where(rng.random(n) < 0.02, np.nan, rng.integers(-9, 9, n)),
    "minus_infinity": lambda rng, n: np.where(rng.random(n) < 0.995, -3e38, rng.integers(-9, 9, n)),
    "all_nan": lambda rng, n: np.full(n, np.nan),
    "rising": lambda rng, n: np.arange(n) // 8 * 1.0,
    "correlated": lambda rng, n: np.repeat(rng.integers(-9, 9, n // 64), 64) + rng.integers(0, 2, n) / 4,
    "one_bin": lambda rng, n: 1 + rng.integers(0, 64, n) / 128,
}


@pytest.mark.parametrize("implementation", BACKENDS)
def test_special_scores_select_exactly(implementation):
    """Rows with fewer keys than k, none, one, and every length class of the selection; keys past the limit are NaN."""
    k, length = 4, 1024
    limit = np.asarray([0, 1, 3, 4, 5, 9, 33, 65, 321, 1000, 1024])
    select = jax.jit(lambda *args: api.index_topk(*args, k, implementation=implementation))
    for seed, (name, make) in enumerate(SPECIAL.items()):
        values = make(np.random.default_rng(seed), length)
        values[1000:] = np.nan if name == "nan" else values[1000:]
        q, w, keys, scores = with_scores(values, len(limit))
        check(select(q, w, keys, jnp.asarray(limit)), scores, limit, k)


@pytest.mark.parametrize(
    "implementation, heads",
    [
        *(("reference", heads) for heads in (8, 64, 128)),
        ("interpret", 64),
        *(pytest.param("hopper", heads, marks=pytest.mark.gpu) for heads in (8, 64, 128)),
    ],
)
def test_pages_out_of_order_and_a_partly_filled_last_page(implementation, heads, monkeypatch):
    """11 queries in two padded blocks, one page used twice: its keys tie and the lower positions win."""
    monkeypatch.setattr(hopper, "ROWS", 8)
    monkeypatch.setattr(reference, "QUERIES", 8)
    q, w, keys, scores = small_integers(heads, 11, 5 * 64, heads)
    table = np.asarray([3, 0, 4, 0, 1, 2])
    scores = scores.reshape(11, 5, 64)[:, table].reshape(11, -1)
    limit = np.arange(11) * 34 + 13
    pages = keys.reshape(5, 64, DIM)
    result = index_topk(q, w, pages, limit, 7, page_table=jnp.asarray(table), implementation=implementation)
    check(result, scores, limit, 7)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("dim", [16, 32, 96])
def test_heads_narrower_than_a_kernel_s(dim, implementation):
    """What fills them up changes neither scores nor ties; 96 are filled up to 128."""
    rng = np.random.default_rng(dim)
    q, w, k = rng.integers(-2, 3, (9, HEADS, dim)), rng.integers(-2, 3, (9, HEADS)) / 4, rng.integers(-2, 3, (150, dim))
    scores = (w[..., None] * np.maximum(np.einsum("tih,sh->tis", q, k), 0)).sum(1)
    inputs = jnp.asarray(q, jnp.bfloat16), jnp.asarray(w, jnp.float32), jnp.asarray(k, jnp.bfloat16)
    limit = [150, 0, 3, 64, 65, 128, 149, 20, 90]
    check(index_topk(*inputs, limit, 20, implementation=implementation), scores, limit, 20)


@pytest.mark.parametrize("implementation", BACKENDS)
def test_one_query_and_fewer_keys_than_k(implementation):
    q, w, keys, scores = small_integers(3, 1, 70)
    check(index_topk(q, w, keys, [70], 100, implementation=implementation), scores, [70], 100)


@pytest.mark.parametrize("implementation", BACKENDS)
def test_scores_agree_with_fp64_and_belong_to_their_ids(implementation):
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((9, 32, 128), (192, 128)))
    w = jnp.asarray(rng.standard_normal((9, 32)), jnp.float32)
    limit = np.asarray([192, 1, 0, 64, 65, 100, 192, 5, 150])
    found, ids, _ = map(np.asarray, index_topk(q, w, k, limit, 6, implementation=implementation))
    exact = [np.asarray(x, np.float64) for x in (q, w, k)]
    scores = (exact[1][..., None] * np.maximum(np.einsum("tih,sh->tis", exact[0], exact[2]), 0)).sum(1)
    np.testing.assert_array_equal(ids, sorted_ids(scores, limit, 6))
    used = ids >= 0
    np.testing.assert_allclose(found[used], np.take_along_axis(scores, ids, 1)[used], rtol=1e-5, atol=2e-4)


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="jax before 0.11 has no GPU interpreter")
@pytest.mark.parametrize("queries, heads, needed", [(16, 8, (20, 3)), (1, 32, (20,))])
def test_interpreted_score_kernel(queries, heads, needed):
    """Pages out of order, one twice, a NaN key; a block of queries that needs few pages; maxima of every 32 keys."""
    q, w, keys, scores = small_integers(10, queries, 18 * 64, heads)
    keys, scores = keys.at[70].set(jnp.nan), scores.astype(np.float32)
    scores[:, 70] = np.nan
    table = np.random.default_rng(0).permutation(18).tolist() + [4, 1]
    scores = scores.reshape(queries, 18, 64)[:, table].reshape(queries, -1)
    found, peaks = hopper_scores.index_scores(
        q, w, keys.reshape(18, 64, DIM), jnp.asarray(table), jnp.asarray(needed), chunk=16, interpret=True
    )
    order = np.asarray(reference.order_key(scores)).reshape(queries, 40, 32).max(-1)
    for t in range(queries):
        pages = needed[t // 8]
        np.testing.assert_array_equal(found[t, : 64 * pages], scores[t, : 64 * pages])
        np.testing.assert_array_equal(peaks[t, : 2 * pages], order[t, : 2 * pages])


@pytest.mark.gpu
@pytest.mark.parametrize("length", [65536, 2**20 + 4096])
def test_real_k_and_positions_over_2_20(length):
    """More than 4,096 values in one coarse bin, at the real k, heads and width; against the reference's selection."""
    rng = np.random.default_rng(length)
    values = 1 + rng.integers(0, 100, length) / 128
    values[: length // 2] = rng.integers(-9, 1, length // 2)
    q, w, keys, scores = with_scores(values, 5)
    limit = np.asarray([length, length - 1, 1500, 2048, length // 2 + 100])
    result = api.index_topk(q, w, keys, jnp.asarray(limit), 2048, implementation="hopper")
    check(result, scores, limit, 2048)


def test_long_rows_are_read_in_blocks(monkeypatch):
    """The reference's blocks of queries and keys change nothing, and it stops at the largest limit."""
    q, w, keys, scores = small_integers(5, 10, 300)
    limit = np.asarray([300, 0, 7, 31, 32, 33, 299, 200, 64, 65])
    monkeypatch.setattr(reference, "QUERIES", 4)
    monkeypatch.setattr(reference, "KEYS", 32)
    check(index_topk(q, w, keys, limit, 9, implementation="reference"), scores, limit, 9)


def test_fp32_inputs_keep_their_precision():
    rng = np.random.default_rng(1)
    q, w, k = rng.standard_normal((4, 2, 8)), rng.standard_normal((4, 2)), rng.standard_normal((50, 8))
    q, w, k = (x.astype(np.float32) for x in (q, w, k))
    assert api.backend(q, k, 5) == "reference"
    scores = (w[..., None] * np.maximum(np.einsum("tih,sh->tis", *(x.astype(np.float64) for x in (q, k))), 0)).sum(1)
    limit = np.full(4, 50)
    found, ids, _ = index_topk(q, w, k, limit, 5)
    np.testing.assert_array_equal(ids, sorted_ids(scores, limit, 5))
    np.testing.assert_allclose(found, np.take_along_axis(scores, np.asarray(ids), 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
def test_under_jit_scan_remat_vmap_and_grad(implementation):
    """All at once; and no gradient reaches the inputs."""
    q, w, keys, scores = small_integers(6, 8, 128)
    limit = np.asarray([128, 3, 50, 100, 0, 64, 127, 90])

    def total(q, w, keys):
        def select(q, w, limit):
            return api.index_topk(q, w, keys, limit, 5, implementation=implementation)

        step = jax.checkpoint(jax.vmap(select))
        parts = jax.tree.map(lambda x: x.reshape(2, 2, 2, *x.shape[1:]), (q, w, jnp.asarray(limit)))
        _, result = jax.lax.scan(lambda _, part: (_, step(*part)), 0, parts)
        result = jax.tree.map(lambda x: x.reshape(8, *x.shape[3:]), result)
        return jnp.where(result[1] < 0, 0.0, result[0]).sum() + w.sum(), result

    gradients, result = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, w, keys)
    check(result, scores, limit, 5)
    for found, want in zip(gradients, (0, 1, 0), strict=True):
        assert (np.asarray(found, np.float32) == want).all()


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
def test_shards_of_32_devices_merge_to_one_selection(implementation):
    """Every device selects from its own page and the candidates merge: the ids of one device, ties included."""
    devices, k = 32, 5
    q, w, keys, scores = small_integers(8, 3, devices * 64)
    limit = np.asarray([devices * 64, 700, 90])

    def local(q, w, keys, limit):
        start = jax.lax.axis_index("x") * 64
        mine = jnp.clip(limit - start, 0, 64)
        found, ids, _ = api.index_topk(q, w, keys, mine, k, implementation=implementation)
        ids = jnp.where(ids < 0, -1, ids + start)
        every = [jnp.moveaxis(jax.lax.all_gather(x, "x"), 0, 1).reshape(len(q), -1) for x in (found, ids)]
        return reference.merge(*every, k)

    mesh, rows = Mesh(np.asarray(jax.devices()), "x"), PartitionSpec("x")
    everywhere = PartitionSpec()
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(everywhere, everywhere, rows, everywhere), out_specs=everywhere, check_vma=False
    )
    _, ids = jax.jit(mapped)(q, w, keys, jnp.asarray(limit))
    np.testing.assert_array_equal(np.sort(ids, axis=1), sorted_ids(scores, limit, k))


def test_merge_ranks_nan_first_and_absent_last():
    scores = jnp.asarray([[1.0, -jnp.inf, jnp.nan, -jnp.inf, -0.0, 0.0]])
    best, ids = reference.merge(scores, jnp.asarray([[4, -1, 9, 2, 7, 3]]), 6)
    np.testing.assert_array_equal(ids, [[9, 4, 3, 7, 2, -1]])
    assert np.isnan(best[0, 0])


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(w=jnp.zeros((4, 3))), r"w: shape \(4, 3\)"),
        (dict(keys=jnp.zeros((2, 32, DIM), jnp.bfloat16)), r"keys: shape \(2, 32, 64\)"),
        (dict(limit=jnp.zeros(3, jnp.int32)), r"limit: int32 \(3,\)"),
        (dict(limit=jnp.full(4, 65)), "limit: holds 65; accepted is 0 to 64"),
        (dict(limit=jnp.full(4, -1)), "limit: holds -1"),
        (dict(k=0), "k 0"),
        (dict(page_table=jnp.zeros(1, jnp.int32)), "page_table: given with keys"),
        (
            dict(keys=jnp.zeros((2, 64, DIM), jnp.bfloat16), page_table=jnp.asarray([0, 2])),
            "page_table: holds 2; accepted is 0 to 1",
        ),
        (dict(implementation="cuda"), "implementation: 'cuda'; accepted are auto, hopper"),
        (dict(implementation="hopper"), "implementation 'hopper': device"),
        (dict(implementation="interpret", q=jnp.zeros((4, HEADS, DIM))), "dtypes q float32"),
        (
            dict(
                implementation="interpret",
                q=jnp.zeros((4, HEADS, 130), jnp.bfloat16),
                keys=jnp.zeros((64, 130), jnp.bfloat16),
            ),
            "head dim 130; accepted is at most 128",
        ),
        (dict(implementation="interpret", k=4096), "k 4096; accepted is at most 2048"),
    ],
)
def test_bad_input_is_refused_by_name(change, words):
    q, w, keys, _ = small_integers(9, 4, 64)
    good = dict(q=q, w=w, keys=keys, limit=jnp.full(4, 64), k=3)
    api.index_topk(**good)
    with pytest.raises(ValueError, match=words):
        api.index_topk(**{**good, **change})


def test_debug_finds_a_page_out_of_range_under_jit():
    q, w, keys, _ = small_integers(9, 4, 128)
    pages = keys.reshape(2, 64, DIM)
    select = jax.jit(lambda table: api.index_topk(q, w, pages, jnp.full(4, 64), 3, page_table=table, debug=True))
    jax.block_until_ready(select(jnp.asarray([1])))
    with pytest.raises(Exception, match="page_table: holds 5; accepted is 0 to 1"):
        jax.block_until_ready(select(jnp.asarray([5])))
        jax.effects_barrier()


def test_kernels_lower_for_hopper():
    """Both GPU backends, at the real shape, without the device."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    spec = jax.ShapeDtypeStruct
    args = (
        spec((24, 32, 128), jnp.bfloat16), spec((24, 32), jnp.float32), spec((4096, 64, 128), jnp.bfloat16),
        spec((4096,), jnp.int32), spec((24,), jnp.int32),
    )
    assert api.backend(args[0], args[2], 2048) == "reference"
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert api.backend(args[0], args[2], 2048) == "hopper"
        select = lambda q, w, pages, table, limit: api.index_topk(q, w, pages, limit, 2048, page_table=table)  # noqa: E731
        text = jax.jit(select).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in text and "triton" in text


def test_bench_rows_name_the_backend_and_hold_the_fractions():
    rows = bench.bench(600.0, 4.0, shapes=((3, 128),), whole=128, sample=8, k=4, repeats=1)
    assert [row["shape"] for row in rows] == ["3 x 128", "128 x 128"]
    flops = 2 * bench.HEADS * bench.DIM * 3 * 128
    for row, count in zip(rows, (flops, bench.HEADS * bench.DIM * 128**2), strict=True):
        assert row["backend"] == "reference" and row["seconds"] > 0
        assert row["tflops"] == pytest.approx(count / row["seconds"] / 1e12)
        assert row["fraction_of_matmul"] == pytest.approx(row["tflops"] / 600)
