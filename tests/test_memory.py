"""Peak memory is named after what was measured and grows with what is held."""

import subprocess
import sys

import numpy as np

from longstraw_jax.evidence.memory import DEVICE_PEAK, PROCESS_PEAK, peak_bytes


def test_peak_covers_what_the_process_held():
    before, source = peak_bytes()
    assert source in (DEVICE_PEAK, PROCESS_PEAK) and before > 0
    if source == PROCESS_PEAK:
        held = np.ones(before + (64 << 20), np.uint8)
        assert peak_bytes()[0] >= held.nbytes
        del held
        assert peak_bytes()[0] > before  # a peak does not come down


def test_child_does_not_inherit_its_parents_peak():
    held = np.ones(600 << 20, np.uint8)
    code = "from longstraw_jax.evidence.memory import peak_bytes; print(peak_bytes()[0])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(child.stdout) < held.nbytes
