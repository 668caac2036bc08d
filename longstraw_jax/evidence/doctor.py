"""Checks every prerequisite of a run without starting it: `python -m longstraw_jax.evidence.doctor --config=FILE`.

Takes the main job's configuration and overrides (--config.model.checkpoint=DIR). With --topology the run is judged for
chips that need not be here; without it, for this machine's devices. Reads no weights, unless --hash_weights asks to
compare them with the checkpoint's SHA256SUMS. Prints a row a check: ok, BLOCKER or not checked. Exit code 0 if nothing
blocks, 1 if anything does, 2 on bad usage.
"""

import pathlib
import sys

import jax
from absl import app, flags
from ml_collections import ConfigDict, config_flags

from longstraw_jax import job_config
from longstraw_jax.command import fail, parse_flags
from longstraw_jax.evidence import prerequisites, topology


def diagnose(
    config: ConfigDict, workdir: pathlib.Path, chips: topology.Topology | None, *, hash_weights: bool = False
) -> list[prerequisites.Finding]:
    """The rows; must come before JAX's first device query, because it chooses the devices."""
    sound = not job_config.type_problems(config)  # else `examine` says what is wrong, whatever the devices
    if sound and (chips is not None or config.mesh.emulate):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", chips.devices if chips is not None else max(config.mesh.devices, 1))
    return prerequisites.examine(config, workdir, chips=chips, hash_weights=hash_weights)[1]


def report(rows: list[prerequisites.Finding]) -> int:
    """Prints the rows, blockers last so that they are seen; returns the exit code."""
    width = max(len(row.check) for row in rows)
    for row in sorted(rows, key=lambda row: row.status == prerequisites.BLOCKER):
        print(f"{row.status:<11}  {row.check:<{width}}  {' '.join(row.detail.split())}")
    blocking = len(prerequisites.blockers(rows))
    skipped = sum(row.status == prerequisites.NOT_CHECKED for row in rows)
    print(f"{len(rows)} checks, {blocking} blockers, {skipped} not checked")
    return 1 if blocking else 0


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    if len(argv) > 1 or values.config is None:
        fail(f"arguments {argv[1:]}; accepted: --config=FILE --topology=NAME and --config.field=value")
    try:
        chips = None if values.topology is None else topology.parse(values.topology)
    except topology.TopologyError as error:
        fail(error)
    rows = diagnose(values.config, pathlib.Path(values.workdir), chips, hash_weights=values.hash_weights)
    sys.exit(report(rows))


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "Configuration file of the main job.")
    flags.DEFINE_string("topology", None, f"One of {', '.join(topology.KNOWN)}; without it, the devices that are here.")
    flags.DEFINE_string("workdir", "runs", "Where the run would write.")
    flags.DEFINE_bool("hash_weights", False, "Compare the weights, too, with the checkpoint's SHA256SUMS.")
    app.run(main, flags_parser=parse_flags)
