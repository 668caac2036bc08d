"""Receipts: receipt.json binds a run's figures to its code, configuration, weights, data and files.

The layout is published as receipt.schema.json (JSON Schema 2020-12). Everything in `figures` and the capacity and
learning claims are derived from steps.jsonl by `longstraw_jax.evidence.figures`; `verify` derives them again.
"""

import datetime
import importlib.metadata
import importlib.resources
import json
import os
import platform
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jsonschema

from longstraw_jax.evidence.figures import WINDOW, derive, derived_claims, step_problems
from longstraw_jax.evidence.memory import peak_bytes
from longstraw_jax.fingerprint import sha256_file, sha256_json
from longstraw_jax.io.metrics import STEPS_FILE, parse_strict_json, read_steps
from longstraw_jax.io.whole_file import write_whole

RECEIPT_FILE = "receipt.json"
CONFIG_FILE = "config.json"
CLAIMS = ("capacity", "gradient", "learning", "quality")
_SCHEMA_VERSION = 1
_PACKAGES = (
    "longstraw_jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "safetensors",
    "tokenizers",
    "pyarrow",
    "math-verify",
)


def bind_config(workdir: str | os.PathLike, config: Mapping[str, Any]) -> str:
    """Writes a run folder's config.json, or checks that the folder belongs to this configuration.

    Args:
      workdir: the run folder; made if it is missing.
      config: the resolved configuration, as JSON values.

    Returns:
      `sha256_json` of the configuration.

    Raises:
      ValueError: config.json is there and differs; names the first field, the value in the folder and the one given.
    """
    path = Path(workdir) / CONFIG_FILE
    digest = sha256_json(config)
    given = json.loads(json.dumps(config))  # tuples become lists, as in the file
    if not path.exists():
        write_whole(path, (json.dumps(given, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode("utf-8"))
        return digest
    found = parse_strict_json(path.read_bytes())
    if sha256_json(found) != digest:
        field, here, there = _first_difference(found, given, "config")
        raise ValueError(
            f"{path} belongs to another configuration: {field} = {here} there, {there} given; "
            "accepted: the same configuration, or another run folder"
        )
    return digest


def write_receipt(
    workdir: str | os.PathLike,
    *,
    config: Mapping[str, Any],
    mesh_shape: Mapping[str, int],
    kernels: Mapping[str, str],
    weights_fingerprint: str,
    dataset_files: Mapping[str | os.PathLike, str],
    dataset_counts: Mapping[str, int],
    seeds: Mapping[str, int],
    prefix_gradient_mode: str,
    artifacts: Mapping[str, str],
    claims: Sequence[Mapping[str, Any]] = (),
    status: str = "finished",
    window: int = WINDOW,
) -> dict[str, Any]:
    """Builds the receipt of the run in `workdir` and writes receipt.json; for process 0 of a run.

    Args:
      workdir: the run folder, which holds steps.jsonl and config.json (see `bind_config`); both become artifacts.
      config: the resolved configuration, as JSON values.
      mesh_shape: axis name -> size, as `dict(mesh.shape)`.
      kernels: op -> the implementation that ran.
      weights_fingerprint: `tree_fingerprint` of the base weights.
      dataset_files: dataset file -> its `sha256_file`, taken when it was read, in reading order; a file in the run
        folder is recorded relative to it.
      dataset_counts: name -> count (rows, duplicates dropped, ...).
      seeds: name -> seed.
      prefix_gradient_mode: frozen, detached or exact.
      artifacts: further files to hash, path relative to `workdir` -> kind (adapter, plot or report).
      claims: rows of the *gradient* and *quality* claims: `claim`, `status` (shown, not shown, not measured) and
        `evidence` (`figures/<name>` or `artifacts/<path>`). One left out is "not measured". The other two rows
        follow from the figures.
      status: how the run ended: finished, interrupted (by a signal) or stopped (rewards failed or had no signal).
      window: steps at either end of the run that the rise in reward compares.

    Returns:
      The receipt.

    Raises:
      ValueError: config.json is of another configuration, a step record breaks its contract, an artifact is
        missing, a link or outside the run folder, a claim lacks its evidence, or the receipt breaks its schema.
        receipt.json stays as it was.
    """
    workdir = Path(workdir)
    steps = read_steps(workdir / STEPS_FILE)
    problems = step_schema_problems(steps) or step_problems(steps, prefix_gradient_mode)
    if problems:
        raise ValueError(f"{workdir / STEPS_FILE}: {problems[0]}")
    figures = derive(steps, window=window)
    kinds = {STEPS_FILE: "steps", CONFIG_FILE: "config", **artifacts}
    receipt = {
        "schema_version": _SCHEMA_VERSION,
        "status": status,
        "created": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "code": describe_code(Path(__file__).resolve().parents[1]),
        "config": {"sha256": bind_config(workdir, config), "resolved": json.loads(json.dumps(config))},
        "python": platform.python_version(),
        "packages": package_versions(),
        "devices": _describe_devices(),
        "mesh": dict(mesh_shape),
        "kernels": dict(kernels),
        "weights_fingerprint": weights_fingerprint,
        "dataset": {
            "files": [{"path": _portable_path(workdir, path), "sha256": sha} for path, sha in dataset_files.items()],
            "counts": dict(dataset_counts),
        },
        "seeds": dict(seeds),
        "prefix_gradient_mode": prefix_gradient_mode,
        "memory_source": peak_bytes()[1],
        "artifacts": [_describe_artifact(workdir, path, kind) for path, kind in kinds.items()],
        "figures": figures,
        "claims": _claim_rows(figures, claims),
    }
    receipt["receipt_sha256"] = sha256_json(receipt)
    if problems := receipt_schema_problems(receipt) or evidence_problems(receipt):
        raise ValueError(f"{RECEIPT_FILE}: {problems[0]}")
    text = json.dumps(receipt, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(workdir / RECEIPT_FILE, text.encode("utf-8"))
    return receipt


def made_by(devices: int = 1) -> dict[str, Any]:
    """What made a measurement: code (see describe_code), python, packages and the device, of which `devices` served."""
    device = jax.devices()[0]
    return {
        "code": describe_code(Path(__file__).resolve().parents[1]),
        "python": platform.python_version(),
        "packages": package_versions(),
        "device": {"platform": device.platform, "kind": device.device_kind, "count": devices},
    }


def package_versions() -> dict[str, str]:
    """Installed versions of what decides a run's numbers."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def describe_code(package: Path) -> dict[str, Any]:
    """The git commit of a package folder.

    Returns:
      `commit` ("unknown" outside a checkout), `dirty` (changed or untracked files; None if unknown), `reason`
      (why it is unknown, else None).
    """
    # Within a hook, GIT_DIR and its kin would point at another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    try:
        # A package installed below somebody else's checkout must not take that checkout's commit.
        git("ls-files", "--error-unmatch", "__init__.py")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain")), "reason": None}
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"git exited {error.returncode}"])[0]
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    return {"commit": "unknown", "dirty": None, "reason": reason}


def artifact_path(workdir: str | os.PathLike, relative: str) -> Path:
    """The file of an artifact.

    Raises:
      ValueError: `relative` leaves the run folder, passes a symbolic link, or is not a regular file.
    """
    parts = PurePosixPath(relative).parts
    if not parts or PurePosixPath(relative).is_absolute() or ".." in parts or "\0" in relative:
        raise ValueError(f"artifact {relative!r} is outside the run folder; accepted: a path inside it")
    path = Path(workdir)
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise ValueError(f"artifact {relative!r} passes the symbolic link {part!r}; accepted: regular files")
    if not path.exists():
        raise ValueError(f"artifact {relative!r} is missing")
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"artifact {relative!r} is not a regular file")
    return path


def receipt_schema_problems(receipt: Any) -> list[str]:
    """Where a receipt breaks receipt.schema.json, one line a problem."""
    validator = jsonschema.Draft202012Validator(_schema())
    return [_problem(error, "receipt") for error in validator.iter_errors(receipt)]


def step_schema_problems(steps: Sequence[Any]) -> list[str]:
    """Where step records break `$defs/step` of receipt.schema.json, one line a problem."""
    schema = _schema()
    step_schema = {"$schema": schema["$schema"], **schema["$defs"]["step"]}
    validator = jsonschema.Draft202012Validator(step_schema)
    return [
        _problem(error, f"step {number}")
        for number, step in enumerate(steps, start=1)
        for error in validator.iter_errors(step)
    ]


def evidence_problems(receipt: Mapping[str, Any]) -> list[str]:
    """Claims that are shown without evidence or name evidence that the receipt does not hold."""
    known = {f"figures/{name}" for name in receipt["figures"]}
    known |= {f"artifacts/{row['path']}" for row in receipt["artifacts"]}
    problems = []
    for row in receipt["claims"]:
        if row["status"] == "shown" and not row["evidence"]:
            problems.append(f"claim {row['claim']}: shown without evidence")
        unknown = [item for item in row["evidence"] if item not in known]
        problems += [f"claim {row['claim']}: evidence {item!r} is not in the receipt" for item in unknown]
    return problems


def _schema() -> dict[str, Any]:
    """The published schema."""
    return json.loads(importlib.resources.files(__package__).joinpath("receipt.schema.json").read_text("utf-8"))


def _problem(error: jsonschema.ValidationError, name: str) -> str:
    """One line: where, and what is wrong there."""
    return f"{'.'.join([name, *map(str, error.absolute_path)])}: {error.message[:300]}"


def _describe_devices() -> dict[str, Any]:
    """All devices of the run, over all its processes."""
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "processes": jax.process_count(),
    }


def _describe_artifact(workdir: Path, relative: str, kind: str) -> dict[str, Any]:
    path = artifact_path(workdir, relative)
    return {"path": relative, "kind": kind, "sha256": sha256_file(path), "bytes": path.stat().st_size}


def _portable_path(workdir: Path, path: str | os.PathLike) -> str:
    """Relative to the run folder if inside it, so that the folder can be moved; else absolute."""
    absolute, folder = Path(path).absolute(), workdir.absolute()
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else str(absolute)


def _claim_rows(figures: Mapping[str, Any], given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each of CLAIMS, in their order."""
    derived = {row["claim"]: row for row in derived_claims(figures)}
    rows = {name: {"claim": name, "status": "not measured", "evidence": []} for name in CLAIMS} | derived
    for row in given:
        if row["claim"] in derived or row["claim"] not in rows:
            raise ValueError(f"claim = {row['claim']!r}; accepted: 'gradient' or 'quality'")
        rows[row["claim"]] = dict(row)
    return list(rows.values())


def _first_difference(found: Any, given: Any, field: str) -> tuple[str, str, str]:
    """Name and both values of the first field, in sorted order, that differs."""
    if isinstance(found, dict) and isinstance(given, dict):
        for key in sorted(found.keys() | given.keys()):
            if key not in found:
                return f"{field}.{key}", "absent", repr(given[key])
            if key not in given:
                return f"{field}.{key}", repr(found[key]), "absent"
            if sha256_json(found[key]) != sha256_json(given[key]):
                return _first_difference(found[key], given[key], f"{field}.{key}")
    return field, repr(found), repr(given)
