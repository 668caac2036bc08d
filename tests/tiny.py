"""One tiny model and prompt on meshes of 1, 8 and 32 devices; programs here compile once for all tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from tiny_models import tiny_config, tiny_params

from longstraw_jax import forward, lora, replay, sharding
from longstraw_jax.config import LORA_TARGETS, LoraConfig
from longstraw_jax.model import decoder
from longstraw_jax.prefix.capture import capture
from longstraw_jax.types import Model, Params, PrefixState

CONFIG = tiny_config(
    vocab_size=288,
    hidden_size=64,
    num_attention_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=12,
    v_head_dim=16,
    index_head_dim=16,
    index_topk=8,
    mlp_layer_types=[
        "dense",
        "dense",
        "sparse",
        "sparse",
        "sparse",
    ],  # three bodies to compile for five layers
    intermediate_size=64,
    moe_intermediate_size=32,
    n_routed_experts=32,
    rope_parameters={"rope_theta": 8e6, "rope_type": "default"},
    max_position_embeddings=192,
    initializer_range=0.08,  # what a query selects shows in its output, and round-off stays well below 1e-5
)
LORA = LoraConfig(tuple((name, 2, 4.0) for name in sorted(LORA_TARGETS)))
MESHES = (1, 8, 32)

S, T = 150, 32  # prompt and longest response
CAPACITY = 256  # pages for longer prompts than S
CHUNK = 64
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, S + T).astype(np.int32)
BOUNDARY = int(TOKENS[S - 1])
RESPONSE = TOKENS[S:].tolist()
FINGERPRINT = jnp.zeros((2,), jnp.uint32)


@functools.cache
def model(devices: int) -> Model:
    return decoder.make_model(CONFIG, mesh=sharding.make_mesh(devices), lora=LORA)


def _place(tree: Params, specs: Params, devices: int) -> Params:
    mesh = sharding.make_mesh(devices)
    where = jax.tree.map(lambda spec: sharding.named(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
    # From the host: resharding device arrays compiles a program a shape.
    return jax.device_put(jax.tree.map(np.asarray, tree), where)


@functools.cache
def base(devices: int) -> Params:
    return _place(tiny_params(CONFIG), decoder.param_specs(CONFIG), devices)


@functools.cache
def adapters(devices: int) -> Params:
    """A and B of every target away from zero, the same values on every mesh."""
    rng = np.random.default_rng(1)
    shapes = lora.adapter_shapes(CONFIG, LORA)
    values = jax.tree.map(lambda x: (0.1 * rng.standard_normal(x.shape)).astype(np.float32), shapes)
    return _place(values, lora.adapter_specs(CONFIG, LORA), devices)


def captured(devices: int, tokens=TOKENS[: S - 1], *, frozen=False, **options) -> PrefixState:
    """The resident state of `tokens`; frozen: captured without the adapters."""
    options = {"chunk": CHUNK, "capacity": CAPACITY, "fingerprint": FINGERPRINT} | options
    used = None if frozen else adapters(devices)
    return capture(model(devices), base(devices), used, tokens, **options)


@functools.cache
def prefix(devices: int, frozen: bool = False) -> PrefixState:
    return captured(devices, frozen=frozen)


def members(responses, boundary: int = BOUNDARY):
    """Inputs, targets and lengths of up to four responses: always four rows of T, unused ones of length 0."""
    return replay.member_inputs(boundary, [*responses, *[[]] * (4 - len(responses))], T)


def score(devices: int, state: PrefixState, responses, *, boundary: int = BOUNDARY, temperature: float = 1.0):
    """Log-probabilities and entropies [G, T] of up to four responses, 0 past a response's end."""
    inputs, targets, lengths = members(responses, boundary)
    args = (model(devices), base(devices), adapters(devices), state, inputs, targets, lengths, temperature)
    inside = (np.arange(T) < lengths[:, None])[: len(responses)]
    return tuple(np.where(inside, np.asarray(x)[: len(responses)], 0.0) for x in replay.score(*args))


@functools.cache
def _replay_program(devices: int):
    the_model = model(devices)

    def loss(per_device, base, state, inputs, targets, length, weights):
        logprobs, _ = replay.member_logprobs(
            the_model, base, per_device, state, inputs, targets, length, per_device=True
        )
        return jnp.where(jnp.arange(T) < length, weights * logprobs, 0.0).sum()

    return jax.jit(jax.value_and_grad(loss))


def replay_grad(devices: int, used: Params, state: PrefixState, member, weights) -> tuple[float, Params]:
    """sum(weights * log-probs) of a row of `members` against the pages, and its gradient by the adapters."""
    mesh = model(devices).mesh
    value, grads = _replay_program(devices)(
        lora.per_device(used, mesh), base(devices), state, *member, weights
    )
    return float(value), jax.tree.map(np.asarray, lora.finalise(grads, mesh))


@functools.cache
def _full_program():
    def loss(used, base, ids, weights, gate, detach):
        logprobs, _ = forward.logprobs(model(1), base, used, ids, gate=gate[None], detach=detach[None])
        return (weights * logprobs).sum(), logprobs

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def full_grad(ids, weights, *, gate=None, detach=None):
    """sum(weights * log-probs of ids[1:]), its gradient and the log-probs, in one pass over the sequence."""
    everywhere, nowhere = np.ones(len(ids), bool), np.zeros(len(ids), bool)
    (value, logprobs), grads = _full_program()(
        adapters(1),
        base(1),
        ids,
        weights,
        everywhere if gate is None else gate,
        nowhere if detach is None else detach,
    )
    return float(value), jax.tree.map(np.asarray, grads), np.asarray(logprobs)


@functools.cache
def full() -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
    """Logits [S + T, V] of TOKENS and every layer's intermediates, from one pass with nothing resident."""

    @jax.jit
    def run(base, used):
        hidden, layers = forward.forward(model(1), base, used, TOKENS[None], collect=True)
        return forward.logits(model(1), base, used, hidden)[0], layers

    return jax.tree.map(np.asarray, run(base(1), adapters(1)))


def full_logprobs(temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of TOKENS[1:] from `full`."""
    logprobs = jax.nn.log_softmax(full()[0][:-1] / temperature)
    return np.asarray(logprobs)[np.arange(len(TOKENS) - 1), TOKENS[1:]]


def difference(found: Params, wanted: Params) -> float:
    """Largest difference of two trees of gradients, in units of each leaf's largest entry."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
