"""How much of the policy gradient is the prompt's own: `detached` beside `exact`, by prompt length, target and layer.

python experiments/prefix_gradient.py --tokens=4096,16384,65536,262144 --out=runs/prefix_gradient

One group is replayed for each length; that gives the `detached` gradient, and the reverse pass over the prompt adds the
rest to make the `exact` one. The adapters start where training starts (B = 0, unless --b_std moves them): there an
adapter's gradient does not depend on the other adapters, so a target's row is also that of a policy with adapters on
this target alone. --checkpoint takes real weights and --prompt_file real text (prompt.npy of build_prompt.py); without
them weights are random at the checkpoint's scale and tokens are random. Responses always are. What random weights tell
is of a model that has learnt nothing to attend to: how the two gradients part there need not hold for a trained one.
"""

import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import model_slice
import numpy as np
from absl import app, flags

from longstraw_jax import command, exact_gradient, lora, replay, rollout, train
from longstraw_jax import config as config_lib
from longstraw_jax.evidence import kernels, receipt, result_plots
from longstraw_jax.io import hf_checkpoint
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.model import decoder
from longstraw_jax.prefix import capture, refresh
from longstraw_jax.rl import advantages
from longstraw_jax.types import Model, Params


def figures(detached: list[np.ndarray], exact: list[np.ndarray]) -> dict[str, float | None]:
    """Of the same tensors' two gradients, as one vector each; sums in fp64.

    Returns:
      cosine between them; relative_l2, the norm of the prompt's own term (exact - detached) by that of the whole;
      prompt_share, that term's part of the two terms' summed squares; both norms. None where nothing is divided by.
    """
    dot = found = whole = apart = 0.0
    for d, e in zip(detached, exact, strict=True):
        d, e = np.asarray(d, np.float64), np.asarray(e, np.float64)
        dot, found, whole = dot + float((d * e).sum()), found + float((d * d).sum()), whole + float((e * e).sum())
        apart += float(((e - d) ** 2).sum())
    return {
        "cosine": dot / (found * whole) ** 0.5 if found and whole else None,
        "relative_l2": (apart / whole) ** 0.5 if whole else None,
        "prompt_share": apart / (apart + found) if apart + found else None,
        "norm_detached": found**0.5,
        "norm_exact": whole**0.5,
    }


def pieces(model: Model, grads: Params) -> Iterator[tuple[str, int | None, np.ndarray]]:
    """Every adapter gradient by (target, layer): lm_head's has no layer. Layers are those of the configuration."""
    segments = model.config.segments()
    for site in lora.sites(model.config, model.lora):
        node = grads
        for key in site.path:
            node = node[key]
        for stacked in (node["a"], node["b"]):
            if site.path[0] != "segments":
                yield site.target, None, stacked
                continue
            segment, run = segments[int(site.path[1])], int(site.path[2])
            for index in range(stacked.shape[0]):
                yield site.target, segment.layer_index(index, run), stacked[index]


def compare(model: Model, detached: Params, exact: Params) -> dict[str, Any]:
    """`figures` of all adapters, of each target and of each layer."""
    both = list(zip(pieces(model, detached), pieces(model, exact), strict=True))

    def of(chosen):
        some = [(d[2], e[2]) for d, e in both if chosen(*d[:2])]
        return figures([d for d, _ in some], [e for _, e in some])

    targets = sorted({target for (target, _, _), _ in both})
    layers = sorted({layer for (_, layer, _), _ in both if layer is not None})
    return {
        "all": of(lambda target, layer: True),
        "targets": {name: of(lambda target, layer, name=name: target == name) for name in targets},
        "layers": {str(number): of(lambda target, layer, n=number: layer == n) for number in layers},
    }


