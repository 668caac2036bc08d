"""Low-rank adapters: fp32, apart from the base weights, one pair per routed expert.

Adapters are a nested dict, and hold what their targets match and nothing else:

    {"segments": {"<segment>": {"<layer>": {"<module path>": {"a": [R, in, r], "b": [R, r, out]}}}},
     "lm_head": {"a": [D, r], "b": [r, V]}}

R counts the segment's repetitions, a layer its place in the group; a module path is relative to its layer, as
in `config.LORA_TARGETS`. Routed experts have pairs of their own, [R, E, in, r] and [R, E, r, out], that lie with
the experts; the rest lies on every device.
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from longstraw_jax import sharding
from longstraw_jax.config import LORA_TARGETS, LoraConfig, ModelConfig
from longstraw_jax.model import decoder
from longstraw_jax.types import Model, Params


class LoraError(ValueError):
    """Adapters that do not fit the model; names the target or the leaf, and what is accepted."""


class Site(NamedTuple):
    """One adapted module, stacked over its segment's repetitions.

    Attributes:
      path: keys of its pair in the adapters: ("segments", segment, layer, module) or ("lm_head",).
      weight_path: keys of its matrix in the base weights.
      target: the name that selected it.
      rank: r.
      lead: stacked axes of the pair: [R], [R, E] for routed experts, none for lm_head.
      d_in, d_out: sizes of the matrix [in, out].
    """

    path: tuple[str, ...]
    weight_path: tuple[str | int, ...]
    target: str
    rank: int
    lead: tuple[int, ...]
    d_in: int
    d_out: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"a": (*self.lead, self.d_in, self.rank), "b": (*self.lead, self.rank, self.d_out)}

    @property
    def routed(self) -> bool:
        return self.target == "routed"


def _leaf(tree: Any, path: tuple[Any, ...]) -> Any | None:
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return None
        tree = tree[key]
    return tree


def _put(tree: Params, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _candidates(config: ModelConfig, module: str) -> Iterator[tuple[tuple[str, ...], tuple[str | int, ...]]]:
    """Where a module path may occur: its keys in the adapters and in the base weights."""
    if module == "lm_head":
        yield ("lm_head",), ("lm_head", "weight")
        return
    tail = tuple(module.split(".")) + (() if module.startswith("mlp.experts.") else ("weight",))
    for s, segment in enumerate(config.segments()):
        for j in range(len(segment.runs)):
            yield ("segments", str(s), str(j), module), ("segments", s, "layers", j, *tail)


@functools.lru_cache(maxsize=16)
def sites(config: ModelConfig, lora: LoraConfig) -> tuple[Site, ...]:
    """Every module that the targets match.

    Raises:
      LoraError: a target that matches no module of this model, with the targets that do.
    """
    weights = decoder.param_shapes(config)
    found: dict[str, list[Site]] = {name: [] for name in LORA_TARGETS}
    ranks = {name: rank for name, rank, _ in lora.targets}
    for name, modules in LORA_TARGETS.items():
        for module in modules:
            for path, weight_path in _candidates(config, module):
                if (weight := _leaf(weights, weight_path)) is not None:
                    *lead, d_in, d_out = weight.shape
                    site = Site(path, weight_path, name, ranks.get(name, 0), tuple(lead), d_in, d_out)
                    found[name].append(site)
    for name in ranks:
        if not found[name]:
            matching = sorted(target for target, places in found.items() if places)
            raise LoraError(f"lora.targets={name!r} matches no module of this model; accepted: {matching}")
    return tuple(site for name in ranks for site in found[name])


def _per_leaf(config: ModelConfig, lora: LoraConfig, make: Callable[[Site, str], Any]) -> Params:
    """A tree like the adapters, with make(site, "a" or "b") at its leaves."""
    tree: Params = {}
    for site in sites(config, lora):
        _put(tree, site.path, {name: make(site, name) for name in ("a", "b")})
    return tree


def adapter_shapes(config: ModelConfig, lora: LoraConfig) -> Params:
    """ShapeDtypeStruct of every leaf, fp32. Raises LoraError as `sites` does."""
    return _per_leaf(config, lora, lambda site, name: jax.ShapeDtypeStruct(site.shapes[name], jnp.float32))


def _resting_spec(site: Site) -> PartitionSpec:
    return sharding.spec((None, "expert")) if site.routed else PartitionSpec()


def adapter_specs(config: ModelConfig, lora: LoraConfig) -> Params:
    """PartitionSpec of every leaf at rest: routed experts sharded on E, the rest whole everywhere."""
    return _per_leaf(config, lora, lambda site, name: _resting_spec(site))


def stored_specs(model: Model, adapters: Params | None) -> Params | None:
    """`adapter_specs` for a step that takes adapters or None.

    Raises:
      LoraError: adapters for a model without LoraConfig.
    """
    if adapters is None:
        return None
    if model.lora is None:
        raise LoraError("adapters were given, model.lora is None; accepted: a LoraConfig in make_model(lora=...)")
    return adapter_specs(model.config, model.lora)


def init_adapters(config: ModelConfig, lora: LoraConfig, seed: int, *, mesh: Mesh | None = None) -> Params:
    """New adapters, made where they will lie: the update is zero until B moves.

    As PEFT's default (`LoraLayer.reset_lora_parameters`): A is kaiming_uniform with a = sqrt(5), that is
    uniform over +-1 / sqrt(in); B is zero. A leaf's draw depends on the seed and its own name alone, not on the
    mesh or the other targets.

    Raises:
      LoraError: a target matches nothing.
      ShardingError: the mesh does not divide n_routed_experts and "routed" is a target.
    """
    if mesh is not None and any(site.routed for site in sites(config, lora)):
        sharding.check_divides("n_routed_experts", config.n_routed_experts, mesh.size)

    def draw(site, name):
        # On the host: programs for so many shapes would compile for longer than the draws take.
        value = np.zeros(site.shapes[name], np.float32)
        if name == "a":
            own = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(".".join(site.path).encode())]))
            value = np.float32(site.d_in**-0.5) * (2 * own.random(site.shapes["a"], np.float32) - 1)
        where = sharding.named(mesh, _resting_spec(site))
        return jax.make_array_from_callback(value.shape, where, lambda at: value[at])

    return _per_leaf(config, lora, draw)


def trainable_table(config: ModelConfig, lora: LoraConfig) -> list[dict[str, Any]]:
    """A row per trainable leaf, as the receipt stores it: name, shape, parameters, target."""
    return [
        {
            "name": ".".join((*site.path, name)),
            "shape": list(shape),
            "parameters": math.prod(shape),
            "target": site.target,
        }
        for site in sites(config, lora)
        for name, shape in site.shapes.items()
    ]


def count_parameters(config: ModelConfig, lora: LoraConfig) -> int:
    """Trainable numbers in all."""
    return sum(row["parameters"] for row in trainable_table(config, lora))


def format_table(rows: list[dict[str, Any]]) -> str:
    """`trainable_table` as text: a line per leaf, then the sum."""
    width = max(len(row["name"]) for row in rows)
    lines = [f"{r['name']:<{width}}  {r['target']:<8} {r['parameters']:>14,}  {r['shape']}" for r in rows]
    return "\n".join([*lines, f"{'total':<{width}}  {'':<8} {sum(r['parameters'] for r in rows):>14,}"])


def weight_decay_mask(adapters: Params) -> Params:
    """True where optax should decay: B alone.

    Decaying B pulls the policy towards the base model. Decaying A while B is near zero would only shrink the
    random projection, and with it the step size.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "b", adapters)


