"""Paged pools of a prompt's latents and index keys: their size, placement and writing."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
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


def prefix_shardings(model: Model) -> PrefixState:
    """Shardings of a prefix state: where its pages rest."""
    kind = "pinned_host" if model.prefix_store == "host" else None
    specs = prefix_specs(model.config)
    return PrefixState(
        latents=tuple(sharding.named(model.mesh, spec, memory_kind=kind) for spec in specs.latents),
        index_keys=tuple(sharding.named(model.mesh, spec, memory_kind=kind) for spec in specs.index_keys),
        length=sharding.named(model.mesh, specs.length),
        fingerprint=sharding.named(model.mesh, specs.fingerprint),
    )


def row_major(where: jax.sharding.Sharding, ndim: int) -> jax.sharding.Sharding | Format:
    """A pool's sharding with its numbers in memory as in its shape.

    A TPU would rather lay a pool out with its pages innermost, which saves it padding; every program would then copy
    the pool to read rows. The others lay out arrays row-major by themselves.
    """
    if next(iter(where.device_set)).platform != "tpu":
        return where
    return Format(Layout(tuple(range(ndim))), where)


def prefix_formats(model: Model) -> PrefixState:
    """`prefix_shardings` and layouts of a prefix state: for programs that return one."""
    where = prefix_shardings(model)
    return PrefixState(
        latents=tuple(row_major(x, 5) for x in where.latents),
        index_keys=tuple(row_major(x, 4) for x in where.index_keys),
        length=where.length,
        fingerprint=where.fingerprint,
    )


def prefix_shapes(model: Model, tokens: int) -> PrefixState:
    """ShapeDtypeStructs of a prefix state with room for `tokens`, with their shardings and layouts."""
    config, pages, segments = model.config, page_count(tokens, model.devices), model.config.segments()
    dtype, where = jnp.dtype(config.dtype), prefix_formats(model)

    def pool(*shape, out):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=out)

    return PrefixState(
        latents=tuple(
            pool(s.repeat, s.group_layers, pages, PAGE, config.latent_dim, out=out)
            for s, out in zip(segments, where.latents, strict=True)
        ),
        index_keys=tuple(
            pool(s.repeat, pages, PAGE, config.index_head_dim, out=out)
            for s, out in zip(segments, where.index_keys, strict=True)
        ),
        length=jax.ShapeDtypeStruct((), jnp.int32, sharding=where.length),
        fingerprint=jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=where.fingerprint),
    )


def allocate(model: Model, tokens: int) -> PrefixState:
    """An empty prefix state with room for `tokens`."""
    return _zeros(model, tokens)()


@functools.lru_cache(maxsize=16)
def _zeros(model, tokens):
    """A program, because zeros made elsewhere would be whole on one device first."""
    shapes = prefix_shapes(model, tokens)
    # out_shardings, because a placement inside the program is lost on zeros.
    return jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
        out_shardings=prefix_formats(model),
    )


def chunk_rows(
    start: Int[Array, ""], count: Int[Array, ""], chunk: int, capacity: int, axis: str | None, *, aligned: bool = False
) -> tuple[Int[Array, "kept"], Int[Array, "kept"]]:
    """Which tokens of a chunk this device keeps, and where.

    Args:
      start: prompt position of the chunk's first token, anywhere in a page.
      count: real tokens of the chunk.
      chunk: static length of the chunk, padding included.
      capacity: rows of this device's pool.
      aligned: start and chunk are multiples of what fills a page of every device.

    Returns:
      Chunk indices, and pool rows (`capacity`, out of bounds, for what is not kept); the same length on all devices.
    """
    n, me = parallel.axis_size(axis), parallel.axis_index(axis)
    touched = chunk // PAGE if aligned else -(-(chunk - 1) // PAGE) + 1  # pages a chunk can touch, wherever it starts
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


def write_host(
    pool: Float[Array, "*layers pages 64 W"],
    start: Int[Array, ""],
    rows: Int[Array, "kept"],
    values: Float[Array, "*layers kept W"],
    axis: str | None,
) -> Float[Array, "*layers pages 64 W"]:
    """`write` of an aligned chunk that starts at prompt token `start`, into a pool in pinned host memory."""
    kept = (rows < pool.shape[-3] * PAGE)[:, None]
    values = jnp.where(kept, values, 0).astype(pool.dtype).reshape(*values.shape[:-2], -1, PAGE, values.shape[-1])
    page = start // (PAGE * parallel.axis_size(axis))
    values = jax.device_put(values, jax.memory.Space.Host)
    return jax.lax.dynamic_update_slice_in_dim(pool, values, page, axis=pool.ndim - 3)


def read(
    pool: Float[Array, "*layers pages 64 W"], rows: Int[Array, "kept"]
) -> Float[Array, "*layers kept W"]:
    """Token rows of every layer of this device's pool; 0 for rows out of bounds. The transpose of `write`."""
    flat = pool.reshape(*pool.shape[:-3], -1, pool.shape[-1])
    return flat.at[..., rows, :].get(mode="fill", fill_value=0)
