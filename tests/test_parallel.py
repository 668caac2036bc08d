"""What uses collectives, against one device and against numpy: rows, selection, attention, vocabulary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from beartype import beartype
from jax.sharding import PartitionSpec as P
from jaxtyping import jaxtyped

from longstraw_jax import parallel, sharding
from longstraw_jax.model.linear import Pair
from longstraw_jax.prefix import pages
from longstraw_jax.types import PAGE
from pallas_kernels.chunked_logprob import blocked

CTX, WHOLE = P(sharding.AXIS), P()


def on_mesh(devices, in_specs, out_specs=CTX):
    """Decorator: the body jitted over a mesh of that many devices."""
    return lambda body: jax.jit(parallel.mapped(body, sharding.make_mesh(devices), in_specs, out_specs))


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def device_major(rows: np.ndarray, devices: int) -> np.ndarray:
    """Prompt rows [tokens, W], padded to whole pages of every device, as pools [pages, 64, W] lie."""
    count = pages.page_count(len(rows), devices)
    padded = np.zeros((count * PAGE, rows.shape[1]), rows.dtype)
    padded[: len(rows)] = rows
    by_page = padded.reshape(count // devices, devices, PAGE, -1)
    return by_page.swapaxes(0, 1).reshape(count, PAGE, -1)


@pytest.mark.parametrize("devices", tiny.MESHES)
def test_embedding_rows(devices):
    table, ids = normal(0, 48, 64), np.random.default_rng(1).integers(0, 48, (2, 32)).astype(np.int32)

    @on_mesh(devices, (P(None, sharding.AXIS), P(None, sharding.AXIS)), P(None, sharding.AXIS))
    def run(axis, table, ids):
        return parallel.embed(ids, table, axis)

    np.testing.assert_array_equal(run(table, ids), table[ids])


@pytest.mark.parametrize("devices", [1, 32])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 2047, 2049, 4000])
def test_local_rows_name_every_prompt_token_once(devices, length):
    """Each id below `length` is a row of the one device whose page holds it; others are nobody's."""
    ids = np.concatenate([np.arange(-1, 4200), [1 << 20]]).astype(np.int32)
    found = np.asarray(_local_rows(devices)(ids, jnp.int32(length)))
    inside = (ids >= 0) & (ids < length)
    np.testing.assert_array_equal((found >= 0).sum(0), inside)
    page = ids // PAGE
    want = np.where(inside, page // devices * PAGE + ids % PAGE, -1)
    owner = np.where(inside, page % devices, 0)
    np.testing.assert_array_equal(found[owner, np.arange(len(ids))], want)


@functools.cache
def _local_rows(devices):
    @on_mesh(devices, (WHOLE, WHOLE))
    def run(axis, ids, length):
        return parallel.local_rows(ids, length, axis)[None]

    return run


# Selection and attention: 32 queries that are the tail of a prompt of any length.
T, HEADS, DIM, K, CAPACITY = 32, 2, 8, 8, 2200


@functools.cache
def _select(devices, strategy):
    row, whole = P(None, sharding.AXIS), P()

    @on_mesh(devices, (row, row, CTX, row, whole, row), row)
    def run(axis, q, w, keys, tail, length, index):
        tail = parallel.gather(tail, axis, 1)
        return parallel.select(q, w, keys, tail, length, index, K, strategy=strategy, axis=axis)

    return run


def selection_case(kind: str, length: int):
    """Queries, weights, prompt keys and tail keys; "ties": scores of few values, most of them equal."""
    rng = np.random.default_rng(length)
    shapes = ((1, T, HEADS, DIM), (1, T, HEADS), (length, DIM), (1, T, DIM))
    if kind == "ties":
        draws = [rng.integers(0, 2, shape) for shape in shapes]
        draws[1] = np.ones(shapes[1])
    else:
        draws = [rng.standard_normal(shape) for shape in shapes]
    return [x.astype(np.float32) for x in draws]


def numpy_selection(q, w, keys, tail, index):
    """Per query the K visible keys of largest score, the lowest position first among equals; -1 for none."""
    every = np.concatenate([keys, tail[0]]).astype(np.float64)
    scores = np.einsum("thd,sd->ths", q[0].astype(np.float64), every)
    scores = (np.maximum(scores, 0) * w[0][..., None]).sum(1)
    want = np.full((T, K), -1)
    for t in range(T):
        visible = len(keys) + index[0, t] + 1 if index[0, t] >= 0 else 0
        order = np.argsort(-scores[t, :visible], kind="stable")[:K]
        want[t, : len(order)] = order
    return want


@pytest.mark.parametrize(
    "devices, strategy",
    [
        (1, "merge_candidates"),
        (8, "gather_keys"),
        (8, "merge_candidates"),
        (32, "gather_keys"),
        (32, "merge_candidates"),
    ],
)
@pytest.mark.parametrize("kind", ["ties", "spread"])
def test_f4_selections_equal_an_exact_stable_sort(devices, strategy, kind):
    """Fewer keys than K, exact ties within and across pages, devices and tail; padding selects nothing."""
    for length in (0, 1, 5, 64, 100, 2100):
        q, w, keys, tail = selection_case(kind, length)
        index = np.arange(T, dtype=np.int32)[None].copy()
        index[0, -3:] = -1
        # Rows past the prompt's end hold what would win every comparison.
        pool = np.full((pages.page_count(CAPACITY, devices) * PAGE, DIM), 50.0, np.float32)
        pool[:length] = keys
        found = np.asarray(
            _select(devices, strategy)(q, w, device_major(pool, devices), tail, length, index)
        )[0]
        want = numpy_selection(q, w, keys, tail, index)
        np.testing.assert_array_equal(np.sort(found, -1), np.sort(want, -1))
        assert (found[-3:] == -1).all() and (found[0] >= 0).sum() == min(K, length + 1)


STRATEGIES = [(1, "gather_keys"), (1, "merge_candidates"), (32, "gather_keys"), (32, "merge_candidates")]


@pytest.mark.parametrize("devices, strategy", STRATEGIES)
def test_f7_attention_over_pages_and_tail(devices, strategy):
    """Against numpy, and a query that selects nothing gives 0 with finite gradients in every argument."""
    length, heads, width, value = 2100, 3, 6, 4
    q, keys, tail = normal(0, 1, T, heads, width), normal(1, length, width), normal(2, 1, T, width)
    rng = np.random.default_rng(3)
    ids = np.stack([rng.permutation(length + t + 1)[:K] for t in range(T)])[None].astype(np.int32)
    ids[0, :, -1] = -1
    ids[0, 5] = -1
    ids[0, 6] = np.r_[length, length + 3, [-1] * (K - 2)]  # its own tail alone
    pool = device_major(keys, devices)
    row = P(None, sharding.AXIS)

    sunk, opts = P(None, None, sharding.AXIS), dict(scale=0.7, value_dim=value, strategy=strategy)

    @on_mesh(devices, (row, CTX, row, row, WHOLE), row)
    def run(axis, q, pool, tail, ids, length):
        layer = None
        if strategy == "merge_candidates":  # in a pool of several layers, read where it lies
            pool, layer = jnp.stack([pool + 1, pool, pool - 1]), jnp.int32(1)
        return parallel.attend(q, pool, parallel.gather(tail, axis, 1), ids, length, layer=layer, axis=axis, **opts)

    @on_mesh(devices, (row, CTX, sunk, row, row, WHOLE), (row, sunk))
    def collecting(axis, q, pool, sink, tail, ids, length):
        tail, place = parallel.gather(tail, axis, 1), jnp.asarray([1, 0])
        return parallel.attend_collecting(q, pool, sink, place, tail, ids, length, axis=axis, **opts)

    @jax.jit
    def gradients(q, pool, tail, page_grads):
        """Of the sum of squares, what the rows of the pages are owed added to page_grads[1, 0]."""
        args = (ids, jnp.int32(length))
        (out, _), pull = jax.vjp(lambda q, tail, sink: collecting(q, pool, sink, tail, *args), q, tail, page_grads)
        return out, pull((2 * out, page_grads))

    out = np.asarray(run(q, pool, tail, ids, jnp.int32(length)))[0]
    every = np.concatenate([keys, tail[0]]).astype(np.float64)
    for t in range(T):
        chosen = every[ids[0, t][ids[0, t] >= 0]]
        if not len(chosen):
            assert (out[t] == 0).all()
            continue
        logits = 0.7 * q[0, t].astype(np.float64) @ chosen.T
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        np.testing.assert_allclose(
            out[t], weights / weights.sum(-1, keepdims=True) @ chosen[:, :value], atol=1e-5
        )
    page_grads = jnp.ones((2, 1, *pool.shape), jnp.float32)  # of other layers, and of other members already
    again, (d_q, d_tail, page_grads) = gradients(q, pool, tail, page_grads)
    np.testing.assert_array_equal(again[0], out)
    assert (np.asarray(page_grads[0]) == 1).all()
    owed = device_major_rows(page_grads[1, 0], devices)[:length] - 1
    grads = [np.asarray(d_q), owed, np.asarray(d_tail)]
    assert all(np.isfinite(g).all() for g in grads) and (grads[0][0, 5] == 0).all()
    assert (owed[np.setdiff1d(np.arange(length), ids)] == 0).all()
    for found, want in zip(grads, _attend_grads(q, keys, tail, ids, length, value), strict=True):
        np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())


