"""Paged pools of a prompt's latents and index keys: their size, placement and writing."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from longstraw_jax import parallel, sharding
from longstraw_jax.config import ModelConfig
from longstraw_jax.types import PAGE, Model, PrefixState


def page_count(tokens: int, devices: int) -> int:
    """Pages that hold `tokens`, a whole number on each device and at least one."""
    per_device = -(-max(tokens, 1) // (PAGE * devices))
    return per_device * devices


def prefix_bytes(config: ModelConfig, tokens: int, devices: int) -> int:
    """Resident bytes of a prompt over all devices, unfilled page rows included."""
    full = sum(s.repeat for s in config.segments())
    numbers = config.num_hidden_layers * config.latent_dim + full * config.index_head_dim
    return page_count(tokens, devices) * PAGE * numbers * jnp.dtype(config.dtype).itemsize


def prefix_specs(config: ModelConfig) -> PrefixState:
    """PartitionSpecs of a prefix state: pages over the mesh, layers whole."""
    segments = config.segments()
    return PrefixState(
        latents=tuple(P(None, None, sharding.AXIS) for _ in segments),
        index_keys=tuple(P(None, sharding.AXIS) for _ in segments),
        length=P(),
        fingerprint=P(),
    )


@functools.partial(jax.jit, static_argnames=("model", "tokens"))
def _zeros(model: Model, tokens: int) -> PrefixState:
    config, pages = model.config, page_count(tokens, model.devices)
    dtype = jnp.dtype(config.dtype)

    def pool(*shape, spec):
        return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding.named(model.mesh, spec))

    specs = prefix_specs(config)
    segments = config.segments()
    return PrefixState(
        latents=tuple(
            pool(s.repeat, s.group_layers, pages, PAGE, config.latent_dim, spec=spec)
            for s, spec in zip(segments, specs.latents, strict=True)
        ),
        index_keys=tuple(
            pool(s.repeat, pages, PAGE, config.index_head_dim, spec=spec)
            for s, spec in zip(segments, specs.index_keys, strict=True)
        ),
        length=jnp.int32(0),
        fingerprint=jnp.zeros((2,), jnp.uint32),
    )


def allocate(model: Model, tokens: int) -> PrefixState:
    """An empty prefix state with room for `tokens`."""
    return _zeros(model, tokens)


def chunk_rows(
    start: Int[Array, ""], count: Int[Array, ""], chunk: int, capacity: int, axis: str | None
) -> tuple[Int[Array, "kept"], Int[Array, "kept"]]:
    """Which tokens of a chunk this device keeps, and where.

    Args:
      start: prompt position of the chunk's first token, anywhere in a page.
      count: real tokens of the chunk.
      chunk: static length of the chunk, padding included.
      capacity: rows of this device's pool.

    Returns:
      Chunk indices, and pool rows (`capacity`, out of bounds, for what is not kept); the same length on all devices.
    """
    n, me = parallel.axis_size(axis), parallel.axis_index(axis)
    touched = -(-(chunk - 1) // PAGE) + 1  # pages a chunk can touch, wherever it starts
    first = start // PAGE
    page = first + (me - first) % n + n * jnp.arange(-(-touched // n))
    token = page[:, None] * PAGE + jnp.arange(PAGE)
    kept = (token >= start) & (token < start + count)
    rows = (page // n)[:, None] * PAGE + jnp.arange(PAGE)
    index = jnp.clip(token - start, 0, chunk - 1)
    return index.reshape(-1), jnp.where(kept, rows, capacity).reshape(-1)


def write(
    pool: Float[Array, "*layers pages 64 W"], rows: Int[Array, "kept"], values: Float[Array, "*layers kept W"]
) -> Float[Array, "*layers pages 64 W"]:
    """Writes token rows of every layer into this device's pool; rows out of bounds are dropped."""
    flat = pool.reshape(*pool.shape[:-3], -1, pool.shape[-1])
    return flat.at[..., rows, :].set(values.astype(pool.dtype), mode="drop").reshape(pool.shape)


def read(
    pool: Float[Array, "*layers pages 64 W"], rows: Int[Array, "kept"]
) -> Float[Array, "*layers kept W"]:
    """Token rows of every layer of this device's pool; 0 for rows out of bounds. The transpose of `write`."""
    flat = pool.reshape(*pool.shape[:-3], -1, pool.shape[-1])
    return flat.at[..., rows, :].get(mode="fill", fill_value=0)
