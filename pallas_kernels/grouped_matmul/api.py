"""Grouped matrix product and its low-rank update with gradients, on the backend that the machine has.

Shapes: M rows in E consecutive groups, D to F features, r rank; S matrices, E or those of several layers.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_matmul import blocks, hopper, hopper_low_rank, hopper_transposed, reference, tpu

IMPLEMENTATIONS = ("auto", "hopper", "tpu", "interpret", "blocks", "reference")
PLAIN = {"blocks": blocks.grouped_matmul, "reference": reference.grouped_matmul}  # differentiated by JAX
MULTIPLE = 128  # features of a tile of the Hopper kernels
MAX_RANK = 64


def _device():
    """What the program is compiled for; the abstract mesh speaks for absent devices."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def _hopper() -> bool:
    return any(name in _device().device_kind for name in ("H100", "H200", "H800", "H20", "GH200"))


def _hopper_problem(x, w, rank) -> str | None:
    """Why the Hopper kernels cannot take these arguments, on any device."""
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
        return f"x is {x.dtype} and w is {w.dtype}; accepted: bfloat16"
    if w.shape[1] % MULTIPLE or w.shape[2] % MULTIPLE:
        return f"w has shape {w.shape}; accepted: features in multiples of {MULTIPLE}"
    if x.shape[0] == 0:
        return "x has no rows; accepted: at least one"
    if rank > MAX_RANK:
        return f"rank={rank}; accepted: at most {MAX_RANK}"
    return None


def _problem(x, w, rank, implementation) -> str | None:
    """Why the named implementation cannot serve here, or None."""
    if implementation in PLAIN:
        return None
    if implementation == "tpu":
        return tpu.problem(x, w)
    if implementation == "interpret" and jax.__version_info__ < (0, 11):
        return f"JAX is {jax.__version__}; accepted: 0.11 or newer, which interprets GPU kernels"
    if implementation == "hopper" and not _hopper():
        return f"the device is {jax.devices()[0].device_kind!r}; accepted: an NVIDIA Hopper GPU"
    return _hopper_problem(x, w, rank)


