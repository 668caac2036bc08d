"""Peak memory of this process: of the devices where their backend reports it, else of the process."""

import resource
import sys

import jax

DEVICE_PEAK = "largest peak_bytes_in_use of a local device"
PROCESS_PEAK = "peak resident set of the process"


def peak_bytes() -> tuple[int, str]:
    """Peak memory since the process started.

    Returns:
      (bytes, source). The source is DEVICE_PEAK where every local device reports it (GPU, TPU): the fullest
      device's peak. On CPU it is PROCESS_PEAK, which holds all emulated devices and the program itself.
    """
    reports = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("peak_bytes_in_use" in report for report in reports):
        return max(int(report["peak_bytes_in_use"]) for report in reports), DEVICE_PEAK
    return _process_peak(), PROCESS_PEAK


def _process_peak() -> int:
    """Peak resident bytes."""
    try:
        # Not ru_maxrss: on Linux it starts at the size of the process that forked this one.
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