def _is_routed(path: tuple[jax.tree_util.DictKey, ...]) -> bool:
    return any(key.key in LORA_TARGETS["routed"] for key in path)


def per_device_specs(config: ModelConfig, lora: LoraConfig) -> Params:
    """PartitionSpec of every leaf of `per_device`."""
    copied = PartitionSpec(sharding.AXIS)
    return _per_leaf(config, lora, lambda site, name: _resting_spec(site) if site.routed else copied)


@functools.partial(jax.jit, static_argnums=1)
def per_device(adapters: Params, mesh: Mesh | None) -> Params:
    """A copy per device of what all devices share, so that every device has a gradient of its own.

    Differentiating this tree instead of the replicated one leaves the sum over devices to one `finalise` after
    the last member, instead of one all-reduce a member.

    Returns:
      Shared leaves as [devices, ...], sharded over the leading axis ([1, ...] without a mesh); experts as they
      are, because the tokens of all devices already travel to them.
    """

    def copy(path, x):
        if _is_routed(path):
            return x
        if mesh is None:
            return x[None]
        copies = jnp.broadcast_to(x, (mesh.size, *x.shape))
        return jax.lax.with_sharding_constraint(copies, NamedSharding(mesh, PartitionSpec(sharding.AXIS)))

    return jax.tree_util.tree_map_with_path(copy, adapters)