def backend(x: Float[Array, "M D"], w: Float[Array, "S D F"], rank: int = 0, implementation: str = "auto") -> str:
    """The backend that serves these arrays: one of IMPLEMENTATIONS but "auto".

    Raises:
      ValueError: the named one is unknown or cannot serve; "auto" always finds one.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}")
    if implementation == "auto":
        for name in ("hopper", "tpu"):
            if not _problem(x, w, rank, name):
                return name
        return "blocks" if _device().platform == "cpu" else "reference"
    if problem := _problem(x, w, rank, implementation):
        raise ValueError(f"implementation={implementation!r}: {problem}")
    return implementation


def _check(x, w, group_sizes, first) -> None:
    """Shapes and types, on the host."""
    if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype} {x.shape}; accepted: floating [rows, features]")
    if w.ndim != 3 or w.shape[1] != x.shape[1] or w.dtype != x.dtype:
        raise ValueError(f"w is {w.dtype} {w.shape}; accepted: {x.dtype} [groups, {x.shape[1]}, features]")
    fits = group_sizes.ndim == 1 and (group_sizes.shape[0] == len(w) if first is None else len(group_sizes) <= len(w))
    if not fits or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        accepted = f"integers {w.shape[:1]}" if first is None else f"at most {len(w)} integers"
        raise ValueError(f"group_sizes are {group_sizes.dtype} {group_sizes.shape}; accepted: {accepted}")
    if first is not None and (first.shape or not jnp.issubdtype(first.dtype, jnp.integer)):
        raise ValueError(f"first is {first.dtype} {first.shape}; accepted: an integer scalar")


def _check_update(x, w, a, b, group_sizes, gate) -> None:
    rank, groups = a.shape[-1], group_sizes.shape[0]
    for name, value, shape in (("a", a, (groups, w.shape[1], rank)), ("b", b, (groups, rank, w.shape[2]))):
        if value.shape != shape or value.dtype != jnp.float32:
            raise ValueError(f"{name} is {value.dtype} {value.shape}; accepted: float32 {shape}")
    if gate is not None and (gate.shape != x.shape[:1] or gate.dtype != jnp.bool_):
        raise ValueError(f"gate is {gate.dtype} {gate.shape}; accepted: bool {x.shape[:1]}")


def _on_hopper(name, x, w, group_sizes, first, **options):
    def run(x, w, group_sizes, first):
        return hopper.grouped_matmul(x, w, group_sizes, first=first, interpret=name == "interpret", **options)

    return sequential_vmap(run)(x, w, group_sizes, first)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _product(x, w, group_sizes, first, name, weights_gradient):
    if name == "tpu":
        return tpu.grouped_matmul(x, reference.matrices(w, group_sizes, first), group_sizes)
    return _on_hopper(name, x, w, group_sizes, first)


def _product_fwd(x, w, group_sizes, first, name, weights_gradient):
    y = checkpoint_name(_product(x, w, group_sizes, first, name, weights_gradient), "grouped_matmul")
    return y, (x if weights_gradient else None, w, group_sizes, first)


def _product_bwd(name, weights_gradient, saved, dy):
    x, w, group_sizes, first = saved
    if name == "tpu":
        dx = tpu.grouped_matmul(dy, reference.matrices(w, group_sizes, first), group_sizes, transposed=True)
        outer = tpu.transposed_grouped_matmul
    else:
        dx = _on_hopper(name, dy, w, group_sizes, first, transposed=True)
        options = dict(out_dtype=w.dtype, interpret=name == "interpret")
        outer = sequential_vmap(functools.partial(hopper_transposed.transposed_grouped_matmul, **options))
    if not weights_gradient:
        return dx, None, None, None
    dw = outer(x, dy, group_sizes)
    if first is not None:
        dw = jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(w), dw, first, 0)
    return dx, dw, None, None


_product.defvjp(_product_fwd, _product_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _adapted(x, w, a, b, group_sizes, gate, first, name, scale):
    return _adapted_fwd(x, w, a, b, group_sizes, gate, first, name, scale)[0]


def _adapted_fwd(x, w, a, b, group_sizes, gate, first, name, scale):
    run = functools.partial(hopper_low_rank.forward, scale=scale, interpret=name == "interpret")
    y, low = sequential_vmap(run)(x, w, a, b, group_sizes, gate, first)
    # Named here, inside the rule, so that a remat policy that saves them does not run the kernels twice.
    y, low = checkpoint_name(y, "grouped_matmul"), checkpoint_name(low, "grouped_matmul_low")
    return y, (x, w, a, b, group_sizes, gate, first, low)


def _adapted_bwd(name, scale, saved, dy):
    run = functools.partial(hopper_low_rank.backward, scale=scale, interpret=name == "interpret")
    dx, da, db = sequential_vmap(run)(*saved, dy)
    return dx, None, da, db, None, None, None


_adapted.defvjp(_adapted_fwd, _adapted_bwd)


def grouped_matmul(
    x: Float[Array, "M D"],
    w: Float[Array, "S D F"],
    group_sizes: Int[Array, "E"],
    *,
    first: Int[Array, ""] | None = None,
    implementation: str = "auto",
    weights_gradient: bool = True,
) -> Float[Array, "M F"]:
    """Rows of group e (consecutive, group_sizes[e] of them) times w[e]; later rows give 0 and no gradient.

    Sums are fp32, the result has x's type. Works at any imbalance: all rows in one group, empty groups. Works under
    jit, scan, remat, shard_map (check_vma=False) and, one after another, vmap.

    Args:
      x, w: of one type. group_sizes: integers; rows past x are dropped.
      first: w holds the matrices of several layers, of which group e's is w[first + e]. On Hopper nothing of w is
        copied, which a slice of a scanned stack would be. w's gradient has its shape, 0 elsewhere. None for S = E.
      implementation: "auto" (the device's kernels where they fit, "blocks" on a CPU, else "reference"), "hopper",
        "tpu", "interpret" (Hopper's kernels on the host, for tests), "blocks" or "reference".
      weights_gradient: False treats w as constant: the backward pass neither keeps x nor makes w's gradient.

    Raises:
      ValueError: shapes or types do not fit, or the named implementation cannot serve them.
    """
    _check(x, w, group_sizes, first)
    name = backend(x, w, 0, implementation)
    if not weights_gradient:
        w = jax.lax.stop_gradient(w)
    if name in PLAIN:
        return PLAIN[name](x, reference.matrices(w, group_sizes, first), group_sizes)
    return _product(x, w, group_sizes, first, name, weights_gradient)


def adapted_grouped_matmul(
    x: Float[Array, "M D"],
    w: Float[Array, "S D F"],
    a: Float[Array, "E D r"],
    b: Float[Array, "E r F"],
    group_sizes: Int[Array, "E"],
    *,
    scale: float,
    first: Int[Array, ""] | None = None,
    gate: Bool[Array, "M"] | None = None,
    implementation: str = "auto",
) -> Float[Array, "M F"]:
    """`grouped_matmul` with a low-rank update a group: x w[e] + scale (x a[e]) b[e].

    Differentiable in x, a and b; w is constant. The update's factors are fp32: on Hopper their products are sums of
    bf16 parts, off by at most 2^-16 of each term, and the sum is rounded once.

    Args:
      a, b: fp32.
      scale: a Python number.
      gate: rows for which the update acts; None for all.
      first, implementation: as in `grouped_matmul`; a and b are of E groups in any case.

    Raises:
      ValueError: as in `grouped_matmul`; or factors or a gate that do not fit.
    """
    _check(x, w, group_sizes, first)
    _check_update(x, w, a, b, group_sizes, gate)
    name = backend(x, w, a.shape[-1], implementation)
    w = jax.lax.stop_gradient(w)
    if name == "tpu" or name in PLAIN:
        product = PLAIN.get(name) or functools.partial(grouped_matmul, implementation="tpu")
        w = reference.matrices(w, group_sizes, first)
        return reference.adapted_grouped_matmul(x, w, a, b, group_sizes, gate, scale, product=product)
    return _adapted(x, w, a, b, group_sizes, gate, first, name, float(scale))
