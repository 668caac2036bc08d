"""The trunk: embedding, layers scanned in IndexShare groups, final norm and head."""

import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from longstraw_jax import parallel, sharding
from longstraw_jax.config import LoraConfig, ModelConfig, Segment
from longstraw_jax.model import choices, draw
from longstraw_jax.model.block import Block, Pass, pairs_of
from longstraw_jax.model.choices import Choices
from longstraw_jax.model.linear import Linear, Pair, parameter
from longstraw_jax.model.norms import RMSNorm
from longstraw_jax.types import Model, Params


class Embedding(nnx.Module):
    """Token embedding, not scaled; its columns are sharded."""

    def __init__(self, vocab, dim, *, dtype, std):
        self.weight = parameter((vocab, dim), stack=None, axes=(None, "fsdp"), dtype=dtype, init=std)


class Group(nnx.Module):
    """The layers of an IndexShare group as runs of alike layers, each parameter stacked over the whole segment."""

    def __init__(self, config: ModelConfig, segment: Segment, *, dtype):
        self.layers = nnx.List(
            [Block(config, run[:2], stack=segment.stack(j), dtype=dtype) for j, run in enumerate(segment.runs)]
        )


def _unshard(state: nnx.State, axis: str | None) -> nnx.State:
    """Gathers one layer's resting weights for use."""

    if axis is None:
        return state
    flat = nnx.to_flat_state(state)
    resting = [(path, v) for path, v in flat if "fsdp" in v.get_metadata("axes")]
    whole = {}
    for dtype in {v.dtype for _, v in resting}:
        chosen = [(path, v) for path, v in resting if v.dtype == dtype]
        dims = [v.get_metadata("axes")[1:].index("fsdp") for _, v in chosen]  # the scan has taken the layer axis
        gathered = parallel.gather_together([v[...] for _, v in chosen], dims, axis)
        whole |= {path: v.replace(w) for (path, v), w in zip(chosen, gathered, strict=True)}
    return nnx.from_flat_state([(path, whole.get(path, v)) for path, v in flat])


def _staged(pool: Array, index: Array, after: Array) -> Array:
    """One layer's pages, from pinned host memory to the device once `after` is computed.

    Else the TPU compiler stages a loop's next layer beside this one, and its layout assignment fails on the copies of
    the loop that it makes for that.
    """
    _, pool = jax.lax.optimization_barrier((jax.lax.stop_gradient(after), pool))
    return jax.device_put(jax.lax.dynamic_index_in_dim(pool, index, 0, keepdims=False), jax.memory.Space.Device)