def local(adapters: Params) -> Params:
    """One device's share of `per_device` as plain adapters; for use inside the mapped body."""
    return jax.tree_util.tree_map_with_path(lambda path, x: x if _is_routed(path) else x[0], adapters)


@functools.partial(jax.jit, static_argnums=1)
def finalise(grads: Params, mesh: Mesh | None) -> Params:
    """Gradients of `per_device` adapters as gradients of the adapters: the one reduction over the mesh.

    Returns:
      Shared leaves summed over the leading axis, whole on every device; experts as they are.
    """

    def reduce(path, x):
        if _is_routed(path):
            return x
        total = x.sum(0)
        if mesh is None:
            return total
        return jax.lax.with_sharding_constraint(total, NamedSharding(mesh, PartitionSpec()))

    return jax.tree_util.tree_map_with_path(reduce, grads)


@functools.partial(jax.jit, static_argnames="scale")
def _merged(weight, a, b, scale):
    """W + scale A B in W's dtype, the largest change asked for and the largest that rounding lost."""

    def one(args):
        w, a, b = args
        change = scale * (a @ b)
        exact = w.astype(jnp.float32) + change
        rounded = exact.astype(w.dtype)
        return rounded, jnp.abs(change).max(), jnp.abs(exact - rounded.astype(jnp.float32)).max()

    # A layer at a time: the fp32 sum of all repetitions would be twice the weights.
    stacked = tuple(x if weight.ndim > 2 else x[None] for x in (weight, a, b))
    merged, change, lost = jax.lax.map(one, stacked)
    return merged.reshape(weight.shape), change.max(), lost.max()


def merge(base: Params, adapters: Params, config: ModelConfig, lora: LoraConfig) -> tuple[Params, list[dict[str, Any]]]:
    """Adds the updates to a copy of the base weights; training and export never do.

    In bf16 a change below half a unit in the last place of its weight is lost: keep the report with the result.

    Returns:
      The merged weights, each in its weight's dtype and place; a row per module: name, dtype, max_change
      (largest |alpha / r A B|) and max_lost (largest difference between the fp32 sum and what the dtype kept).

    Raises:
      LoraError: the adapters are not those of (config, lora).
    """
    check_adapters(adapters, config, lora)
    scales = lora.scales()
    merged, report = jax.tree.map(lambda x: x, base), []  # new containers, the same arrays
    for site in sites(config, lora):
        weight, pair = _leaf(base, site.weight_path), _leaf(adapters, site.path)
        new, change, lost = _merged(weight, pair["a"], pair["b"], scales[site.path[-1]])
        _put(merged, site.weight_path, jax.device_put(new, weight.sharding))
        report.append(
            {
                "name": ".".join(site.path),
                "dtype": str(weight.dtype),
                "max_change": float(change),
                "max_lost": float(lost),
            }
        )
    return merged, report


def check_adapters(adapters: Params, config: ModelConfig, lora: LoraConfig) -> None:
    """Raises LoraError, listing what differs, unless shapes and dtypes are those of `adapter_shapes`."""

    def described(tree):
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {".".join(key.key for key in path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}

    found, expected = described(adapters), described(adapter_shapes(config, lora))
    wrong = [
        f"{name}: found {found.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if wrong:
        raise LoraError("adapters do not fit the model and its lora.targets: " + "; ".join(wrong))