def device_major_rows(pool, devices):
    pool = np.asarray(pool)
    by_device = pool.reshape(devices, -1, PAGE, pool.shape[-1])
    return by_device.swapaxes(0, 1).reshape(-1, pool.shape[-1])


def _attend_grads(q, keys, tail, ids, length, value):
    """Dense attention under a mask, differentiated without pages."""
    mask = (ids[0, :, None, :] == np.arange(length + T)[None, :, None]).any(-1)

    def loss(q, keys, tail):
        every = jnp.concatenate([keys, tail[0]])
        some = mask.any(-1)[:, None, None]
        logits = jnp.where(mask[:, None], 0.7 * jnp.einsum("tnw,sw->tns", q[0], every), -1e30)
        weights = jnp.where(some, jax.nn.softmax(logits), 0.0)
        return (jnp.einsum("tns,sr->tnr", weights, every[:, :value]) ** 2).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2)))(q, keys, tail)


# Vocabulary.
def log_softmax_oracle(hidden, targets, head, pair, temperature):
    logits = hidden @ head + (0.0 if pair is None else pair.scale * (hidden @ pair.a) @ pair.b)
    logprobs = jax.nn.log_softmax(logits / temperature)
    entropy = -(jnp.exp(logprobs) * logprobs).sum(-1)
    return jnp.take_along_axis(logprobs, targets[:, None], -1)[:, 0], entropy


