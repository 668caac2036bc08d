"""The prompt's own gradient: a reverse pass over its chunks, one for the whole group, at bounded memory.

A chunk is a function of the adapters and of the latents before it. Every replay adds the cotangents of the prompt's
latents to gradient pages; then, from the last chunk to the first, a chunk runs again under autograd, is seeded with
its own rows of the gradient pages and gives back the adapters' gradients and what the earlier rows still owe. That is
the chunk-recurrent reverse pass of OOMB (arXiv:2602.02108), with one pass for all members, because the pages are the
only way from the adapters' action on the prompt to any response. Alive at once: pages, gradient pages and one
chunk's graph, whatever the number of chunks and of members.

Index keys carry no gradient: selection is not differentiable, and the indexer is frozen.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from longstraw_jax import lora, parallel, sharding
from longstraw_jax.model import choices, decoder
from longstraw_jax.model.choices import Choices
from longstraw_jax.prefix import capture, pages
from longstraw_jax.types import Model, Params, PrefixState

PageGrads = tuple[Float[Array, "R J pages 64 W"], ...]  # gradient pages: like PrefixState.latents, in fp32


@functools.partial(jax.jit, static_argnames=("model",))
def zero_page_grads(model: Model, prefix: PrefixState) -> PageGrads:
    """Gradient pages of a resident prompt, before anything is added: fp32 whatever the pages are.

    Raises:
      ValueError: the model's attention is "expanded", which reads pages in another way.
    """
    if model.attention != "absorbed":
        raise ValueError(f"attention={model.attention!r} collects no page gradients; accepted: 'absorbed'")
    return tuple(
        jax.lax.with_sharding_constraint(jnp.zeros(pool.shape, jnp.float32), sharding.named(model.mesh, spec))
        for pool, spec in zip(prefix.latents, pages.prefix_specs(model.config).latents, strict=True)
    )


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("page_grads", "grads"))
def reverse_chunk(
    model: Model,
    base: Params,
    adapters: Params,
    prefix: PrefixState,
    ids: Int[Array, "C"],
    start: Int[Array, ""],
    count: Int[Array, ""],
    held: Choices,
    page_grads: PageGrads,
    grads: Params,
) -> tuple[PageGrads, Params]:
    """Pulls one chunk's rows of the gradient pages back through the chunk. Gradient pages and grads are donated.

    Args:
      adapters: from lora.per_device.
      ids, count: as the capture of this chunk had them.
      start: its first token's position.
      held: choices that the capture of this chunk made; what is not held is chosen again (same shapes, same strategy).
      page_grads: complete for this chunk's rows: replays and all later chunks are in them.
      grads: of the adapters so far, per device.

    Returns:
      Gradient pages with what this chunk's queries owe to earlier rows added; grads with this chunk's added.
    """
    specs = pages.prefix_specs(model.config)
    before = dataclasses.replace(prefix, length=start)

    def new_latents(adapters, sinks):
        def body(axis, base, adapters, before, ids, count, held, sinks):
            _, latents, _, _, sinks = capture.run_chunk(
                model, axis, base, lora.local(adapters), before, ids, count, sinks=sinks, held=held
            )
            return latents, sinks

        in_specs = (
            decoder.param_specs(model.config),
            lora.per_device_specs(model.config, model.lora),
            specs,
            P(sharding.AXIS),
            P(),
            choices.specs(),
            specs.latents,
        )
        mapped = parallel.mapped(body, model.mesh, in_specs, (specs.latents, specs.latents))
        return mapped(base, adapters, before, ids, count, held, sinks)

    def own_rows(axis, start, count, page_grads):
        capacity = page_grads[0].shape[2] * page_grads[0].shape[3]
        aligned = model.prefix_store == "host"
        _, rows = pages.chunk_rows(start, count, ids.shape[0], capacity, axis, aligned=aligned)
        return tuple(pages.read(pool, rows) for pool in page_grads)

    seeds = parallel.mapped(own_rows, model.mesh, (P(), P(), specs.latents), specs.latents)(start, count, page_grads)
    # The gradient pages enter twice: as the primal, which nothing reads, and as the cotangent, which grows in place.
    (latents, _), pull = jax.vjp(new_latents, adapters, page_grads)
    seeds = tuple(seed.astype(new.dtype) for seed, new in zip(seeds, latents, strict=True))
    more, page_grads = pull((seeds, page_grads))
    return page_grads, jax.tree.map(jnp.add, grads, more)


@jax.jit
def _any(page_grads):
    return functools.reduce(jnp.logical_or, [(pool != 0).any() for pool in page_grads])


def exact_prefix_vjp(
    model: Model,
    base: Params,
    adapters: Params,
    prefix: PrefixState,
    tokens: Int[np.ndarray, "S-1"],
    page_grads: PageGrads,
    grads: Params,
    *,
    chunk: int,
    held: Sequence[Choices] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Params:
    """Adds the prompt's own term to the adapters' gradients: the reverse pass over all chunks, last to first.

    Args:
      adapters: from lora.per_device, the ones that captured `prefix`.
      tokens: what `prefix` holds, the prompt without its boundary token.
      page_grads: gradients of the prompt's latents summed over every replay of the group. Used up.
      grads: the adapters' gradients summed over every replay, per device. Used up.
      chunk: tokens a step. With the capture's, selecting again gives what the capture selected.
      held: choices of each of the capture's chunks in order (its `keep`), None to choose again. Kept selections cost
        4 x index_topk bytes a token and full layer; selecting again costs the capture's index scores.
      progress: called with the number of tokens done after each chunk, once the devices are through with it.

    Returns:
      The adapters' gradients, per device (lora.finalise): `grads` as they are where all gradient pages are 0.

    Raises:
      ValueError: `tokens` are not as many as the prefix holds, `held` not as many as there are chunks, or a
        chunk that capture refuses too.
    """
    capture.check_chunk(model, chunk)
    if not _any(page_grads):  # a group without a gradient, as one of equal rewards: nothing to pull back
        return grads
    if tokens.size != int(prefix.length):
        raise ValueError(f"{tokens.size} tokens; accepted: the {int(prefix.length)} that the prefix state holds")
    chunks = list(capture.chunk_ids(model, tokens, chunk))
    if held is None:
        held = [choices.NONE] * len(chunks)
    elif len(held) != len(chunks):
        raise ValueError(f"choices of {len(held)} chunks; accepted: {len(chunks)}, of chunk={chunk} tokens")
    where = sharding.named(model.mesh, choices.specs())
    for (start, count, ids), chosen in zip(reversed(chunks), reversed(held), strict=True):
        page_grads, grads = reverse_chunk(
            model, base, adapters, prefix, ids, np.int32(start), np.int32(count),
            jax.device_put(chosen, where), page_grads, grads,
        )  # fmt: skip
        if progress is not None:
            jax.block_until_ready(grads)
            progress(tokens.size - start)
    return grads
