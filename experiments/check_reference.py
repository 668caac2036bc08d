"""Compares the port with golden values, case folder by case folder, key by key, in both attention forms.

A case folder holds config.json, expected.safetensors and, for a model, its checkpoint. The values come from Hugging
Face transformers. Exit status: 0 all within tolerance, 1 not, 2 bad usage.
"""

import dataclasses
import json
import pathlib
import re
import sys
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy
from absl import app, flags

from longstraw_jax import config as config_lib
from longstraw_jax.evidence import golden
from longstraw_jax.io import hf_checkpoint
from longstraw_jax.model import decoder

_DIR = flags.DEFINE_string("dir", None, "A case folder, or a folder of case folders.")

FORMS = ("absorbed", "expanded")
HF_LATENT_EPS = 1e-6  # transformers builds the two latent norms with it whatever rms_norm_eps says
INPUTS = ("input_ids", "position_ids", "labels", "positions")
COUNTED = 16  # last tokens of a row in the loss, where a case has no labels

# Largest absolute difference unless said otherwise; fp32 on both sides.
TOLERANCE = {
    "logits": 2e-4,
    "hidden": 1e-3,
    "gradient": 1e-4,  # of the tensor's largest entry
    "selection": 0,  # rows whose sets differ
    "cache": 1e-3,
    "index scores": 1e-3,
    "router logits": 1e-3,
    "router weights": 2e-4,
    "loss": 1e-5,
    "gradient norm": 1e-4,  # relative
    "frequency": 2e-7,  # relative: two units in the last place
    "rotary": 1e-6,
}
KINDS = {
    "logits": "logits",
    "hidden": "hidden",
    "attn_out": "hidden",
    "final_norm": "hidden",
    "topk_indices": "selection",
    "router_experts": "selection",
    "index_scores": "index scores",
    "router_logits": "router logits",
    "router_weights": "router weights",
    "kv_latent": "cache",
    "k_rope": "cache",
    "index_key": "cache",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "inv_freq": "frequency",
    "cos": "rotary",
    "sin": "rotary",
}

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Check:
    """One compared key: its kind, its error in that kind's unit, and a reason where the error is not a number's."""

    key: str
    kind: str
    error: float
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE[self.kind]  # False for NaN


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a case in one attention form, or a part of it that needs no model."""

    case: str
    form: str
    checks: tuple[Check, ...] = ()
    failure: str = ""  # why nothing could be compared
    note: str = ""  # why nothing is compared, and that is no failure

    @property
    def passed(self) -> bool:
        return bool(self.note) or (not self.failure and all(check.passed for check in self.checks))


def kind_of(key: str) -> str:
    """The kind of a key: `short.attn_out.3` -> hidden."""
    if key.startswith("grad."):
        return "gradient"
    return KINDS[next(part for part in reversed(key.split(".")) if not part.isdigit())]


def compare(key: str, got: np.ndarray, want: np.ndarray) -> Check:
    """Compares one value with its golden one, selections as sets."""
    kind, got, want = kind_of(key), np.asarray(got), np.asarray(want)
    if kind == "selection":
        width = max(got.shape[-1], want.shape[-1])
        got, want = (np.sort(_widen(ids, width), axis=-1) for ids in (got, want))
    if got.shape != want.shape:
        return Check(key, kind, np.inf, f"shape {got.shape}, expected {want.shape}")
    if kind == "selection":
        return Check(key, kind, int((got != want).any(-1).sum()))
    if kind == "index scores":
        masked = np.isneginf(want)
        if not np.array_equal(np.isneginf(got), masked):
            return Check(key, kind, np.inf, "other keys are masked")
        got, want = np.where(masked, 0, got), np.where(masked, 0, want)
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - want.astype(np.float64))
        scale = np.abs(want).astype(np.float64)
    if kind == "frequency":
        error = error / np.maximum(scale, 1e-30)
    elif kind in ("gradient", "gradient norm"):
        error = error / max(scale.max(initial=0.0), 1e-30)
    return Check(key, kind, float(error.max(initial=0.0)))


def _widen(ids: np.ndarray, width: int) -> np.ndarray:
    return np.pad(ids, [(0, 0)] * (ids.ndim - 1) + [(0, width - ids.shape[-1])], constant_values=-1)


def check_case(folder: pathlib.Path) -> tuple[list[Row], list[str]]:
    """Rows and remarks of one case folder.

    Raises:
      ValueError, KeyError, OSError, SafetensorError: a file that is missing, broken or of another architecture.
    """
    name, rows, remarks = folder.name, [], []
    expected = safetensors.numpy.load_file(folder / "expected.safetensors")
    raw = json.loads((folder / "config.json").read_text())

    rotary = rotary_checks(raw, expected)
    if rotary:
        rows.append(Row(name, "rotary", tuple(rotary)))
    for key in expected:
        if key.endswith("_f64") and key.removesuffix("_f64") in expected:
            far = _distance(expected[key.removesuffix("_f64")], expected[key])
            remarks.append(f"{key}: exact angles, {far:.1e} from the fp32 product; informational")
    mtp = {key for key in expected if _is_mtp(key, raw.get("num_hidden_layers", -1))}
    if "input_ids" in expected:
        config = dataclasses.replace(config_lib.model_config_from_hf(raw), dtype="float32")
        _, base = hf_checkpoint.load(folder, config)
        for form in FORMS:
            checks, values = model_checks(config, base, expected, form)
            rows.append(Row(name, form, tuple(checks), failure="" if checks else "nothing to compare"))
        if "exact_angle.logits" in expected:
            far = _distance(values["logits"], expected["exact_angle.logits"])
            remarks.append(f"exact_angle.*: fp64 angles move the logits by {far:.1e}; informational")
    elif not rotary:
        rows.append(Row(name, "-", failure="nothing to compare"))
    if mtp:
        rows.append(Row(name, "mtp", note="not yet run: MTP is not implemented"))

    seen = mtp | {check.key for row in rows for check in row.checks}
    unknown = [key for key in expected if key not in seen and key.rpartition(".")[2] not in INPUTS]
    unknown = [key for key in unknown if not (key.startswith("exact_angle.") or key.endswith("_f64"))]
    if unknown:
        remarks.append(f"not compared: {', '.join(sorted(unknown))}")
    return rows, [f"{name}: {remark}" for remark in remarks]


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(np.float64) - b).max(initial=0.0))


def _is_mtp(key: str, layers: int) -> bool:
    """Keys of the MTP layer: `mtp.*`, and values of a layer numbered num_hidden_layers."""
    numbered = re.fullmatch(r"(?:topk_indices|index_scores|attn_out|router_\w+|cache\.\w+)\.(\d+)", key)
    numbered = numbered or re.match(r"grad\.model\.layers\.(\d+)\.", key)
    return key.startswith("mtp.") or (numbered is not None and int(numbered[1]) == layers)


def rotary_checks(raw: dict[str, Any], expected: Arrays) -> list[Check]:
    """PREFIX.inv_freq, PREFIX.cos and PREFIX.sin; a prefix that starts with `default` means no scaling.

    Reads rope_parameters alone: a folder of tables need not describe a model.
    """
    checks: list[Check] = []
    parts = ("inv_freq", "cos", "sin")
    for prefix in sorted({key.rpartition(".")[0] for key in expected if key.rpartition(".")[2] in parts}):
        rotary = config_lib.RopeParameters.from_hf(raw["rope_parameters"])
        if prefix.startswith("default"):
            rotary = config_lib.RopeParameters(rotary.rope_theta)
        wanted = {part: expected[f"{prefix}.{part}"] for part in parts if f"{prefix}.{part}" in expected}
        rows = wanted["cos"].shape[0] if "cos" in wanted else 0
        positions = expected.get("positions", expected.get("position_ids", np.arange(rows)))
        positions = positions.reshape(-1, positions.shape[-1])[0]
        values = golden.rotary_values(rotary, raw["qk_rope_head_dim"], positions)
        checks += [compare(f"{prefix}.{part}", values[part], want) for part, want in wanted.items()]
    return checks


def model_checks(
    config: config_lib.ModelConfig, base: dict[str, Any], expected: Arrays, form: str
) -> tuple[list[Check], Arrays]:
    """Checks of every key that the model gives in one attention form; and the values of the plain forward."""
    hf = decoder.make_model(dataclasses.replace(config, latent_norm_eps=HF_LATENT_EPS), attention=form)
    checks: list[Check] = []

    def check(values: Arrays, prefix: str = "") -> None:
        wanted = [key for key in values if prefix + key in expected]
        checks.extend(compare(prefix + key, values[key], expected[prefix + key]) for key in wanted)

    ids = expected["input_ids"]
    positions = _positions(expected.get("position_ids"), ids)
    plain = golden.model_values(hf, base, ids, positions)
    check(plain)
    if "short.input_ids" in expected:
        short = expected["short.input_ids"]
        at = _positions(expected.get("short.position_ids"), short)
        check(golden.model_values(hf, base, short, at), "short.")
    if any(key.startswith("official_eps.") for key in expected):
        official = decoder.make_model(config, attention=form)
        check(golden.model_values(official, base, ids, positions), "official_eps.")
    if any(key.startswith("grad.") or key in ("loss", "grad_norm") for key in expected):
        last = np.arange(ids.shape[1]) >= ids.shape[1] - COUNTED
        labels = expected.get("labels", np.where(last, ids, -100))
        check(golden.gradient_values(hf, base, ids, positions, labels))
    # Pages and decode count positions from 0; elsewhere these keys show up as not compared.
    from_zero = positions is None or (positions == np.arange(ids.shape[1])).all()
    if from_zero and any(key.startswith(("decode.", "prefill.", "cache.")) for key in expected):
        decoded = expected["decode.logits"].shape[1] if "decode.logits" in expected else 1
        values = golden.decode_values(hf, base, ids, ids.shape[1] - decoded)
        values["prefill.logits"] = golden.model_values(hf, base, ids[:, : ids.shape[1] - decoded])["logits"]
        # A stored cache or prefill may end earlier.
        check({key: x[:, : expected[key].shape[1]] for key, x in values.items() if key in expected})
    return checks, plain


def _positions(stored: np.ndarray | None, ids: np.ndarray) -> np.ndarray | None:
    return None if stored is None else np.broadcast_to(stored, ids.shape).astype(np.int32)


COLUMNS = ("case", "form", "logits", "hidden", "gradient", "selection", "other", "result")
LINE = "{:24} {:9} {:>9} {:>9} {:>9} {:>9} {:>24} {}"


def table_line(row: Row) -> str:
    """Worst error of each kind; of the other kinds, the one nearest to its tolerance."""
    worst: dict[str, float] = {}
    for check in row.checks:
        worst[check.kind] = float(np.maximum(worst.get(check.kind, 0.0), check.error))  # keeps NaN
    cells = [f"{worst.pop(kind):.1e}" if kind in worst else "-" for kind in COLUMNS[2:5]]
    cells.append(f"{worst.pop('selection'):.0f}" if "selection" in worst else "-")
    near = {kind: np.nan_to_num(error / TOLERANCE[kind], nan=np.inf) for kind, error in worst.items()}
    other = max(near, key=near.__getitem__, default=None)
    cells.append(f"{other} {worst[other]:.1e}" if other else "-")
    result = row.note or ("pass" if row.passed else "FAIL")
    return LINE.format(row.case, row.form, *cells, result)


def case_folders(directory: str | None) -> list[pathlib.Path]:
    """The folder itself, or the case folders in it.

    Raises:
      ValueError: no such folder, or none of that layout.
    """
    accepted = "accepted: a folder with config.json and expected.safetensors, or a folder of such folders"
    if not directory:
        raise ValueError(f"--dir is missing; {accepted}")
    root = pathlib.Path(directory)
    found = [folder for folder in (root, *sorted(root.glob("*/"))) if (folder / "expected.safetensors").is_file()]
    if not found:
        raise ValueError(f"--dir={directory} holds no case; {accepted}")
    return found


def main(argv: list[str]) -> None:
    jax.config.update("jax_default_matmul_precision", "highest")  # golden values are fp32
    try:
        if len(argv) > 1:
            raise ValueError(f"argument {argv[1]!r} is not understood; accepted: --dir=DIR")
        folders = case_folders(_DIR.value)
    except ValueError as error:
        print(f"check_reference: {error}", file=sys.stderr)
        sys.exit(2)
    print(LINE.format(*COLUMNS), flush=True)
    rows, remarks = [], []
    for folder in folders:
        try:
            case_rows, case_remarks = check_case(folder)
        except (ValueError, KeyError, OSError, safetensors.SafetensorError) as error:
            case_rows, case_remarks = [Row(folder.name, "-", failure=f"{type(error).__name__}: {error}")], []
        rows += case_rows
        remarks += case_remarks
        for row in case_rows:
            print(table_line(row), flush=True)
    for row in rows:
        if row.failure:
            remarks.append(f"{row.case} {row.form}: {row.failure}")
        for check in row.checks:
            if not check.passed:
                reason = check.reason or f"{check.error:.3g}, tolerance {TOLERANCE[check.kind]:g}"
                remarks.append(f"{row.case} {row.form}: {check.key} ({check.kind}) {reason}")
    failed = sum(not row.passed for row in rows)
    print("\n".join([*remarks, f"{len(rows)} rows, {failed} failed"]))
    sys.exit(1 if failed else 0)


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"check_reference: {error}; accepted: --dir=DIR", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