@pytest.mark.parametrize("devices", tiny.MESHES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_logprobs_equal_log_softmax(devices, temperature):
    """With the vocabulary sharded, a pair on the head, 96 tokens in blocks; values, entropies, gradients."""
    hidden, head, a, b = normal(0, 96, 16), normal(1, 16, 64), normal(2, 16, 2), normal(3, 2, 64)
    hidden[3] *= 8  # one token is near certain
    targets = np.random.default_rng(4).integers(0, 64, 96).astype(np.int32)
    specs = (CTX, CTX, P(None, sharding.AXIS), WHOLE, WHOLE)

    @on_mesh(devices, specs, (CTX, CTX))
    def run(axis, hidden, targets, head, a, b):
        return parallel.token_logprobs(hidden, targets, head, Pair(a, b, 0.5, None), temperature, axis)

    def mix(outputs):
        return (outputs[0] * jnp.cos(jnp.arange(96.0))).sum() + (outputs[1] * jnp.sin(jnp.arange(96.0))).sum()

    def found(hidden, head, a, b):
        outputs = run(hidden, targets, head, a, b)
        return mix(outputs), outputs

    def wanted(hidden, head, a, b):
        outputs = log_softmax_oracle(hidden, targets, head, Pair(a, b, 0.5, None), temperature)
        return mix(outputs), outputs

    arguments = (hidden, head, a, b)
    (_, got), got_grads = jax.jit(jax.value_and_grad(found, (0, 1, 2, 3), has_aux=True))(*arguments)
    (_, want), want_grads = jax.jit(jax.value_and_grad(wanted, (0, 1, 2, 3), has_aux=True))(*arguments)
    for x, y in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1.0, np.abs(y).max()))


