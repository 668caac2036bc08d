"""Exact index top-k: one entry for every backend, with its checks."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from pallas_kernels.indexer_topk import hopper, hopper_select, reference, tpu

IMPLEMENTATIONS = ("auto", "hopper", "tpu", "interpret", "reference")
WIDTHS = (64, 128)  # head dims of the Hopper kernels; narrower heads are filled up with zeros
HOPPER = ("H100", "H200", "H800", "H20", "GH200")  # in the device kind: compute capability 9.0
PAGE = 64


def index_topk(
    q: Float[Array, "T I H"],
    w: Float[Array, "T I"],
    keys: Float[Array, "S H"] | Float[Array, "P 64 H"],
    limit: Int[Array, "T"],
    k: int,
    *,
    page_table: Int[Array, "N"] | None = None,
    implementation: str = "auto",
    debug: bool = False,
) -> tuple[Float[Array, "T K"], Int[Array, "T K"], Int[Array, "T"]]:
    """Each query's min(k, limit[t]) best keys among positions 0 <= s < limit[t], exactly, by ascending position.

    The score of a key is sum_i w[t, i] * relu(q[t, i] . k[s]) in fp32 (DeepSeek-V3.2's lightning indexer). Ties go to
    the lowest position; a NaN ranks first and is returned; a score of -inf can be selected. One backend gives the same
    (query, key) the same score wherever it lies, so equal keys tie bit for bit; two backends may round differently.
    Candidates of several calls combine with `reference.merge` once each has the caller's global positions.

    Work follows the largest limit of each block of queries, not S; memory beyond inputs and outputs is below 1.5 GiB,
    and the keys once more on Hopper if H is neither 64 nor 128.
    Works under jit, scan, remat, shard_map (check_vma=False) and vmap (one after another). There is no gradient:
    selection is not differentiable, and the scores are those of a frozen indexer.

    Args:
      q: queries, bf16 or fp32. w: their heads' weights, both scales folded in; used in fp32.
      keys: rows in order of position, or pages of 64 of them. limit: int32, 0 <= limit <= S.
      page_table: page of positions 64 j ... 64 j + 63, int32; S is then 64 N. Without it pages are in order.
      implementation: "auto" takes "hopper" or "tpu" where it serves, else "reference"; any other name serves or raises.
        "interpret", for tests, runs hopper's selection on the host, from the reference's scores.
      debug: check page_table and limit on the device as well, where they are not known before.
    Returns:
      Scores fp32 [T, K] and positions int32 [T, K] with K = min(k, S), -inf and -1 in the unused slots, always last;
      and how many are used, int32 [T].
    Raises:
      ValueError: an argument does not fit, or a named implementation cannot serve it.
    """
    _check(q, w, keys, limit, k, page_table)
    length = PAGE * page_table.shape[0] if page_table is not None else keys.size // keys.shape[-1]
    name = backend(q, keys, k, implementation)
    table = () if page_table is None else (page_table,)
    if debug:
        jax.debug.callback(lambda *x: _check_values(length, keys.shape[0], *x), limit, *table)
    # No tangent reaches the kernels: they have no derivative.
    inputs = [jax.lax.stop_gradient(x) for x in (q, w.astype(jnp.float32), keys)]
    limit = limit.astype(jnp.int32)

    @sequential_vmap
    def run(q, w, keys, limit, *table):
        if name == "reference":
            rows = keys[table[0]] if table else keys
            return reference.index_topk(q, w, rows.reshape(-1, rows.shape[-1]), limit, min(k, length))
        if keys.ndim == 2:
            keys = jnp.pad(keys, ((0, -length % PAGE), (0, 0))).reshape(-1, PAGE, keys.shape[-1])
        pages = table[0].astype(jnp.int32) if table else None
        if name == "tpu":
            return tpu.index_topk(q, w, keys, pages, limit, min(k, length))
        if q.shape[2] not in WIDTHS:
            lacking = next(width for width in WIDTHS if width > q.shape[2]) - q.shape[2]
            q, keys = (jnp.pad(x, ((0, 0), (0, 0), (0, lacking))) for x in (q, keys))
        return hopper.index_topk(q, w, keys, pages, limit, min(k, length), interpret=name == "interpret")

    scores, ids = run(*inputs, limit, *table)
    return scores, ids, jnp.minimum(limit, min(k, length))


def backend(q: Array, keys: Array, k: int, implementation: str = "auto") -> str:
    """The implementation that `index_topk` runs for these arguments: "hopper", "tpu", "interpret" or "reference".

    Raises:
      ValueError: a named implementation cannot serve them.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: {implementation!r}; accepted are {', '.join(IMPLEMENTATIONS)}")
    obstacles = {
        "hopper": lambda: _obstacle(q, keys, k) or _absent(HOPPER),
        "tpu": lambda: _tpu_obstacle(q, keys) or _absent(("TPU",)),
        "interpret": lambda: _obstacle(q, keys, k),
        "reference": lambda: None,
    }
    if implementation == "auto":
        return next(name for name in ("hopper", "tpu", "reference") if obstacles[name]() is None)
    obstacle = obstacles[implementation]()
    if obstacle:
        raise ValueError(f"implementation {implementation!r}: {obstacle}")
    return implementation


def _obstacle(q, keys, k):
    """Why the Hopper kernels cannot take these arguments."""
    if q.dtype != jnp.bfloat16 or keys.dtype != jnp.bfloat16:
        return f"dtypes q {q.dtype}, keys {keys.dtype}; accepted is bfloat16"
    if q.shape[2] > WIDTHS[-1]:
        return f"head dim {q.shape[2]}; accepted is at most {WIDTHS[-1]}"
    if q.shape[1] not in (8, 16, 32, 64, 128):
        return f"heads {q.shape[1]}; accepted are 8, 16, 32, 64 and 128"
    if k > hopper_select.MAX_K:
        return f"k {k}; accepted is at most {hopper_select.MAX_K}"
    return None


def _tpu_obstacle(q, keys):
    if q.dtype != jnp.bfloat16 or keys.dtype != jnp.bfloat16:
        return f"dtypes q {q.dtype}, keys {keys.dtype}; accepted is bfloat16"
    return None if q.shape[2] == 128 else f"head dim {q.shape[2]}; accepted is 128"


def _absent(kinds):
    absent = jax.sharding.get_abstract_mesh().abstract_device  # set while compiling for a device that is not here
    kind = jax.devices()[0].device_kind if absent is None else absent.device_kind
    return None if any(name in kind for name in kinds) else f"device {kind!r}; accepted are {', '.join(kinds)}"


def _check(q, w, keys, limit, k, page_table):
    if q.ndim != 3:
        raise ValueError(f"q: shape {q.shape}; accepted is [T, I, H]")
    if w.shape != q.shape[:2]:
        raise ValueError(f"w: shape {w.shape}; accepted is {q.shape[:2]}, as q")
    if keys.ndim not in (2, 3) or keys.shape[-1] != q.shape[2] or (keys.ndim == 3 and keys.shape[1] != PAGE):
        raise ValueError(f"keys: shape {keys.shape}; accepted are [S, {q.shape[2]}] and [P, {PAGE}, {q.shape[2]}]")
    for name, x in (("q", q), ("w", w), ("keys", keys)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name}: dtype {x.dtype}; accepted are bfloat16 and float32")
    if limit.shape != q.shape[:1] or not jnp.issubdtype(limit.dtype, jnp.integer):
        raise ValueError(f"limit: {limit.dtype} {limit.shape}; accepted is int32 {q.shape[:1]}")
    if k < 1 or keys.shape[0] < 1:
        raise ValueError(f"k {k}, keys {keys.shape}; accepted is at least one of each")
    if page_table is not None:
        if keys.ndim != 3:
            raise ValueError(f"page_table: given with keys {keys.shape}; accepted are pages [P, {PAGE}, {q.shape[2]}]")
        if page_table.ndim != 1 or not len(page_table) or not jnp.issubdtype(page_table.dtype, jnp.integer):
            raise ValueError(f"page_table: {page_table.dtype} {page_table.shape}; accepted is int32 [N], N >= 1")
    length = PAGE * page_table.shape[0] if page_table is not None else keys.size // keys.shape[-1]
    known = [x for x in (limit, page_table) if x is not None]
    if not any(isinstance(x, jax.core.Tracer) for x in known):
        _check_values(length, keys.shape[0], *known)


def _check_values(length, pages, limit, page_table=None):
    for name, x, most in (("limit", limit, length), ("page_table", page_table, pages - 1)):
        if x is not None and x.size:
            low, high = int(np.min(x)), int(np.max(x))
            if low < 0 or high > most:
                raise ValueError(f"{name}: holds {low if low < 0 else high}; accepted is 0 to {most}")
