"""The grouped matrix product on a CPU: every group's rows in whole blocks, all blocks in one batched product.

XLA's own ragged product multiplies every row by every group's matrix there.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SMALLEST, LARGEST = 8, 128  # rows of a block


def block_rows(rows: int, groups: int) -> int:
    """Rows of a block: a power of two near the mean group."""
    return min(max(SMALLEST, 1 << (max(rows // groups, 1) - 1).bit_length()), LARGEST)


def grouped_matmul(
    x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Int[Array, "E"]
) -> Float[Array, "M F"]:
    """As `reference.grouped_matmul`. Takes a copy of a group's matrix for each of its blocks."""
    rows, groups = x.shape[0], w.shape[0]
    size = block_rows(rows, groups)
    count = -(-rows // size) + groups  # at most, whatever the groups' sizes
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    each = -(-(ends - starts) // size)  # blocks of each group
    last = jnp.cumsum(each)  # one past the last
    first = last - each

    block = jnp.arange(count)
    owner = jnp.minimum(jnp.searchsorted(last, block, side="right"), groups - 1)
    row = (starts[owner] + (block - first[owner]) * size)[:, None] + jnp.arange(size)
    taken = x.at[jnp.where(row < ends[owner][:, None], row, rows)].get(mode="fill", fill_value=0)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = jnp.einsum("nbd,ndf->nbf", taken, w[owner], precision=precision, preferred_element_type=jnp.float32)

    row = jnp.arange(rows)
    owner = jnp.minimum(jnp.searchsorted(ends, row, side="right"), groups - 1)
    place = jnp.where(row < ends[-1], first[owner] * size + row - starts[owner], count * size)
    flat = product.astype(x.dtype).reshape(count * size, w.shape[2])
    return flat.at[place].get(mode="fill", fill_value=0)
