"""The main job: resumes bit for bit, refuses what is not its own, says what is wrong with its input."""

import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest
import tiny_jobs
import train_grpo

from longstraw_jax import interrupt
from longstraw_jax.evidence import verify
from longstraw_jax.io import adapter, checkpoint, data, metrics
from longstraw_jax.rl import rewards

TESTS = pathlib.Path(__file__).parent
MAIN = tiny_jobs.EXPERIMENTS / "train_grpo.py"


def read(folder):
    """Step records without what a clock or the machine decides."""
    steps = metrics.read_steps(folder / "steps.jsonl")
    return [{k: v for k, v in step.items() if k not in ("seconds", "peak_bytes")} for step in steps]


def adapter_bytes(folder):
    return {path.name: path.read_bytes() for path in (folder / "adapter").iterdir()}


def checkpoints(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())


def files(folder):
    """Every file but TensorBoard's, which a run opens anew."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "tensorboard" not in path.parts
    }


def run(folder, **changes):
    return train_grpo.run(tiny_jobs.config(**changes), folder)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """Six steps without interruption, with a reward that can be told to fail: folder, changes."""
    folder = tmp_path_factory.mktemp("long")
    rows = tiny_jobs.write_rows(folder / "rows.jsonl", folder=str(folder))
    changes = {
        "steps": 6,
        "checkpoint.every": 3,
        "data.paths": (str(rows),),
        "reward.functions": ("tiny_rewards:fails_once",),
    }
    receipt = run(folder / "straight", **changes)
    assert receipt["figures"]["steps"]["value"] == 6 and checkpoints(folder / "straight") == [3, 6]
    return folder, changes


def fail_at(folder, call):
    (folder / "calls").unlink(missing_ok=True)
    (folder / "fail_at").write_text(str(call))


def same_run(found, want):
    assert read(found) == read(want)
    assert adapter_bytes(found) == adapter_bytes(want)


def test_i1_c6_a_run_resumed_after_an_error_equals_one_without(long_run, tmp_path):
    """A reward that fails in step 6 loses that step alone; what follows has the same rows, keys and bits."""
    folder, changes = long_run
    fail_at(folder, 6)
    with pytest.raises(rewards.RewardError, match="fails_once' failed, RuntimeError: the judge") as error:
        run(tmp_path, **changes)
    assert error.type.__mro__.index(ValueError)
    assert json.loads((tmp_path / "receipt.json").read_text())["status"] == "stopped"
    assert len(read(tmp_path)) == 5 and checkpoints(tmp_path)[-1] == 5
    run(tmp_path, **changes)
    same_run(tmp_path, folder / "straight")
    assert {row["row_ids"][0] for row in read(tmp_path)} == {0, 1, 2}


def test_g8_sampler_and_trainer_agree_while_every_projection_of_the_experts_is_trained(long_run):
    """Gate, up and down of routed and shared experts have adapters that move, and no step drifts from the sampler."""
    folder, _ = long_run
    trained = [row["name"] for row in json.loads((folder / "straight" / "trainable.json").read_text())]
    parts, kinds = ("gate_proj", "up_proj", "down_proj"), ("experts", "shared_experts")
    wanted = {f"{kind}.{part}.b" for kind in kinds for part in parts}
    assert wanted <= {".".join(name.split(".")[-3:]) for name in trained}
    gaps = [step["metrics"]["sampling/sampling_logp_difference/max"] for step in read(folder / "straight")]
    assert len(gaps) == 6 and max(gaps) < 1e-4


def test_a_finished_run_run_again_changes_nothing(long_run):
    folder, changes = long_run
    before = files(folder / "straight")
    run(folder / "straight", **changes)
    after = files(folder / "straight")
    assert before.keys() == after.keys()
    assert {name for name in before if after[name] != before[name]} == set()
    assert verify.main([str(folder / "straight")]) == 0


def test_i1_a_run_interrupted_then_killed_and_resumed_equals_one_that_was_not(
    long_run, tmp_path, monkeypatch, capsys
):
    """Ctrl-C before the first checkpoint is due leaves one, and a receipt that says so; a kill leaves neither.

    Both end processes of their own; the run is finished here, by the command's `main`.
    """
    folder, changes = long_run
    made = tiny_jobs.config(**changes)
    config = tiny_jobs.write_config(tmp_path / "config.py", made)
    command = [sys.executable, str(MAIN), f"--config={config}", f"--workdir={tmp_path / 'run'}"]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "JAX_NUM_CPU_DEVICES": "32"}
    log = tmp_path / "run" / "steps.jsonl"

    def lines():
        return log.read_bytes().count(b"\n") if log.exists() else 0

    for number, ends in ((1, signal.SIGINT), (3, signal.SIGKILL)):
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            start = lines()
            while process.poll() is None and not (lines() != start and lines() >= number):
                time.sleep(0.005)
            time.sleep(random.uniform(0, 0.3) if ends == signal.SIGKILL else 0)
            process.send_signal(ends)
            said = process.stderr.read().decode()
        if ends == signal.SIGKILL:
            assert process.returncode in (-signal.SIGKILL, 0), said
            continue
        assert process.returncode == 130 and "interrupted by SIGINT; run the same command again" in said, said
        receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
        assert receipt["status"] == "interrupted" and receipt["figures"]["steps"]["value"] == lines()
        assert checkpoints(tmp_path / "run") == [lines()] and verify.main([str(tmp_path / "run")]) == 0
    alone = {"coordinator": None, "num_processes": None, "process_id": None}
    given = types.SimpleNamespace(config=made, workdir=str(tmp_path / "run"), **alone)
    monkeypatch.setattr(train_grpo, "flags", types.SimpleNamespace(FLAGS=given))
    train_grpo.main([str(MAIN)])
    assert capsys.readouterr().out.splitlines()[-1] == f"receipt: {tmp_path / 'run' / 'receipt.json'}"
    same_run(tmp_path / "run", folder / "straight")


def test_i1_a_step_that_resamples_is_dropped_whole_and_the_rows_go_on_from_their_place(tmp_path, capsys):
    """Only row 1 of three has a signal: a step takes rows until it comes, at most three."""
    changes = {"steps": 4, "checkpoint.every": 2, "grpo.max_resamples": 2}
    changes |= {"reward.functions": ("tiny_rewards:second_row_alone",)}
    run(tmp_path / "straight", **changes)
    want = read(tmp_path / "straight")
    assert [step["row_ids"] for step in want] == [[1]] * 4
    assert 0 < sum(len(step["resampled_row_ids"]) for step in want) < 9
    places = [row for step in want for row in step["resampled_row_ids"] + step["row_ids"]]
    job = tiny_jobs.job(**changes)
    assert places == [tiny_row(job, place)["id"] for place in range(len(places))]
    for step in want:
        assert step["metrics"]["dynamic_sampling/resampled"] == len(step["resampled_row_ids"])
        assert len(step["resampled_rewards"]) == len(step["resampled_row_ids"]) * step["group_size"]
        assert step["metrics"]["dynamic_sampling/without_signal"] == 0 < step["metrics"]["reward_std"]
    assert want[-1]["metrics"]["epoch"] == len(places) / 3
    rows = {row["id"]: job.build(row["prompt"]).size for row in job.dataset.rows}
    assert want[-1]["metrics"]["num_tokens"] >= sum(rows[row] for row in places) + len(places) * 4

    def signalled():  # within the fourth step, or its resampling
        return "SIGTERM" if len(read(tmp_path / "again")) == 3 else None

    with pytest.raises(interrupt.Interrupted, match="SIGTERM"):
        train_grpo.run(tiny_jobs.config(**changes), tmp_path / "again", signalled)
    assert checkpoints(tmp_path / "again") == [2, 3] and verify.main([str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again" / "receipt.json").read_text())["status"] == "interrupted"
    run(tmp_path / "again", **changes)
    same_run(tmp_path / "again", tmp_path / "straight")
    assert json.loads((tmp_path / "again" / "receipt.json").read_text())["status"] == "finished"
    assert " resampled" in capsys.readouterr().out


def tiny_row(job, place):
    return job.dataset.rows[data.row_order(len(job.dataset.rows), 0, place, 1)[0]]


def test_a_signal_before_the_first_step_leaves_nothing_to_verify(tmp_path):
    with pytest.raises(interrupt.Interrupted, match="SIGINT"):
        train_grpo.run(tiny_jobs.config(), tmp_path, lambda: "SIGINT")
    assert read(tmp_path) == [] and not (tmp_path / "receipt.json").exists()


@pytest.mark.parametrize("function", ["equal", "nothing"])
def test_a_run_without_a_signal_stops_and_says_so(function, tmp_path, caplog):
    """After two steps; what there is, is kept. Run again, it goes on and stops after the next."""
    changes = {"steps": 6, "grpo.stop_without_signal": 2, "reward.functions": (f"tiny_rewards:{function}",)}
    for steps in (2, 3):
        with pytest.raises(train_grpo.NoSignalError, match=f"{steps} steps in a row without a signal, up to step"):
            run(tmp_path, **changes)
        assert f"none of {steps} steps had a signal" in caplog.text
        assert len(read(tmp_path)) == checkpoints(tmp_path)[-1] == steps
        assert json.loads((tmp_path / "receipt.json").read_text())["status"] == "stopped"
    assert verify.main([str(tmp_path)]) == 0
    assert [step["reward_mean"] for step in read(tmp_path)] == [0.5 if function == "equal" else None] * 3


def test_a_full_disk_leaves_the_checkpoint_before_and_the_run_resumes(long_run, tmp_path):
    """The limit on file sizes lets logs through and no arrays."""
    folder, changes = long_run
    fail_at(folder, 5)
    with pytest.raises(rewards.RewardError):
        run(tmp_path, **changes)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(checkpoint.CheckpointSaveError, match="step 4 still stands") as error:
            run(tmp_path, **changes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(error.value, OSError) and checkpoints(tmp_path) == [3, 4]
    run(tmp_path, **changes)
    same_run(tmp_path, folder / "straight")


def test_another_configuration_is_refused_and_its_field_named(long_run):
    folder, changes = long_run
    before = files(folder / "straight")
    for field, value, said in (
        ("grpo.clip_high", 0.3, "config.grpo.clip_high = 0.28 there, 0.3 given"),
        ("lora.q_a.rank", 4, "config.lora.q_a.rank = 2 there, 4 given"),
    ):
        with pytest.raises(ValueError) as error:
            run(folder / "straight", **changes | {field: value})
        assert said in str(error.value)
    assert files(folder / "straight") == before


def test_g5_adapters_of_another_rank_are_refused_with_both_values(long_run, tmp_path):
    """Also where config.json was taken away."""
    folder, changes = long_run
    shutil.copytree(folder / "straight" / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(
        checkpoint.CheckpointMismatchError, match="lora.q_a.rank: checkpoint has 2, this run has 4"
    ):
        run(tmp_path, **changes | {"lora.q_a.rank": 4})


def test_i1_a_changed_dataset_is_refused(tmp_path):
    rows = tiny_jobs.write_rows(tmp_path / "rows.jsonl")
    changes = {"steps": 1, "data.paths": (str(rows),)}
    run(tmp_path / "run", **changes)
    before = files(tmp_path / "run")
    rows.write_text(rows.read_text().replace("Digits", "Number"))
    said = r"another run: data\.paths\..*rows.jsonl: checkpoint has"
    with pytest.raises(checkpoint.CheckpointMismatchError, match=said):
        run(tmp_path / "run", **changes)
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize(
    "function, said",
    [
        ("hangs", "'tiny_rewards:hangs' was killed"),
        ("too_few", "'tiny_rewards:too_few' returned 1 rewards; expected 4"),
    ],
)
def test_a9_a_bad_reward_function_ends_the_run_by_name(function, said, tmp_path):
    with pytest.raises(rewards.RewardError, match=said):
        run(tmp_path, **{"reward.functions": (f"tiny_rewards:{function}",), "reward.timeout_s": 0.3})
    assert read(tmp_path) == [] and not (tmp_path / "receipt.json").exists()


def test_on_32_devices_the_first_step_is_that_of_one_device(tmp_path):
    """Rows, responses' rewards and adapters; the learning rate is the default one, as Adam divides by the noise."""
    changes = {"steps": 1, "optimizer.learning_rate": 1e-5, "reward.functions": ("tiny_rewards:mean_byte",)}
    kept = {}
    for devices in (1, 32):
        run(tmp_path / str(devices), **changes | {"mesh.devices": devices})
        job = tiny_jobs.job(**changes)
        kept[devices] = adapter.import_peft(
            tmp_path / str(devices) / "adapter", job.model.config, job.model.lora
        )
    one, many = (read(tmp_path / str(devices))[0] for devices in (1, 32))
    for field in ("row_ids", "rewards", "response_lengths", "loss_count"):
        assert one[field] == many[field]
    assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    for a, b in zip(jax.tree.leaves(kept[1]), jax.tree.leaves(kept[32]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_g1_what_trains_is_in_the_run_folder_and_its_receipt(long_run):
    folder = long_run[0] / "straight"
    table = json.loads((folder / "trainable.json").read_text())
    assert {row["target"] for row in table} == set(tiny_jobs.config().lora)
    artifacts = json.loads((folder / "receipt.json").read_text())["artifacts"]
    assert {"path": "trainable.json", "kind": "report"}.items() <= next(
        a for a in artifacts if a["path"] == "trainable.json"
    ).items()


def test_prompts_of_different_lengths_share_the_capacity_of_the_longest(long_run):
    job = tiny_jobs.job()
    sizes = [job.build(row["prompt"]).size for row in job.dataset.rows]
    assert len(set(sizes)) == 3 and job.policy.capacity == max(sizes)
    assert {row["prompt_tokens"][0] for row in read(long_run[0] / "straight")} == set(sizes)


def test_h2_a_longer_range_is_opted_into():
    job = tiny_jobs.job(**{"grpo.max_new_tokens": 300, "model.yarn_positions": 1024})
    assert job.model.config.max_position_embeddings == 1024
    assert job.model.config.rope_parameters.rope_type == "yarn"
