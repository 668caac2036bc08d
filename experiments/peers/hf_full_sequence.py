"""The peer: the same GRPO step through Hugging Face transformers and PEFT, the whole sequence of each member at once.

python experiments/peers/hf_full_sequence.py --dir=DIR

Needs the `hf` extra and nothing of longstraw_jax. DIR is what `compare_peer.py ours` wrote; this adds peer.json, and
peer.npz: log-probabilities and gradients of the first length. What a careful user would choose: one member at a time
with its gradients added up, gradient checkpointing, logits of the response alone, no cache, SDPA.

How memory grows with a sequence of T tokens, as read in transformers 5.24 (modeling_glm_moe_dsa.py): a full layer's
indexer holds relu(q . k) of every head in fp32, twice while it is scaled: 8 x index_n_heads x T^2 bytes, 256 T^2 at
GLM-5.2's 32 heads. Each layer makes a dense mask [T, T] from the selection, and SDPA runs over all T keys of
per-head keys and values. Eager attention would add 6 x num_attention_heads x T^2 bytes. flash-mla has no gradient. For
adapted experts PEFT adds the update to a copy of a layer's whole expert stack and takes a gradient of that size.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import sys
import tempfile
import time

import numpy as np
import peft
import torch
import transformers

PACKAGES = ("torch", "transformers", "peft", "accelerate")
CLIP_LOW, CLIP_HIGH, MAX_GRAD_NORM = 0.2, 0.28, 1.0
FACTS = "peer.json"
ARRAYS = "peer.npz"


def load(folder, device, attention, experts):
    """The checkpoint with its adapters, ready to train."""
    options = {"experts_implementation": experts} if experts else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "checkpoint", dtype="auto", attn_implementation=attention, device_map={"": device}, **options
    )
    model = peft.PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def response_logprobs(model, prompt, response):
    """Log-probability of each response token, fp32 [T]."""
    ids = torch.cat([prompt, response])[None]
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=response.numel() + 1).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1).gather(1, response[:, None])[:, 0]


def add_member(model, prompt, response, advantage, count):
    """Adds the gradients of one member's loss; its log-probabilities. Of the old policy they are the policy's own."""
    logp = response_logprobs(model, prompt, response)
    ratio = torch.exp(logp - logp.detach())
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    loss = -torch.minimum(ratio * advantage, clipped * advantage).sum() / count
    loss.backward()
    return logp.detach()


def step(model, optimizer, prompt, responses, advantages):
    """One optimizer step over the group."""
    for response, advantage in zip(responses, advantages, strict=True):
        add_member(model, prompt, response, float(advantage), responses.numel())
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class Meter:
    """Peak bytes and seconds of a piece of work on a device; None where it did not fit."""

    def __init__(self, device):
        self.cuda = device.startswith("cuda")
        self.source = "torch.cuda.max_memory_allocated" if self.cuda else "peak resident set of the process"

    def run(self, work):
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        started = time.perf_counter()
        try:
            work()
            if self.cuda:
                torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return None
        return {"seconds": time.perf_counter() - started, "peak_bytes": self.peak()}

    def peak(self):
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def longest(fits, lengths, resolution):
    """The longest length that fits: up the list to the first that does not, then halves to `resolution` tokens.

    Returns:
      The longest that fitted and the shortest that did not; 0 where none did, None where all did.
    """
    good, bad = 0, None
    for length in lengths:
        if not fits(length):
            bad = length
            break
        good = length
    while bad is not None and good and bad - good > resolution:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good, bad


def gradients(model):
    """Name in an adapter file -> fp32 gradient."""
    return {
        name.replace(".default.", "."): parameter.grad.float().cpu().numpy()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }


def write_whole(path, write):
    """Writes beside the path, then renames."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        write(file)
    os.replace(file.name, path)


def run(values):
    """Measures everything that values ask for and writes it as it comes."""
    folder = pathlib.Path(values.dir)
    rows = np.load(folder / "rows.npz")
    device = values.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    meter, facts = Meter(device), json.loads((folder / "slice.json").read_text())
    started = time.perf_counter()
    model = load(folder, device, values.attention, values.experts_implementation)
    prompt, responses = (torch.from_numpy(rows[name]).long().to(device) for name in ("prompt", "responses"))
    report = {
        "claim": "capacity",
        "peer": "transformers + PEFT, whole sequence of each member",
        "complete": False,
        "slice": facts,
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if meter.cuda else "cpu",
        "memory_source": meter.source,
        "attention": model.config._attn_implementation,
        "experts": getattr(model.config, "_experts_implementation", None),
        "load_seconds": time.perf_counter() - started,
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "steps": [],
        "tried": [],
    }

    def write():
        write_whole(folder / FACTS, lambda file: file.write((json.dumps(report, indent=1) + "\n").encode()))

    def say(row):
        print(json.dumps(row), flush=True)
        write()

    lengths = sorted(n for n in facts["lengths"] if n <= prompt.numel())
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0
    )
    first = lengths[0]
    group = facts["groups"][0]

    def whole_group():
        found = [
            add_member(model, prompt[:first], response, float(advantage), responses[:group].numel())
            for response, advantage in zip(responses[:group], rows[f"advantages_{group}"], strict=True)
        ]
        arrays = gradients(model) | {"logprobs": torch.stack(found).cpu().numpy()}
        write_whole(folder / ARRAYS, lambda file: np.savez(file, **arrays))

    if meter.run(whole_group) is None:
        raise MemoryError(f"{first} tokens do not fit: nothing to compare")
    model.zero_grad(set_to_none=True)

    def fits(length):
        # Token ids repeat past the prepared prompt: what they are does not change the memory.
        ids = prompt.repeat(-(-length // prompt.numel()))[:length]
        found = meter.run(lambda: add_member(model, ids, responses[0], 1.0, responses[0].numel()))
        model.zero_grad(set_to_none=True)
        report["tried"].append({"tokens": length, "fits": found is not None} | (found or {}))
        say(report["tried"][-1])
        return found is not None

    ceiling = sorted(set(lengths) | set(values.ceiling))
    good, bad = longest(fits, ceiling, values.resolution)
    report["longest_tokens"], report["shortest_refused"] = good, bad
    for length in lengths:
        for size in facts["groups"]:
            if length > good:
                continue
            found = meter.run(
                lambda length=length, size=size: step(
                    model, optimizer, prompt[:length], responses[:size], rows[f"advantages_{size}"]
                )
            )
            report["steps"].append({"tokens": length, "group": size, "fits": found is not None} | (found or {}))
            model.zero_grad(set_to_none=True)
            say(report["steps"][-1])
    report["complete"] = True
    write()


def integers(text):
    return [int(x) for x in text.split(",") if x]


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", required=True, help="folder that compare_peer.py prepare wrote")
    parser.add_argument("--device", default="", help="torch's; by default the first GPU, else the CPU")
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "eager"])
    parser.add_argument("--experts_implementation", default="", help="transformers'; by default its own choice")
    parser.add_argument("--ceiling", type=integers, default=[65536], help="lengths past the slice's to try for memory")
    parser.add_argument("--resolution", type=int, default=1024, help="tokens to which the longest length is found")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        run(parse())
    except (OSError, ValueError, MemoryError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