class Decoder(nnx.Module):
    """GlmMoeDsaForCausalLM without the MTP layer."""

    def __init__(
        self,
        config: ModelConfig,
    ):
        self.config = config
        dtype = jnp.dtype(config.dtype)
        d, v, std = config.hidden_size, config.vocab_size, config.initializer_range
        self.embed_tokens = Embedding(v, d, dtype=dtype, std=std)
        self.segments = nnx.List([Group(config, s, dtype=dtype) for s in config.segments()])
        self.norm = RMSNorm(d, config.rms_norm_eps, stack=None, dtype=dtype)
        self.lm_head = Linear(d, v, stack=None, dtype=dtype, std=std, axes=(None, "vocab"))

    def __call__(
        self,
        ids: Int[Array, "B T"],
        run: Pass,
        *,
        pages: tuple[tuple[Array, Array], ...] | None = None,
        caches: tuple[Any, ...] | None = None,
        adapters: Params | None = None,
        lora: LoraConfig | None = None,
        remat: bool = False,
        held: Choices = choices.NONE,
    ) -> tuple[Float[Array, "B T D"], tuple[Any, ...], list[dict[str, Array]]]:
        """`collecting` with pages that are constants."""
        options = dict(pages=pages, caches=caches, adapters=adapters, lora=lora, remat=remat, held=held)
        return self.collecting(ids, run, sinks=None, **options)[:3]

    def collecting(
        self,
        ids: Int[Array, "B T"],
        run: Pass,
        *,
        sinks: tuple[Array, ...] | None,
        held: Choices = choices.NONE,
        pages: tuple[tuple[Array, Array], ...] | None = None,
        caches: tuple[Any, ...] | None = None,
        adapters: Params | None = None,
        lora: LoraConfig | None = None,
        remat: bool = False,
    ) -> tuple[Float[Array, "B T D"], tuple[Any, ...], list[dict[str, Array]], tuple[Array, ...] | None]:
        """Runs the trunk on one device's share.

        Args:
          sinks: per segment as parallel.attend_collecting has it, None for pages that are constants.
          held: choices to take; a kind that is None is chosen here.
          pages: per segment (latents [R, J, pages, 64, W], index keys [R, pages, 64, H]) of the prompt.
          caches: per segment a list over runs of tails (latents [L, B, tail, W], keys [L, B, tail, H] or None).
          adapters: see lora.py; None for none.

        Returns:
          The final norm's output; per segment a list over runs of kept (latents, index keys) [L, ..]
          in the segment; when run.collect or record, per segment a list over runs of intermediates
          [L, ..]; and the sinks.
        """
        x = parallel.embed(ids, self.embed_tokens.weight[...], run.axis)
        scales = lora.scales() if lora is not None else {}
        every_kept, every_extra, every_sink = [], [], []
        for s, (group, segment) in enumerate(zip(self.segments, self.config.segments(), strict=True)):
            # A kernel reads a layer's experts where they lie; sliced from the stack by the scan they would be copied.
            split = [nnx.split(block, nnx.PathContains("experts"), ...) for block in group.layers]
            graphdefs, experts, states = zip(*split, strict=True)
            segment_adapters = (adapters or {}).get("segments", {}).get(str(s), {})

            looked_into = sinks is None and run.strategy == "merge_candidates" and run.attention == "absorbed"
            scanned, in_place, pools = None if pages is None else pages[s], None, None
            if pages is not None and run.prefix_store == "host":
                # Flat, because the compiler slices host memory along one dimension only.
                latents, keys = pages[s]
                pools, scanned = (latents.reshape(-1, *latents.shape[2:]), keys), None
            elif pages is not None and looked_into:
                in_place, scanned = pages[s][0], (None, pages[s][1])
            fixed = segment, graphdefs, experts, in_place, pools

            def layer(x, selection, sink, group_xs, j, i, fixed=fixed):
                """Layer i of run j; it indexes inside, so that recomputation keeps the group's arrays, not copies."""
                segment, graphdefs, experts, in_place, pools = fixed
                states, group_pages, group_caches, group_adapters, (_, routes), number = group_xs
                latents = keys = in_pool = None
                place = segment.offset(j) + i
                if pools is not None:
                    latents = _staged(pools[0], number * segment.group_layers + place, x)
                    keys = _staged(pools[1], number, x) if segment.runs[j].indexer == "full" else None
                elif group_pages is not None:
                    latents, keys = group_pages
                    keys = keys if segment.runs[j].indexer == "full" else None
                    if in_place is None:
                        latents = latents[place]
                    else:
                        latents, in_pool = in_place, number * segment.group_layers + place
                own = (
                    states[j],
                    group_adapters.get(str(j), {}),
                    None if group_caches is None else group_caches[j],
                    None if routes is None else routes[j],
                )
                state, layer_adapters, cache, route = jax.tree.map(lambda v: v[i], own)
                block = nnx.merge(graphdefs[j], experts[j], _unshard(state, run.axis))
                pairs = pairs_of(layer_adapters, scales, run.gate)
                if sink is not None:
                    sink = (sink, jnp.stack([number, place]))
                caches = (None, None) if cache is None else cache
                stacked = number * segment.runs[j].count + i
                return block(x, selection, (latents, keys, in_pool), caches, run, pairs, stacked, sink, route)

            if remat:
                policy = jax.checkpoint_policies.save_only_these_names("selection")
                layer = jax.checkpoint(layer, policy=policy, static_argnums=4)

            def one_group(carry, group_xs, runs=segment.runs, layer=layer):
                x, sink = carry
                (selection, _), kept, extras = group_xs[4], [], []
                for j, (_, _, count) in enumerate(runs):
                    if count == 1:
                        x, selection, sink, kept_j, extra = layer(x, selection, sink, group_xs, j, 0)
                        kept_j, extra = jax.tree.map(lambda v: v[None], (kept_j, extra))
                    else:

                        def one_layer(carry, i, j=j, selection=selection):
                            x, _, sink, kept, extra = layer(carry[0], selection, carry[1], group_xs, j, i)
                            return (x, sink), (kept, extra)

                        (x, sink), (kept_j, extra) = jax.lax.scan(one_layer, (x, sink), jnp.arange(count))
                    kept.append(kept_j)
                    extras.append(extra)
                return (x, sink), (kept, extras)

            def by_group(tree, repeat=segment.repeat):
                return jax.tree.map(lambda v: v.reshape(repeat, v.shape[0] // repeat, *v.shape[1:]), tree)

            xs = (
                by_group(states),
                scanned,
                None if caches is None else by_group(caches[s]),
                by_group(segment_adapters),
                (
                    None if held.selections is None else held.selections[s],
                    None if held.routes is None else by_group(held.routes[s]),
                ),
                jnp.arange(segment.repeat),
            )
            (x, sink), done = jax.lax.scan(one_group, (x, None if sinks is None else sinks[s]), xs)
            kept, extras = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), done)
            every_kept.append(kept)
            every_extra.append(extras)
            every_sink.append(sink)
        return self.norm(x), tuple(every_kept), every_extra, None if sinks is None else tuple(every_sink)

    def head_pair(self, adapters: Params | None, lora: LoraConfig | None) -> Pair | None:
        """The low-rank update of lm_head, if there is one."""
        if adapters is None or "lm_head" not in adapters:
            return None
        return Pair(adapters["lm_head"]["a"], adapters["lm_head"]["b"], lora.scales()["lm_head"])


