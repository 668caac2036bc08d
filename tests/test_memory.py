"""Peak memory is named after what was measured and grows with what is held."""

import subprocess
import sys

import numpy as np
import pytest

from longstraw_jax.evidence.memory import DEVICE_PEAK, PROCESS_PEAK

# In a process of its own, which is small: more than this one's peak would be gigabytes.
HOLDS = """
import numpy as np
from longstraw_jax.evidence.memory import peak_bytes

before, source = peak_bytes()
held = np.ones(before + (64 << 20), np.uint8)
size, during = held.nbytes, peak_bytes()[0]
del held
print(before, size, during, peak_bytes()[0], source, sep="|")
"""
PARENT_HOLDS = 600 << 20


@pytest.fixture(scope="module")
def child():
    """Peaks before, while and after a child of a large process holds `size` bytes, and what they are the peaks of."""
    held = np.ones(PARENT_HOLDS, np.uint8)
    done = subprocess.run([sys.executable, "-c", HOLDS], capture_output=True, text=True, check=True)
    assert held.nbytes == PARENT_HOLDS
    *numbers, source = done.stdout.strip().split("|")
    return [int(number) for number in numbers], source


def test_peak_covers_what_the_process_held(child):
    (before, size, during, after), source = child
    assert source in (DEVICE_PEAK, PROCESS_PEAK) and before > 0
    if source == PROCESS_PEAK:
        assert during >= size > before
        assert after > before  # a peak does not come down


def test_child_does_not_inherit_its_parents_peak(child):
    assert child[0][0] < PARENT_HOLDS
