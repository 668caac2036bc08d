"""Phases of a measured run: errors that name them, compilation told apart, floors."""

import jax
import numpy as np
import pytest
import tiny_jobs  # noqa: F401, puts experiments/ on the path

import timed_phases  # isort: skip


def test_a_full_device_names_the_phase_and_what_to_change():
    phases = timed_phases.Phases(None)
    said = "phase 'capture' is out of memory.*: RESOURCE_EXHAUSTED: .* 7 bytes; accepted: a smaller --chunk"
    with pytest.raises(MemoryError, match=said), phases.named("capture"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while\n trying to allocate 7 bytes")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), phases.named("capture"):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_compilation_within_compilation_counts_once():
    assert timed_phases.covered([]) == 0
    assert timed_phases.covered([(5.0, 6.0), (0.0, 3.0), (1.0, 2.0), (2.5, 4.0)]) == 5.0


def test_a_phase_tells_its_compilation_apart():
    phases = timed_phases.Phases(None)
    phases.run("first", lambda: jax.jit(lambda x: x * 3 + 1)(np.arange(3)))
    phases.run("second", lambda: np.arange(3))
    assert phases.rows[0]["compile_seconds"] > 0 == phases.rows[1]["compile_seconds"]


def test_a_phase_s_floor_is_the_slower_of_products_and_link(capsys):
    phases = timed_phases.Phases(1e12, 1e9)
    phases.add("capture", 8.0, tokens=10, flops=2e12, link_bytes=3e9)
    phases.add("score", 8.0, flops=5e12)
    assert [row["floor_seconds"] for row in phases.rows] == [3.0, 5.0]
    assert "floor     3.00 s" in capsys.readouterr().out
