"""One run in many processes: joins them under Slurm, GKE or by flags, and lets them agree on what one of them knows.

Every process runs the same program on the same global arrays. What only one may do (score the rewards, write the run
folder) process 0 does in `on_first`; what must be alike everywhere is compared by `check_same`.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

JOIN_SECONDS = 300  # for the slowest process to start
SILENT_SECONDS = 30  # without a sign of life until a process counts as dead, and the others end
RESUME = "run the same command again to resume from the last checkpoint"


class LaunchError(ValueError):
    """Processes that cannot be started, or that differ where they must not; names what, and what is accepted."""


class Cluster(NamedTuple):
    """Where this process stands among the run's.

    Attributes:
      kind: "slurm", "gke" or "flags".
      processes: how many.
      process: this one's number; 0 writes the run folder.
      coordinator: host:port of process 0, None where JAX finds it in the environment.
    """

    kind: str
    processes: int
    process: int
    coordinator: str | None


def find_cluster(
    environment: Mapping[str, str],
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
) -> Cluster | None:
    """The processes that this one belongs to: those of the flags, of a Slurm step, of a GKE TPU slice; None if alone.

    Args:
      environment: os.environ.
      coordinator, processes, process: values of the flags, all or none.

    Raises:
      LaunchError: some flags or variables without the others, or values out of range.
    """
    given = {"coordinator": coordinator, "num_processes": processes, "process_id": process}
    if any(value is not None for value in given.values()):
        if absent := [f"--{name}" for name, value in given.items() if value is None]:
            raise LaunchError(f"{', '.join(absent)} not given; accepted: all of --{', --'.join(given)}, or none")
        host, _, port = coordinator.rpartition(":")
        if not (host and port.isdigit()):
            raise LaunchError(f"coordinator={coordinator!r}; accepted: host:port of process 0")
        if processes < 1:
            raise LaunchError(f"num_processes={processes}; accepted: at least 1")
        if not 0 <= process < processes:
            raise LaunchError(f"process_id={process}; accepted: 0 to {processes - 1}")
        return Cluster("flags", processes, process, coordinator)
    # Set by srun alone: a batch script that runs the program itself is one process, whatever it has reserved.
    if "SLURM_STEP_NUM_TASKS" in environment and (tasks := _whole_number(environment, "SLURM_STEP_NUM_TASKS")) > 1:
        return Cluster("slurm", tasks, _whole_number(environment, "SLURM_PROCID", tasks), None)
    if (hosts := len(environment.get("TPU_WORKER_HOSTNAMES", "").split(","))) > 1:
        return Cluster("gke", hosts, _whole_number(environment, "TPU_WORKER_ID", hosts), None)
    return None


def _whole_number(environment: Mapping[str, str], name: str, stop: int | None = None) -> int:
    """A variable from 0 to below `stop`."""
    text = environment.get(name, "")
    if not text.isdecimal() or (stop is not None and int(text) >= stop):
        accepted = "a whole number" if stop is None else f"0 to {stop - 1}, this process's number"
        raise LaunchError(f"{name}={text!r} in the environment; accepted: {accepted}")
    return int(text)


def join(cluster: Cluster | None) -> None:
    """Starts jax.distributed; must come before the first device query. Nothing for a process that is alone.

    Raises:
      LaunchError: the others did not come within JOIN_SECONDS.
    """
    if cluster is None:
        return
    known = {}
    if cluster.coordinator is not None:
        known = {
            "coordinator_address": cluster.coordinator,
            "num_processes": cluster.processes,
            "process_id": cluster.process,
        }
    # Of emulated devices alone. Two programs under way at once could wait for each other in two processes.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from this process
    try:
        jax.distributed.initialize(
            **known, initialization_timeout=JOIN_SECONDS, heartbeat_timeout_seconds=SILENT_SECONDS
        )
    except RuntimeError as error:
        raise LaunchError(f"{describe(cluster)} found no others: {error}") from error
    # Now, as it may be too late then: where the process is in a collective or in compiled code when another dies, JAX
    # ends it with words of its own, or gloo aborts it.
    say(f"{describe(cluster)} has joined; if one process ends, all end: {RESUME}")


def describe(cluster: Cluster) -> str:
    """This process for the eye."""
    return f"process {cluster.process} of {cluster.processes} ({cluster.kind})"


def say(message: str) -> None:
    """A line on stderr in one write, so that the lines of many processes do not mix."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def joined() -> bool:
    """Whether this process is one of several; asks no device."""
    return jax.distributed.is_initialized()


def is_first() -> bool:
    """Whether this process writes the run folder."""
    return jax.process_index() == 0


def exchange(value: Any) -> list[Any]:
    """Every process's JSON value, by process number. All processes must call it, in the same order."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    room = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)  # few lengths, so few programs
    room[: data.size] = data
    every = multihost_utils.process_allgather(room)
    return [json.loads(row[:size].tobytes()) for row, size in zip(every, sizes, strict=True)]


def on_first(action: Callable[[], Any]) -> Any:
    """Runs `action` on process 0 alone and returns its JSON value on all. What it raises ends all of them.

    Raises:
      ValueError, OSError: by `action`, on process 0; LaunchError with the same message on the others.
    """
    if jax.process_count() == 1:
        return action()
    answer = None
    if is_first():
        try:
            answer = {"value": action()}
        except (ValueError, OSError) as error:
            exchange({"error": str(error)})
            raise
    answer = exchange(answer)[0]
    if "error" in answer:
        raise LaunchError(f"process 0: {answer['error']}")
    return answer["value"]


def check_same(what: str, value: Any) -> None:
    """Raises LaunchError on every process unless all have the same JSON value."""
    every = exchange(value)
    other = next((number for number, found in enumerate(every) if found != every[0]), None)
    if other is not None:
        raise LaunchError(
            f"{what}: process {other} has {every[other]}, process 0 has {every[0]}; accepted: the same on every process"
        )


def to_host(x: jax.Array) -> np.ndarray:
    """A whole array on every process's host, whichever processes hold it. All processes must call it."""
    if jax.process_count() == 1 or x.is_fully_replicated:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


@contextlib.contextmanager
def ends_with_the_others(cluster: Cluster | None) -> Iterator[None]:
    """Ends this process, saying why and how to resume, where the block fails because another process has ended."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if cluster is None:
            raise
        say(f"error: {describe(cluster)} lost the others ({str(error).splitlines()[0]}); {RESUME}")
        leave(1)


def leave(code: int) -> NoReturn:
    """Ends this process at once. The others are told by its silence, not by the barrier of an orderly exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
