"""One HTML page of a run: curves, phases, memory, samples, claims. It needs no network and runs no script."""

import html
import importlib.resources
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longstraw_jax.evidence import attended, charts, position_eval, verify
from longstraw_jax.evidence.charts import number
from longstraw_jax.evidence.figures import reward_means, scored_rewards, standard_error
from longstraw_jax.evidence.receipt import (
    CLAIMS,
    CONFIG_FILE,
    RECEIPT_FILE,
    receipt_schema_problems,
    step_schema_problems,
)
from longstraw_jax.io.metrics import STEPS_FILE, parse_strict_json, read_steps
from longstraw_jax.io.samples import read_samples, sampled_steps

MOST_SAMPLES = 8  # members shown of a step
PHASES = ("capture", "sample", "score", "replay", "reverse", "finalise")
# Where one step compiles, it would flatten all the others.
SLOW_STEP, CUT = 10, 3

Step = Mapping[str, Any]


def page(run_dir: str | os.PathLike) -> str:
    """The page of a run folder, finished or not.

    Args:
      run_dir: holds steps.jsonl; config.json, receipt.json, samples/, positions.npz and evaluations' receipts
        (positions*.json) are shown where they are.

    Raises:
      ValueError: a file of the folder is damaged or breaks its contract; names it.
      OSError: there is no steps.jsonl, or it cannot be read.
    """
    folder = Path(run_dir)
    steps = read_steps(folder / STEPS_FILE)
    if not steps:
        raise ValueError(f"{folder / STEPS_FILE} holds no steps; accepted: 1 or more")
    if problems := step_schema_problems(steps):
        raise ValueError(f"{folder / STEPS_FILE}: {problems[0]}")
    receipt = _json(folder / RECEIPT_FILE)
    # A file that holds `null` is no absent receipt.
    if (folder / RECEIPT_FILE).is_file() and (problems := receipt_schema_problems(receipt)):
        raise ValueError(f"{folder / RECEIPT_FILE}: {problems[0]}")
    name = html.escape(folder.resolve().name)
    css = importlib.resources.files(__package__).joinpath("report.css").read_text("utf-8")
    body = [
        _head(name, steps, receipt),
        _section("Claims", _claims(folder, receipt)),
        _section("Scores by position", _scores(folder)),
        _section("Learning", _learning(steps)),
        _section("Policy and update", _policy(steps)),
        _section("Time and memory", _costs(steps)),
        _section("Prompt positions that the answers attended to", _attended(folder)),
        _section("Samples", _samples(folder, steps)),
        _section("Every step", _steps_table(steps)),
        _section("Receipt", _receipt(folder, receipt)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Text of a model must not fetch or run anything, whatever the escaping missed.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{name}</title><style>{css}</style></head>\n<body>\n{''.join(body)}</body></html>\n"
    )


def shown(text: str) -> str:
    """Escaped text of a model; control characters, which HTML does not hold, as their pictures."""
    made = "".join(c if c in "\n\t" or ord(c) >= 32 and ord(c) != 127 else _picture(ord(c)) for c in text)
    return html.escape(made)


def _picture(code: int) -> str:
    return "\u2421" if code == 127 else chr(0x2400 + code)


def _json(path: Path) -> Any:
    """The file's JSON; None where there is no file."""
    if not path.is_file():
        return None
    try:
        return parse_strict_json(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>\n{inner}</section>\n" if inner else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells are HTML; columns in `numbers` stand to the right."""

    def cell(tag, place, text):
        return f'<{tag} class="number">{text}</{tag}>' if place in numbers else f"<{tag}>{text}</{tag}>"

    head = "".join(cell("th", i, html.escape(text)) for i, text in enumerate(heads))
    lines = "".join("<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{lines}</tbody></table></div>\n'


def _head(name: str, steps: Sequence[Step], receipt: Any) -> str:
    first, last = steps[0], steps[-1]
    skipped = sum(step["skipped"] for step in steps)
    means = [mean for mean in reward_means(steps) if mean is not None]
    prompts = [tokens for step in steps for tokens in step["prompt_tokens"]]
    tiles = {
        "steps": f"{len(steps)}" + (f" ({skipped} skipped)" if skipped else ""),
        "reward, first to last": f"{means[0]:.3g} → {means[-1]:.3g}" if means else "none",
        "prompt tokens": number(min(prompts)) + (f" to {number(max(prompts))}" if len(set(prompts)) > 1 else ""),
        "group": number(first["group_size"]),
        "prefix gradient": html.escape(first["mode"]),
        "peak memory": number(last["peak_bytes"], "B"),
    }
    drawn = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in tiles.items())
    about = "no receipt: the run is not finished"
    if receipt is not None:
        code, devices = receipt["code"], receipt["devices"]
        commit = code["commit"][:12] + (" with changes" if code["dirty"] else "")
        about = html.escape(
            f"{receipt['created']}, commit {commit}, {devices['count']} {devices['kind']} ({devices['platform']})"
        )
    return f'<header><h1>{name}</h1><p class="soft">{about}</p><dl class="tiles">{drawn}</dl></header>\n'


def _claims(folder: Path, receipt: Any) -> str:
    """The four claims as rows of their own, and what the receipt's verification says."""
    if receipt is None:
        return '<p class="soft">None before the receipt is written.</p>\n'
    rows = []
    given = {row["claim"]: row for row in receipt["claims"]}
    for claim in CLAIMS:
        row = given.get(claim, {"status": "not measured", "evidence": []})
        css = {"shown": " good", "not shown": " bad"}.get(row["status"], " soft")
        evidence = "<br>".join(_evidence(item, receipt) for item in row["evidence"]) or "none"
        status = f'<span class="status{css}">{html.escape(row["status"])}</span>'
        rows.append((html.escape(claim), status, evidence))
    checks = verify.verify(folder)
    wrong = [row for row in checks if row.status == verify.MISMATCH]
    left = sum(row.status == verify.NOT_CHECKED for row in checks)
    told = f"{len(checks)} checks of the receipt: {len(wrong)} mismatched, {left} not checked"
    css = "bad" if wrong else "good"
    listed = "".join(f"<p><code>{html.escape(row.check)}: {shown(row.detail)}</code></p>" for row in wrong)
    return _table(("claim", "status", "evidence"), rows) + f'<p class="{css}">{told}</p>{listed}\n'


def _evidence(item: str, receipt: Any) -> str:
    kind, _, name = item.partition("/")
    if kind != "figures" or name not in receipt["figures"]:
        return f"<code>{html.escape(item)}</code>"
    value = receipt["figures"][name]["value"]
    return f"<code>{html.escape(name)}</code> {html.escape(number(value, 'B' if name == 'peak_bytes' else ''))}"


def _numbers(steps: Sequence[Step]) -> list[int]:
    return [step["step"] for step in steps]


def _metrics(steps: Sequence[Step], *names: str) -> dict[str, list[float | None]]:
    return {name: [step["metrics"].get(name) for step in steps] for name in names}


def _learning(steps: Sequence[Step]) -> str:
    means = reward_means(steps)
    errors = [standard_error(scored_rewards([step])) or 0.0 for step in steps]
    edges = tuple([None if m is None else m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
    numbers = _numbers(steps)
    skipped = [step["step"] for step in steps if step["skipped"]]
    drawn = (
        charts.curves("Reward, mean ± standard error", numbers, {"reward": means}, band=edges, marked=skipped),
        charts.curves("Loss", numbers, {"loss": [step["loss"] for step in steps]}),
        charts.curves("KL from the reference", numbers, _metrics(steps, "kl"), unit="nats", floor=0),
        charts.curves("Entropy", numbers, _metrics(steps, "entropy"), unit="nats"),
    )
    return f'<div class="grid2">{"".join(drawn)}</div>\n'


def _policy(steps: Sequence[Step]) -> str:
    numbers = _numbers(steps)
    clipping = sorted({name for step in steps for name in step["metrics"] if name.startswith("clip_ratio/")})
    lengths = [statistics.fmean(step["response_lengths"]) for step in steps]
    drawn = (
        charts.curves(
            "Ratio of new to old policy",
            numbers,
            _metrics(steps, "ratio/mean", "ratio/max", "sampling/importance_sampling_ratio/mean"),
            floor=1,
        ),
        charts.curves("Share of clipped tokens", numbers, _metrics(steps, *clipping[: charts.SERIES]), floor=0),
        charts.curves("Gradient norm before clipping", numbers, {"norm": [s["grad_norm"] for s in steps]}, floor=0),
        charts.curves("Response length, mean", numbers, {"tokens": lengths}, unit="tokens", floor=0),
    )
    return f'<div class="grid2">{"".join(drawn)}</div>\n'


def _costs(steps: Sequence[Step]) -> str:
    numbers = _numbers(steps)
    parts = {phase: [step["seconds"].get(phase, 0.0) for step in steps] for phase in PHASES}
    parts = {phase: values for phase, values in parts.items() if any(values)}
    sums = [sum(values) for values in zip(*parts.values(), strict=True)] or [0.0]
    top, note = max(sums) or 1.0, ""
    if top > SLOW_STEP * (middle := statistics.median(sums)) > 0:
        note, top = f" (cut off; the slowest took {number(top, 's')})", CUT * middle
    rows = []
    for phase in dict.fromkeys(name for step in steps for name in step["seconds"]):
        values = [step["seconds"][phase] for step in steps if phase in step["seconds"]]
        rows.append((html.escape(phase), number(statistics.median(values)), number(max(values)), number(sum(values))))
    drawn = (
        charts.stacked_bars(f"Seconds a phase{note}", numbers, parts, unit="s", top=top),
        charts.curves("Peak memory", numbers, {"bytes": [s["peak_bytes"] for s in steps]}, unit="B", floor=0),
    )
    heads = ("phase", "median s", "largest s", "total s")
    return f'<div class="grid2">{"".join(drawn)}</div>\n{_table(heads, rows, (1, 2, 3))}'


def _attended(folder: Path) -> str:
    found = attended.read_positions(folder)
    if found is None:
        return ""
    tokens, queries = int(found["prompt_tokens"]), int(found["queries"])
    rows = {"all layers": found["counts"].sum(0).tolist()}
    rows |= {f"layer {n}": row.tolist() for n, row in zip(found["layers"], found["counts"], strict=True)}
    title = f"Selected prompt tokens of {queries} response tokens, each strip by its own largest part"
    return charts.heat_strips(title, rows, ("token 0", f"token {tokens - 1}"))


def _scores(folder: Path) -> str:
    """Tables of the evaluations whose receipts (positions*.json) lie in the folder."""
    parts = []
    for path in sorted(folder.glob("positions*.json")):
        evaluation = _json(path)
        if problems := position_eval.receipt_problems(evaluation):
            raise ValueError(f"{path}: {problems[0]}")
        rows = [
            (
                html.escape(row["score"].rpartition(":")[2]),
                html.escape(row["task"]),
                html.escape(row["position"]),
                number(row["tokens"]),
                number(row["mean"]),
                f"{number(row['low'])} to {number(row['high'])}" if row["mean"] is not None else "",
                number(row["samples"]),
            )
            for row in evaluation["table"]
        ]
        heads = ("score", "task", "position", "tokens", "mean", "95 % interval", "samples")
        audit = evaluation["audit"]
        counts = ", ".join(f"{name} {count}" for name, count in audit["counts"].items())
        told = html.escape(f"{path.name}: {audit['responses']} responses: {counts}")
        parts.append(f"<p>{told}</p>{_table(heads, rows, (3, 4, 5, 6))}")
    return "".join(parts)


def _samples(folder: Path, steps: Sequence[Step]) -> str:
    """Members of the first and the last step with their texts; without texts, the last step's rewards."""
    there = sampled_steps(folder)
    if not there:
        last = steps[-1]
        rows = [
            (number(i), number(reward), number(gain), number(length), "cut off" if cut else "stopped")
            for i, (reward, gain, length, cut) in enumerate(
                zip(last["rewards"], last["advantages"], last["response_lengths"], last["truncated"], strict=True)
            )
        ]
        heads = ("member", "reward", "advantage", "tokens", "end")
        return f"<p>Step {last['step']}; the run wrote no texts.</p>" + _table(heads, rows, (0, 1, 2, 3))
    drawn = []
    for step in dict.fromkeys((there[0], there[-1])):
        members = read_samples(folder, step)
        drawn.append(f"<h3>Step {step}</h3>")
        for member in members[:MOST_SAMPLES]:
            end = "cut off" if member["truncated"] else "stopped"
            told = f"row {member['row_id']}, member {member['member']}: reward {number(member['reward'])}"
            told += f", {member['tokens']} tokens, {end}"
            drawn.append(f'<div class="sample"><p>{html.escape(told)}</p><pre>{shown(member["text"])}</pre></div>\n')
        if len(members) > MOST_SAMPLES:
            drawn.append(f'<p class="soft">and {len(members) - MOST_SAMPLES} more</p>')
    return "".join(drawn)


def _steps_table(steps: Sequence[Step]) -> str:
    heads = ("step", "reward", "loss", "KL", "gradient norm", "tokens", "seconds", "peak", "skipped")
    rows = [
        (
            number(step["step"]),
            number(mean),
            number(step["loss"]),
            number(step["metrics"].get("kl")),
            number(step["grad_norm"]),
            number(sum(step["response_lengths"])),
            number(step["seconds"].get("step")),
            number(step["peak_bytes"], "B"),
            html.escape(step["skip_reason"] or ""),
        )
        for step, mean in zip(steps, reward_means(steps), strict=True)
    ]
    return f"<details><summary>{len(steps)} rows</summary>{_table(heads, rows, range(8))}</details>\n"


def _receipt(folder: Path, receipt: Any) -> str:
    """What the figures are bound to."""
    config = receipt["config"]["resolved"] if receipt else _json(folder / CONFIG_FILE)
    parts = []
    if receipt is not None:
        files = [(f"<code>{shown(f['path'])}</code>", f["sha256"]) for f in receipt["dataset"]["files"]]
        bound = [
            ("weights", receipt["weights_fingerprint"]),
            ("configuration", receipt["config"]["sha256"]),
            ("receipt", receipt["receipt_sha256"]),
            *files,
        ]
        parts.append(_table(("bound to", "hash"), [(label, f"<code>{html.escape(h)}</code>") for label, h in bound]))
        for title, field in (("Kernels", "kernels"), ("Packages", "packages")):
            rows = [(html.escape(k), f"<code>{html.escape(v)}</code>") for k, v in receipt[field].items()]
            parts.append(f"<details><summary>{title}</summary>{_table((title.lower(), 'which'), rows)}</details>\n")
    if config is not None:
        text = shown(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False))
        parts.append(f"<details><summary>Configuration</summary><pre>{text}</pre></details>\n")
    return "".join(parts)