@functools.lru_cache(maxsize=16)
def abstract(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Graph and ShapeDtypeStructs of the decoder; nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config)))


def make_model(
    config: ModelConfig,
    *,
    mesh: Mesh | None = None,
    lora: LoraConfig | None = None,
    attention: str = "absorbed",
    remat: bool = True,
    expert_load: float = 2.0,
    prefix_store: str = "device",
    kernels: str = "auto",
) -> Model:
    """The static half of a model; see types.Model for the fields.

    Raises:
      ShardingError: the mesh does not divide a dimension that it shards, by name.
      ValueError: unknown `attention`, `prefix_store` or `kernels`, or `expert_load` below 1.
    """
    if attention not in ("absorbed", "expanded"):
        raise ValueError(f"attention={attention!r} is not supported; accepted: 'absorbed' or 'expanded'")
    if prefix_store not in ("device", "host"):
        raise ValueError(f"prefix_store={prefix_store!r} is not supported; accepted: 'device' or 'host'")
    if kernels not in ("auto", "reference"):
        raise ValueError(f"kernels={kernels!r} is not supported; accepted: 'auto' or 'reference'")
    if not expert_load >= 1:
        raise ValueError(f"expert_load={expert_load}; accepted: 1 (the mean) or more")
    graphdef, state = abstract(config)
    if prefix_store == "host" and mesh is None:
        # Programs over a mesh alone are told which of their arguments rest on the host.
        mesh = Mesh(np.asarray(jax.devices()[:1]), (sharding.AXIS,))
    devices = mesh.size if mesh is not None else 1
    for path, variable in nnx.to_flat_state(state):
        for size, name in zip(variable.shape, variable.get_metadata("axes"), strict=True):
            if name is not None:
                sharding.check_divides(f"{'.'.join(map(str, path))} dimension '{name}'", size, devices)
    return Model(config, graphdef, mesh, lora, attention, remat, expert_load, prefix_store, kernels)


def param_specs(config: ModelConfig) -> Params:
    """PartitionSpec of every base parameter, as a nested dict like the base weights."""
    _, state = abstract(config)
    specs = {path: sharding.spec(v.get_metadata("axes")) for path, v in nnx.to_flat_state(state)}
    return _nest(specs)


def param_shapes(config: ModelConfig) -> Params:
    """ShapeDtypeStruct of every base parameter, as a nested dict."""
    _, state = abstract(config)
    return _nest({path: jax.ShapeDtypeStruct(v.shape, v.dtype) for path, v in nnx.to_flat_state(state)})


def _nest(flat: dict[tuple[Any, ...], Any]) -> Params:
    nested: Params = {}
    for path, value in flat.items():
        node = nested
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return nested


HOST_DRAW = 1 << 22  # numbers


def init_params(config: ModelConfig, seed: int, *, mesh: Mesh | None = None) -> Params:
    """Random base weights, each where it will lie; a parameter depends on the seed and its name, not on the mesh.

    Small ones are drawn on the host, because a program for each of so many shapes would compile for longer than the
    draws take; large ones on the devices that hold them.
    """
    drawn = {}
    for path, variable in nnx.to_flat_state(abstract(config)[1]):
        shape, dtype, init = variable.shape, variable.dtype, variable.get_metadata("init")
        spec = sharding.spec(variable.get_metadata("axes"))
        out = sharding.named(mesh, spec)
        name = zlib.crc32(repr(path).encode())
        if init in ("ones", "zeros"):
            drawn[path] = jax.device_put(np.full(shape, init == "ones", dtype), out)
        elif math.prod(shape) <= HOST_DRAW:
            own = np.random.Generator(np.random.Philox(key=[seed, name]))
            drawn[path] = jax.device_put((init * own.standard_normal(shape, np.float32)).astype(dtype), out)
        else:
            key = jax.random.fold_in(jax.random.key(seed), name)
            drawn[path] = draw.normal(key, shape=shape, dtype=dtype, std=init, mesh=mesh, spec=spec)
    return _nest(drawn)
