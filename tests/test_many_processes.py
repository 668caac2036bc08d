"""Four processes of 8 emulated devices: they agree, each reads its own part of a checkpoint, and they end together."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny_jobs
from safetensors.numpy import load_file, save_file

from longstraw_jax import fingerprint, launch
from longstraw_jax.config import load_model_config
from longstraw_jax.io import adapter, hf_checkpoint, hf_layout, metrics

TESTS = pathlib.Path(__file__).parent
PROCESSES = 4
MAIN = tiny_jobs.EXPERIMENTS / "train_grpo.py"


def start(folder, arguments):
    """A process a list of arguments; what they say goes to FOLDER/<number>.err and .out."""
    unwanted = ("JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR")  # a cache serves process 0 alone
    environment = {k: v for k, v in os.environ.items() if k not in unwanted} | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    started = []
    for number, given in enumerate(arguments):
        with open(folder / f"{number}.out", "w") as out, open(folder / f"{number}.err", "w") as err:
            command = [sys.executable, *map(str, given)]
            started.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err))
    return started


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def wait_for(condition, processes, folder, limit_s):
    """Until the condition holds; fails if a process ends before."""
    deadline = time.monotonic() + limit_s
    while not condition():
        said = [(folder / f"{n}.err").read_text()[-2000:] for n, p in enumerate(processes) if p.poll() is not None]
        assert not said, said
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.05)


def kill_one(processes, folder, number):
    """Kills a process; the others' exit codes, what they said, and how long they took to end."""
    processes[number].send_signal(signal.SIGKILL)
    begun, others = time.monotonic(), [p for n, p in enumerate(processes) if n != number]
    codes = [p.wait(timeout=90) for p in others]
    seconds = time.monotonic() - begun
    return codes, [(folder / f"{n}.err").read_text() for n in range(PROCESSES) if n != number], seconds


def check_ended(codes, said, seconds):
    """All failed within a minute, and each has said how to resume: at its start, as JAX or gloo may end it anywhere."""
    assert all(code != 0 for code in codes) and seconds < 60, (codes, seconds)
    for text in said:
        assert launch.RESUME in text, text[-2000:]


def blank_others(tensors, config, process, value=np.nan):
    """The tensors with everything that the process's devices do not hold overwritten."""
    tensors = {name: tensor.copy() for name, tensor in tensors.items()}
    for parameter in jax.tree.leaves(hf_layout.parameters(config)):
        for names in parameter.names:
            share = len(names) // PROCESSES
            for number, name in enumerate(names):
                if parameter.experts:
                    if not process * share <= number < (process + 1) * share:
                        tensors[name][...] = value
                    continue
                spec = [*tuple(parameter.spec)[parameter.stacked :]]
                spec += [None] * (tensors[name].ndim - len(spec))
                if not any(spec):
                    continue
                axis = (spec[::-1] if parameter.transposed else spec).index("ctx")
                rows = np.moveaxis(tensors[name], axis, 0)
                part = len(rows) // PROCESSES
                rows[: process * part] = value
                rows[(process + 1) * part :] = value
    return tensors


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each process found, the folder, and how the others ended when process 2 was killed."""
    folder, source = tmp_path_factory.mktemp("many"), tiny_jobs.checkpoint()
    tensors, config = load_file(source / "model.safetensors"), load_model_config(source)
    damaged = "model.layers.1.self_attn.q_a_proj.weight"
    for process in range(PROCESSES):
        own = blank_others(tensors, config, process)
        for kind in ("checkpoint", "damaged"):
            if kind == "damaged" and process == 3:
                own[damaged][0, -1] = np.inf  # in process 3's columns
            shutil.copytree(source, folder / f"{kind}{process}")
            save_file(own, folder / f"{kind}{process}" / "model.safetensors", metadata={"format": "pt"})
    port = free_port()
    arguments = [[TESTS / "one_of_many.py", folder, port, PROCESSES, n] for n in range(PROCESSES)]
    processes = start(folder, arguments)
    try:
        files = [folder / f"found{n}.json" for n in range(PROCESSES)]
        wait_for(lambda: all(file.exists() for file in files), processes, folder, 300)
        ended = kill_one(processes, folder, 2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(file.read_text()) for file in files], ended


def test_they_see_all_devices_and_exchange_what_each_knows(found):
    every, _ = found
    for one in every:
        assert one["devices"] == [32, 8]
        assert one["exchanged"] == [{"number": n, "text": "x" * n} for n in range(PROCESSES)]
        assert one["first"] == every[0]["pid"]
        assert one["to_host"] == np.arange(192.0).reshape(64, 3).tolist()


def test_what_differs_or_fails_on_one_ends_all_by_name(found):
    every, _ = found
    for one in every:
        assert one["differs"] == (
            "LaunchError: the seed: process 2 has 7, process 0 has 3; accepted: the same on every process"
        )
    assert [one["failed"] for one in every] == ["OSError: no space", *["LaunchError: process 0: no space"] * 3]


def test_each_process_reads_its_own_part_of_a_checkpoint_and_no_other(found):
    """In every process's copy of the files the parts of the others are NaN."""
    whole = fingerprint.tree_fingerprint(hf_checkpoint.load(tiny_jobs.checkpoint())[1])
    assert [one["whole"] for one in found[0]] == [whole] * PROCESSES


