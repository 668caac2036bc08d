"""Phases of a run that is measured: seconds without compilation, floors, peak bytes, and errors that name the phase."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.evidence import memory

MATMUL = 8192  # of the matrix product that the rates are told beside
LINK = 2**30  # bytes of the copy from the host that they are told beside
COMPILING = "/jax/core/compile/"  # tracing, lowering and compiling, as jax.monitoring tells them
EXHAUSTED = ("RESOURCE_EXHAUSTED", "Out of memory")


class Phases:
    """Seconds, peak bytes and FLOP/s of what ran, in order; prints each as it ends.

    Args:
      matmul_rate, link_rate: FLOP/s and bytes/s that the floors are reckoned by; None where they are not known.
      done: called with all rows as each phase ends.
    """

    def __init__(
        self,
        matmul_rate: float | None,
        link_rate: float | None = None,
        done: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
    ):
        self.rows: list[dict[str, Any]] = []
        self.matmul_rate, self.link_rate, self.done = matmul_rate, link_rate, done
        self.current: str | None = None
        self.compiling: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, seconds: float, **_: Any) -> None:
        if event.startswith(COMPILING):
            now = time.perf_counter()
            self.compiling.append((now - seconds, now))

    def run(self, name: str, action: Callable[[], Any], **work: float) -> Any:
        """Runs and times `action`, its results included. See `add` for `work`."""
        with self.named(name):
            started = time.perf_counter()
            result = jax.block_until_ready(action())
            self.add(name, time.perf_counter() - started, **work)
        return result

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        """What runs here is the phase; a device that is full says so with its name. Raises MemoryError."""
        self.current, self.compiling = name, []
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            text = " ".join(str(error).split())
            if not any(word in text for word in EXHAUSTED):
                raise
            held = _held_bytes()
            before = "" if held is None else f", {held / 1e9:.2f} GB held beside"
            raise MemoryError(
                f"phase {name!r} is out of memory{before}: {text[:200]}; accepted: a smaller --chunk, --experts, "
                "--tokens or --layers, or --prefix_store=host"
            ) from error

    def add(self, name: str, seconds: float, *, tokens: int = 0, flops: float = 0, link_bytes: float = 0) -> None:
        """A phase that took `seconds`, compilation included, for so many tokens, FLOPs and bytes from the host."""
        floors = [flops / self.matmul_rate] if flops and self.matmul_rate else []
        floors += [link_bytes / self.link_rate] if link_bytes and self.link_rate else []
        compiling = covered(self.compiling)
        row = {
            "phase": name,
            "seconds": max(seconds - compiling, 0.0),
            "compile_seconds": compiling,
            "floor_seconds": max(floors, default=None),
            "peak_bytes": memory.peak_bytes()[0],
            "held_bytes": _held_bytes(),
            "tokens": tokens,
            "flops": flops,
            "link_bytes": link_bytes,
        }
        self.rows.append(row)
        print(line(row), flush=True)
        self.done(self.rows)


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans: programs are traced within programs."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(last - max(first, end), 0.0)
        end = max(end, last)
    return total


def _held_bytes() -> int | None:
    """In use on the device now; None where it does not tell."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use")


def line(row: dict[str, Any]) -> str:
    """A phase for the eye."""
    seconds = row["seconds"]
    parts = [f"{row['phase']:<24} {seconds:9.2f} s"]
    parts.append(f"floor {row['floor_seconds']:8.2f} s" if row["floor_seconds"] else " " * 16)
    parts.append(f"peak {row['peak_bytes'] / 1e9:7.2f} GB")
    if row["tokens"] and seconds:
        parts.append(f"{row['tokens'] / seconds:10.0f} tokens/s")
    if row["flops"] and seconds:
        parts.append(f"{row['flops'] / seconds / 1e12:8.1f} TFLOP/s")
    if row["compile_seconds"] >= 0.05:
        parts.append(f"(compiled in {row['compile_seconds']:.1f} s)")
    return "  ".join(parts)


def matmul_rate() -> float:
    """FLOP/s of one large bf16 matrix product here."""
    x = jax.random.normal(jax.random.key(0), (MATMUL, MATMUL), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(x))
    started = time.perf_counter()
    jax.block_until_ready([product(x) for _ in range(10)])
    return 10 * 2 * MATMUL**3 / (time.perf_counter() - started)


def link_rate() -> float:
    """Bytes/s of a copy from pinned host memory to the device, a second one: the first makes room."""
    device = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    source = jax.device_put(np.zeros(LINK, np.uint8), host)
    for _ in range(2):
        started = time.perf_counter()
        jax.block_until_ready(jax.device_put(source, jax.sharding.SingleDeviceSharding(device)))
    return LINK / (time.perf_counter() - started)
