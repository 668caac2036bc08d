"""The step log: whole lines, strict reading, truncation on resume, TensorBoard scalars."""

import json
import os
import resource
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from longstraw_jax.io.metrics import (
    STEPS_FILE,
    MetricWriter,
    parse_strict_json,
    read_steps,
    step_scalars,
    truncate_steps,
)


def _record(step: int, **fields) -> dict:
    return {"step": step, "reward_mean": 0.5, "metrics": {"kl": 0.1}, "seconds": {"replay": 2.0}, **fields}


def _write(folder, steps) -> None:
    with MetricWriter(folder) as writer:
        for step in steps:
            writer.write(_record(step))


def _tensorboard_scalars(folder) -> list[tuple[int, str, float]]:
    """Reads event files as TensorBoard frames them: length, its CRC, the event, its CRC."""
    scalars = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            scalars += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            at += 16 + length
    return scalars


def test_writes_one_line_a_step_and_tensorboard(tmp_path):
    _write(tmp_path, [1, 2])
    assert [record["step"] for record in read_steps(tmp_path / STEPS_FILE)] == [1, 2]
    assert (tmp_path / STEPS_FILE).read_bytes().count(b"\n") == 2
    shown = {(step, tag): value for step, tag, value in _tensorboard_scalars(tmp_path)}
    assert shown[2, "kl"] == pytest.approx(0.1) and shown[1, "seconds/replay"] == 2.0
    assert shown[1, "reward"] == 0.5


def test_line_is_on_disk_before_write_returns(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(_record(1))
        assert len(read_steps(tmp_path / STEPS_FILE)) == 1


def test_numbers_of_arrays_and_non_finite_values(tmp_path):
    fields = {"loss": jnp.float32(0.25), "rewards": np.array([1.0, np.nan]), "grad_norm": float("inf")}
    with MetricWriter(tmp_path) as writer:
        writer.write(_record(1, **fields, skipped=np.bool_(True)))
    (record,) = read_steps(tmp_path / STEPS_FILE)
    assert record["loss"] == 0.25 and record["rewards"] == [1.0, None]
    assert record["grad_norm"] is None and record["skipped"] is True


def test_d4_a_skipped_step_is_an_event_of_the_log(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(_record(1, grad_norm=float("nan"), skipped=True, skip_reason="grad_norm is nan"))
    (record,) = read_steps(tmp_path / STEPS_FILE)
    assert record["skipped"] and record["skip_reason"] == "grad_norm is nan"


@pytest.mark.parametrize("step", [0, 1, 3, None])
def test_refuses_a_step_out_of_order(tmp_path, step):
    with MetricWriter(tmp_path) as writer:
        writer.write(_record(1))
        with pytest.raises(ValueError, match="next step is 2"):
            writer.write(_record(step))
    assert len(read_steps(tmp_path / STEPS_FILE)) == 1


def test_refuses_what_is_not_json_and_leaves_the_log(tmp_path):
    with MetricWriter(tmp_path) as writer:
        with pytest.raises(TypeError, match="object"):
            writer.write(_record(1, extra=object()))
        writer.write(_record(1))
    assert len(read_steps(tmp_path / STEPS_FILE)) == 1


def test_failed_write_leaves_no_partial_line(tmp_path):
    _write(tmp_path, [1])
    before = (tmp_path / STEPS_FILE).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricWriter(tmp_path, last_step=1) as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
        try:
            with pytest.raises(OSError):
                writer.write(_record(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (tmp_path / STEPS_FILE).read_bytes() == before
        writer.write(_record(2))
    assert len(read_steps(tmp_path / STEPS_FILE)) == 2


def test_i1_resume_truncates_to_the_resumed_step(tmp_path):
    _write(tmp_path, range(1, 6))
    with open(tmp_path / STEPS_FILE, "ab") as file:
        file.write(b'{"step": 6, "rew')  # killed in the middle of a line
    with MetricWriter(tmp_path, last_step=3) as writer:
        writer.write(_record(4, reward_mean=9.0))
    records = read_steps(tmp_path / STEPS_FILE)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[3]["reward_mean"] == 9.0


def test_truncate_counts_dropped_lines_and_leaves_nothing_beside(tmp_path):
    _write(tmp_path, range(1, 4))
    path = tmp_path / STEPS_FILE
    assert truncate_steps(path, 3) == 0
    with open(path, "ab") as file:
        file.write(b"{")
    assert truncate_steps(path, 2) == 2
    assert truncate_steps(path, 0) == 2 and path.read_bytes() == b""
    assert truncate_steps(tmp_path / "absent.jsonl", 0) == 0
    assert sorted(os.listdir(tmp_path)) == [STEPS_FILE, "tensorboard"]


def test_truncate_refuses_a_log_of_another_run(tmp_path):
    _write(tmp_path, [1, 2])
    with pytest.raises(ValueError, match="holds 2 steps; the checkpoint is at step 3"):
        MetricWriter(tmp_path, last_step=3)
    assert len(read_steps(tmp_path / STEPS_FILE)) == 2


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"step": 1}\n{"step": 3}\n', "line 2: step = 3; expected 2"),
        ('{"step": 1}\n{"step": 1}\n', "line 2: step = 1"),
        ('{"step": 1}\n\n', "line 2"),
        ('{"step": 1}\n{"step": 2}', "line 2: the line is cut short"),
        ('{"step": 1, "loss": NaN}\n', "line 1: NaN is not a finite number"),
        ('{"step": 1, "loss": 1e999}\n', "line 1: 1e999 is not a finite number"),
        ('{"step": 1, "loss": 1, "loss": 2}\n', "line 1: a key is repeated"),
        ('{"step": true}\n', "line 1: step = True"),
        ('{"step": 1, "mode": "\\ud800"}\n', "line 1"),
        ("[1]\n", "line 1: not a JSON object"),
        ("[" * 100_000 + "\n", "line 1"),
        ("\udcff\n", "line 1"),
    ],
)
def test_read_refuses(tmp_path, text, message):
    path = tmp_path / STEPS_FILE
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        read_steps(path)


def test_strict_json_takes_plain_json():
    assert parse_strict_json(json.dumps({"a": [1, None, "é"]}).encode()) == {"a": [1, None, "é"]}


def test_scalars_skip_lists_text_and_nulls():
    record = _record(1, loss=None, rewards=[1.0], mode="frozen", skipped=True)
    assert step_scalars(record) == {"reward": 0.5, "kl": 0.1, "seconds/replay": 2.0, "skipped": 1.0}


def test_tags_hold_no_colon():
    scalars = step_scalars(_record(1, metrics={"rewards/module:function/mean": 0.5}))
    assert scalars["rewards/module_function/mean"] == 0.5 and not any(":" in tag for tag in scalars)