def test_an_infinity_in_one_process_s_part_is_named_by_all(found):
    for one in found[0]:
        assert one["not_finite"].endswith(f"{hf_checkpoint.NOT_FINITE} (1): model.layers.1.self_attn.q_a_proj.weight")


def test_a_killed_process_ends_the_others_within_a_minute(found):
    check_ended(*found[1])


def check_same_run(one, four):
    """Two run folders: tokens, rewards and losses bit for bit; gradients and adapters to the round-off of one sum.

    Between processes the devices' gradients are added in another order than within one, so that last bits differ;
    Adam carries them into the adapters.
    """
    a, b = (json.loads((folder / "receipt.json").read_text()) for folder in (one, four))
    assert b["devices"] | {"processes": 1} == a["devices"] and b["devices"]["processes"] == PROCESSES
    assert a["weights_fingerprint"] == b["weights_fingerprint"]
    for x, y in zip(*(metrics.read_steps(folder / "steps.jsonl") for folder in (one, four)), strict=True):
        # How far sampler and trainer are apart is round-off itself.
        for step in (x, y):
            gaps = [step["metrics"].pop(name) for name in sorted(step["metrics"]) if name.startswith("sampling/")]
            assert gaps and max(gaps) < 1e-5
        same = ("row_ids", "rewards", "advantages", "response_lengths", "loss", "loss_sum", "loss_count", "metrics")
        assert {name: x[name] for name in same} == {name: y[name] for name in same}
        assert y["grad_norm"] == pytest.approx(x["grad_norm"], rel=1e-6)
    tensors = [load_file(folder / "adapter" / adapter.WEIGHTS) for folder in (one, four)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, value in tensors[0].items():
        np.testing.assert_allclose(tensors[1][name], value, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.processes
def test_i1_the_main_job_in_four_processes_killed_and_resumed_is_that_of_one(tmp_path):
    """Two steps on 32 devices, process 1 killed after the first. Compiles in every process: minutes on two cores."""
    changes = {"mesh.devices": 32, "reward.functions": ("tiny_rewards:mean_byte",)}
    tiny_jobs.train_grpo.run(tiny_jobs.config(**changes), tmp_path / "one")
    config = tiny_jobs.write_config(tmp_path / "config.py", tiny_jobs.config(**changes | {"mesh.emulate": True}))
    run = tmp_path / "four"

    def launched():
        shared = [MAIN, f"--config={config}", f"--workdir={run}", f"--coordinator=localhost:{free_port()}"]
        shared.append(f"--num_processes={PROCESSES}")
        return start(tmp_path, [[*shared, f"--process_id={number}"] for number in range(PROCESSES)])

    processes = launched()
    try:
        wait_for((run / "checkpoints" / "1").exists, processes, tmp_path, 900)
        check_ended(*kill_one(processes, tmp_path, 1))
        assert not (run / "receipt.json").exists()
        processes = launched()
        codes = [process.wait(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * PROCESSES, (tmp_path / "0.err").read_text()[-2000:]
    spoken = [(tmp_path / f"{n}.out").read_text().splitlines() for n in range(PROCESSES)]
    # Gloo speaks from several threads at once, so that one line of its own can stand in two.
    gloo = ("[Gloo]", "peer ranks")
    lines = [[line for line in lines if line and not any(word in line for word in gloo)] for lines in spoken]
    assert lines[0][-1] == f"receipt: {run / 'receipt.json'}" and lines[1:] == [[]] * 3
    check_same_run(tmp_path / "one", run)