def test_h4_memory_of_log_probs_does_not_grow_with_tokens_times_vocabulary(monkeypatch):
    """Temporary bytes of value and gradient: one block's logits, whatever the number of tokens."""
    vocab, dim = 8192, 8
    monkeypatch.setattr(blocked, "LOGITS", 64 * vocab * 4)  # the budget of a block, else larger than this test

    def temporary(tokens):
        def loss(hidden, head, targets):
            logprobs, entropy = parallel.token_logprobs(hidden, targets, head, None, 1.0, None)
            return (logprobs + entropy).sum()

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((tokens, dim), (dim, vocab))]
        targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = temporary(256), temporary(1024)
    assert many - few < 0.05 * (1024 - 256) * vocab * 4
    assert many < 0.5 * 1024 * vocab * 4


def test_annotations_hold_at_run_time():
    """Shapes and dtypes of the signatures, checked by beartype on small traced calls."""
    checked = {f.__name__: jaxtyped(typechecker=beartype)(f) for f in (
        parallel.embed, parallel.local_rows, parallel.select, parallel.attend, parallel.token_logprobs,
        parallel.logits, pages.chunk_rows, pages.write,
    )}  # fmt: skip
    jax.eval_shape(lambda: _annotated_calls(checked))
    with pytest.raises(Exception, match="targets"):
        checked["token_logprobs"](
            jnp.zeros((6, 4)), jnp.zeros((5,), jnp.int32), jnp.zeros((4, 9)), None, 1.0, None
        )


def _annotated_calls(checked):
    q, w, keys, tail = map(jnp.asarray, selection_case("spread", 64))
    index, length = jnp.arange(T, dtype=jnp.int32)[None], jnp.int32(64)
    pool = keys.reshape(1, PAGE, DIM)
    hidden, head, targets = (
        jnp.asarray(normal(0, 6, 4)),
        jnp.asarray(normal(1, 4, 10)),
        jnp.zeros((6,), jnp.int32),
    )
    checked["embed"](targets[None], head.T, None)
    checked["local_rows"](targets, length, None)
    ids = checked["select"](q, w, pool, tail, length, index, K, strategy="gather_keys", axis=None)
    opts = dict(scale=1.0, value_dim=4, strategy="gather_keys", axis=None)
    checked["attend"](jnp.concatenate([q, q], 2), pool, tail, ids, length, **opts)
    checked["token_logprobs"](hidden, targets, head, None, 1.0, None)
    checked["logits"](hidden, head, None, None)
    index, rows = checked["chunk_rows"](jnp.int32(3), jnp.int32(5), 8, PAGE, None)
    checked["write"](pool[None], rows, jnp.zeros((1, len(rows), DIM)))


@pytest.mark.parametrize("devices", (8, 32))
def test_h1_a_gradient_taken_outside_counts_every_device_once(devices):
    """Inside the body, the gradient of a loss that all devices share would be counted once a device."""

    @on_mesh(devices, (WHOLE, CTX))
    def losses(axis, scale, x):
        every = parallel.gather(scale * x, axis, 0)  # a collective under the gradient
        return every[parallel.axis_index(axis)][None]

    x = jnp.arange(devices, dtype=jnp.float32)
    assert jax.grad(lambda scale: losses(scale, x).sum())(1.0) == devices * (devices - 1) / 2