def group_of(config: config_lib.ModelConfig, boundary: int, size: int, response: int, seed: int) -> rollout.Group:
    """Seeded random responses with advantages of both signs, at ratio 1."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (size, response), np.int32)
    rewards = jnp.asarray(rng.random(size), jnp.float32)
    gains = np.asarray(advantages.group_advantages(rewards, jnp.zeros(size, jnp.int32), num_groups=1))
    inputs, targets, lengths = replay.member_inputs(boundary, tokens.tolist(), response)
    nothing = np.zeros(inputs.shape, np.float32)
    return rollout.Group(inputs, targets, lengths, np.ones(inputs.shape, bool), gains, None, nothing, None)


def gradients(
    model: Model,
    policy: rollout.PolicyConfig,
    base: Params,
    adapters: Params,
    prompt: np.ndarray,
    group: rollout.Group,
) -> tuple[Params, Params]:
    """`detached` and `exact` gradients of the mean loss, fp32 on the host, from one capture and one replay a member."""
    words = jnp.zeros((2,), jnp.uint32)  # nobody else sees this prefix
    args = (model, base, adapters, prompt[:-1])
    prefix = capture.capture(*args, chunk=policy.chunk, capacity=policy.capacity, fingerprint=words)
    resident, copies = refresh.Resident(prompt, prefix, captured_at=0), lora.per_device(adapters, model.mesh)
    page_grads = exact_gradient.zero_page_grads(model, prefix)
    total, page_grads = train.add_group(model, policy, base, copies, prefix, group, None, page_grads)
    count = float(total.loss.count)

    def mean(total):
        return jax.tree.map(lambda g: np.asarray(g) / count, lora.finalise(total.grads, model.mesh))

    detached = mean(total)  # before `total` is donated
    return detached, mean(train.add_prompt(model, policy, base, copies, resident, page_grads, total))


def moved(model: Model, seed: int, b_std: float) -> Params:
    """Adapters as training starts them, B then drawn with a spread of b_std."""
    rng = np.random.default_rng(seed)

    def draw(path, x):
        return jnp.asarray(b_std * rng.standard_normal(x.shape), jnp.float32) if path[-1].key == "b" else x

    start = lora.init_adapters(model.config, model.lora, seed)
    return jax.tree_util.tree_map_with_path(draw, start) if b_std else start


def lengths_of(given: list[str]) -> list[int]:
    """Raises ValueError for anything but integers above 1."""
    if not given or not all(x.strip().isdecimal() and int(x) > 1 for x in given):
        raise ValueError(f"--tokens={','.join(given)}; accepted: integers above 1, as 4096,16384")
    return sorted({int(x) for x in given})


def read_prompt(path: str, tokens: int) -> np.ndarray:
    """The first token ids of a .npy file. Raises ValueError for another array or too short a one."""
    found = np.load(path)
    if found.ndim != 1 or found.dtype.kind not in "iu" or found.size < tokens:
        raise ValueError(
            f"--prompt_file={path} holds {found.dtype}{list(found.shape)}; accepted: [{tokens}] ids or more"
        )
    return found[:tokens].astype(np.int32)


def run(values: Any) -> dict[str, Any]:
    """The receipt, written as each length is done. Raises ValueError for bad input."""
    lengths = lengths_of(values.tokens)
    if values.group < 2:
        raise ValueError(f"--group={values.group}; accepted: 2 or more")
    positions = max(lengths) + values.response
    if values.checkpoint:
        config = config_lib.load_model_config(values.checkpoint)
        config.check_length(positions)
        _, base = hf_checkpoint.load(values.checkpoint, config)
        weights = values.checkpoint
    else:
        raw = model_slice.load(values.architecture, values.layers, values.experts) | {"dtype": values.dtype}
        config = model_slice.model_config(raw, positions)
        base = decoder.init_params(config, values.seed)
        weights = f"random, normal of {config.initializer_range}, {config.num_hidden_layers} layers"
    model = decoder.make_model(config, lora=model_slice.adapters(config, values.rank), kernels=values.kernels)
    adapters = moved(model, values.seed + 1, values.b_std)
    prompt = read_prompt(values.prompt_file, max(lengths)) if values.prompt_file else None
    if prompt is None:
        prompt = np.random.default_rng(values.seed + 2).integers(0, config.vocab_size, max(lengths), np.int32)
    # One capacity for all lengths, so that they share compiled programs.
    policy = rollout.PolicyConfig(
        eos_ids=(), capacity=max(lengths), mode="exact", group=values.group, max_new_tokens=values.response,
        chunk=values.chunk,
    )  # fmt: skip
    out = pathlib.Path(values.out)
    result = {
        "claim": "gradient",
        "complete": False,
        **receipt.made_by(),
        "weights": weights,
        "prompt": values.prompt_file or "random tokens",
        "dtype": config.dtype,
        "experts": config.n_routed_experts,
        "flags": {name: getattr(values, name) for name in FLAGS},
        "kernels": kernels.implementations(model),
        "lengths": [],
    }
    for tokens in lengths:
        started = time.perf_counter()
        group = group_of(config, int(prompt[tokens - 1]), values.group, values.response, values.seed + 3)
        both = gradients(model, policy, base, adapters, prompt[:tokens], group)
        row = {"tokens": tokens, "seconds": time.perf_counter() - started} | compare(model, *both)
        result["lengths"].append(row)
        result["complete"] = tokens == lengths[-1]
        print(line(row), flush=True)
        write_whole(out / "prefix_gradient.json", (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    write_whole(out / "prefix_gradient.png", result_plots.prefix_gradient(result))
    return result


def line(row: dict[str, Any]) -> str:
    """A length for the eye."""
    found = row["all"]
    told = {name: "-" if found[name] is None else f"{found[name]:.4f}" for name in ("cosine", "relative_l2")}
    return (
        f"{row['tokens']:>9} tokens  cosine {told['cosine']}  prompt's term / whole {told['relative_l2']}  "
        f"{row['seconds']:.1f} s"
    )


FLAGS = (
    "tokens", "checkpoint", "prompt_file", "layers", "experts", "group", "response", "chunk", "rank", "b_std", "dtype",
    "kernels", "seed",
)  # fmt: skip


def main(_: list[str]) -> None:
    values = flags.FLAGS
    try:
        run(values)
    except (ValueError, OSError) as error:
        command.fail(error)
    print(f"receipt: {pathlib.Path(values.out) / 'prefix_gradient.json'}")


if __name__ == "__main__":
    flags.DEFINE_list("tokens", ["4096", "16384", "65536", "262144"], "Prompt lengths, the boundary token included.")
    flags.DEFINE_string("checkpoint", "", "A Hugging Face folder; without one the slice below gets random weights.")
    flags.DEFINE_string("prompt_file", "", "A .npy of token ids; without one they are random.")
    flags.DEFINE_integer("layers", 4, "Layers: a slice from the first all-sparse group on, or all.")
    flags.DEFINE_integer("experts", 64, "Routed experts a layer; 0: all.")
    flags.DEFINE_integer("group", 2, "Responses.")
    flags.DEFINE_integer("response", 64, "Tokens of each response.", lower_bound=1)
    flags.DEFINE_integer("chunk", 4096, "Tokens a capture step.", lower_bound=1)
    flags.DEFINE_integer("rank", 8, "Rank of every adapter.", lower_bound=1)
    flags.DEFINE_float("b_std", 0.0, "Spread of the adapters' B; 0: as training starts.", lower_bound=0.0)
    flags.DEFINE_enum("dtype", "bfloat16", config_lib.DTYPES, "Of random weights.")
    flags.DEFINE_enum("kernels", "auto", ("auto", "reference"), "Implementation of the operations.")
    flags.DEFINE_integer("seed", 0, "Seed of weights; the next ones draw the rest.", lower_bound=0)
    flags.DEFINE_string("architecture", str(model_slice.ARCHITECTURE), "A Hugging Face config.json.")
    flags.DEFINE_string("out", "runs/prefix_gradient", "Folder of the receipt and the plot.")
    app.run(main, flags_parser=command.parse_flags_alone)
