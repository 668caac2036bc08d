"""Random weights drawn where they will lie, matrix by matrix: no temporary grows with layers or experts."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Key

from longstraw_jax import parallel, sharding


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "std", "mesh", "spec"))
def normal(
    key: Key[Array, ""], *, shape: tuple[int, ...], dtype: jnp.dtype, std: float, mesh: Mesh | None, spec: PartitionSpec
) -> Float[Array, "*lead D F"]:
    """Normal numbers of mean 0 in `dtype`, drawn in fp32; each matrix [D, F] depends on the key and its place alone.

    Beside the result exists one matrix's draw a device: a layer's experts at once would take tens of GB.

    Args:
      shape: leading axes (layers, then experts, or none) and a matrix.
      spec: where the result lies: sharded within the matrices, or by experts.
    """
    *lead, rows, columns = shape
    by_expert = len(lead) == 2 and spec[1] is not None
    inside = sharding.named(mesh, PartitionSpec(*tuple(spec)[len(lead) :]))

    def matrix(key, number):
        value = std * jax.random.normal(jax.random.fold_in(key, number), (rows, columns), jnp.float32)
        value = value.astype(dtype)
        return value if by_expert else jax.lax.with_sharding_constraint(value, inside)

    def share(axis, key):
        own = [lead[0], lead[1] // parallel.axis_size(axis)]
        experts = parallel.axis_index(axis) * own[1] + jnp.arange(own[1])
        numbers = jnp.arange(own[0])[:, None] * lead[1] + experts
        return jax.lax.map(functools.partial(matrix, key), numbers.reshape(-1)).reshape(*own, rows, columns)

    if by_expert:
        value = parallel.mapped(share, mesh, (PartitionSpec(),), spec)(key)
    elif lead:
        count = lead[0] if len(lead) == 1 else lead[0] * lead[1]
        value = jax.lax.map(functools.partial(matrix, key), jnp.arange(count)).reshape(shape)
    else:
        value = matrix(key, 0)
    return jax.lax.with_sharding_constraint(value, sharding.named(mesh, spec))
