"""Grouped product on TPU: XLA's own Mosaic kernel behind ragged_dot, and megablox for the gradient of the matrices.

XLA expands the gradient of ragged_dot's matrices to a dense product, E times the work; megablox's tgmm does not.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import reference

TILE = 128


def _tpu() -> bool:
    """Whether the program is compiled for a TPU; the abstract mesh speaks for absent devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "TPU" in (jax.devices()[0].device_kind if device is None else device.device_kind)


def problem(x: Float[Array, "M D"], w: Float[Array, "E D F"]) -> str | None:
    """Why this backend cannot serve, or None."""
    if not _tpu():
        return f"the device is {jax.devices()[0].device_kind!r}; accepted: a TPU"
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"x is {x.dtype}; accepted: bfloat16 and float32"
    return None


def grouped_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "E K N"] | Float[Array, "E N K"],
    group_sizes: Int[Array, "E"],
    *,
    transposed: bool = False,
) -> Float[Array, "M N"]:
    """x[rows of e] w[e] (transposed: w[e]^T); rows past the groups are 0."""
    return reference.grouped_matmul(x, w.swapaxes(1, 2) if transposed else w, group_sizes)


def transposed_grouped_matmul(
    x: Float[Array, "M P"], y: Float[Array, "M Q"], group_sizes: Int[Array, "E"], *, interpret: bool = False
) -> Float[Array, "E P Q"]:
    """x[rows of e]^T y[rows of e] in x's type, summed in fp32; an empty group gives 0."""
    inside = jnp.arange(x.shape[0])[:, None] < group_sizes.sum()
    pad = ((0, -x.shape[0] % TILE), (0, 0))
    x, y = (jnp.pad(jnp.where(inside, value, 0), pad) for value in (x, y))
    with jax.default_matmul_precision("highest" if x.dtype == jnp.float32 else "default"):
        out = tgmm(x.T, y, group_sizes.astype(jnp.int32), jnp.float32, (TILE, TILE, TILE), interpret=interpret)
    return out.astype(x.dtype)
