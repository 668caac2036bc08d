"""One of the processes of test_many_processes.py: python one_of_many.py FOLDER PORT PROCESSES PROCESS.

Writes what it found to FOLDER/found<process>.json, then talks with the others until one is killed.
"""

import json
import os
import pathlib
import sys

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from longstraw_jax import fingerprint, launch, sharding  # noqa: E402
from longstraw_jax.io import hf_checkpoint  # noqa: E402


def refused(action):
    """What an action is refused with."""
    try:
        action()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return None


def no_space():
    raise OSError("no space")


def look(folder: pathlib.Path, process: int) -> dict:
    mesh = sharding.make_mesh(32)
    where = sharding.named(mesh, sharding.spec(("expert", None)))
    values = np.arange(192, dtype=np.float32).reshape(64, 3)
    numbers = jax.make_array_from_callback(values.shape, where, lambda at: values[at])
    launch.check_same("alike", {"a": [1, None]})
    found = {
        "devices": [jax.device_count(), jax.local_device_count()],
        "exchanged": launch.exchange({"number": process, "text": "x" * process}),
        "first": launch.on_first(lambda: os.getpid()),
        "pid": os.getpid(),
        "differs": refused(lambda: launch.check_same("the seed", 7 if process == 2 else 3)),
        "to_host": launch.to_host(numbers).tolist(),
        "whole": fingerprint.tree_fingerprint(hf_checkpoint.load(folder / f"checkpoint{process}", mesh=mesh)[1]),
        "not_finite": refused(lambda: hf_checkpoint.load(folder / f"damaged{process}", mesh=mesh)),
    }
    try:
        launch.on_first(no_space)
    except (OSError, ValueError) as error:
        found["failed"] = f"{type(error).__name__}: {error}"
    return found


def main(folder: str, port: str, processes: str, process: str) -> None:
    cluster = launch.find_cluster(
        {}, coordinator=f"localhost:{port}", processes=int(processes), process=int(process)
    )
    launch.join(cluster)
    path = pathlib.Path(folder) / f"found{process}.json"
    found = look(pathlib.Path(folder), int(process))
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").rename(path)
    with launch.ends_with_the_others(cluster):
        while True:
            launch.exchange(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
