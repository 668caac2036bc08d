"""Bad input to the main job: exit code 2, one line, nothing written; and every configuration field does something."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import tiny_jobs
import train_grpo

from longstraw_jax.evidence import receipt
from longstraw_jax.io.run_lock import LOCK_FILE, run_lock

MAIN = tiny_jobs.EXPERIMENTS / "train_grpo.py"
TESTS = pathlib.Path(__file__).parent

# Runs the script once a line of arguments, each time in a fork of a process that has paid for the imports.
FORKS = """
import contextlib, json, os, runpy, sys
main, calls = sys.argv[1], json.load(open(sys.argv[2]))
sys.path.insert(0, os.path.dirname(main))
import train_grpo
for out, arguments in calls:
    if os.fork() == 0:
        sys.stdout, sys.stderr = open(out + ".out", "w"), open(out + ".err", "w")
        os.dup2(sys.stdout.fileno(), 1), os.dup2(sys.stderr.fileno(), 2)
        sys.argv = [main, *arguments]
        code = 70
        try:
            runpy.run_path(main, run_name="__main__")
        except SystemExit as exit:
            code = exit.code
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            open(out + ".code", "w").write(str(code))
            os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Inputs that are wrong in one way each."""
    folder = tmp_path_factory.mktemp("bad")
    small = [p for p in tiny_jobs.checkpoint().iterdir() if p.suffix != ".safetensors"]
    raw = json.loads((tiny_jobs.checkpoint() / "config.json").read_text())
    for name, changes in (
        ("llama", {"model_type": "llama"}),
        ("narrow", {"vocab_size": 260}),
        ("no_dense", {"mlp_layer_types": ["sparse", "sparse"]}),
    ):
        (folder / name).mkdir()
        for path in small:
            shutil.copy(path, folder / name)
        (folder / name / "config.json").write_text(json.dumps(raw | changes))
    good = tiny_jobs.rows().read_text().splitlines()
    for name, key in (("no_prompt", "prompt"), ("no_answer", "reward_model")):
        row = {k: v for k, v in json.loads(good[1]).items() if k != key}
        (folder / f"{name}.jsonl").write_text("\n".join([good[0], json.dumps(row), good[2]]) + "\n")
    (folder / "empty.jsonl").touch()
    (folder / "blank.jsonl").write_text("\n\n")
    tiny_jobs.write_config(folder / "config.py", tiny_jobs.config())
    return folder


# Arguments with {folder} for the inputs, and what the one line must hold.
BAD = {
    "prompt too long": (
        ["--config.grpo.max_new_tokens=200"],
        [
            "dataset row of id 2, grpo.max_new_tokens=200: ",
            "max_position_embeddings=256",
            "--config.model.yarn_positions=",
            "prompt plus response of ",
        ],
    ),
    "group of one": (["--config.grpo.group=1"], ["grpo.group=1; accepted: an integer of at least 2"]),
    "no response": (["--config.grpo.max_new_tokens=0"], ["grpo.max_new_tokens=0; accepted: at least 1"]),
    "resamples": (["--config.grpo.max_resamples=-1"], ["grpo.max_resamples=-1; accepted: at least 0"]),
    "silent steps": (["--config.grpo.stop_without_signal=-1"], ["grpo.stop_without_signal=-1; accepted: at least 0"]),
    "overlong cache": (
        ["--config.reward.overlong_cache=9", "--config.reward.overlong_penalty=-1"],
        ["reward.overlong_cache=9; accepted: 0 to grpo.max_new_tokens=8", "reward.overlong_penalty=-1.0; accepted: at"],
    ),
    "level of the ratio": (
        ["--config.grpo.importance_level=word"],
        ["grpo.importance_level='word'; accepted: token, sequence"],
    ),
    "mask of ratios": (["--config.grpo.mis_cap=0.5"], ["grpo.mis_cap=0.5; accepted: None (a configuration's 0) or"]),
    "entropy": (["--config.grpo.entropy_coef=-1"], ["grpo.entropy_coef=-1.0; accepted: a number of at least 0"]),
    "empty dataset": (["--config.data.paths=('{folder}/empty.jsonl',)"], ["empty.jsonl: the file is empty"]),
    "dataset of no rows": (["--config.data.paths=('{folder}/blank.jsonl',)"], ["blank.jsonl: holds no rows"]),
    "unknown mode": (["--config.grpo.mode=thawed"], ["mode='thawed'", "'frozen' or 'detached' or 'exact'"]),
    "a selection that nothing would read": (
        ["--config.capture.keep_selection=True"],
        ["keep_selection=True with mode='detached'", "accepted: with mode='exact'"],
    ),
    "mesh that does not divide": (
        ["--config.mesh.devices=5", "--config.mesh.emulate=True"],
        ["is not divisible by the mesh of 5 devices", "accepted: a multiple of 5", "dimension '"],
    ),
    "more devices than there are": (
        ["--config.mesh.devices=5"],
        ["mesh.devices=5 is not available; accepted: 1 to 1"],
    ),
    "no devices": (
        ["--config.mesh.devices=0", "--config.mesh.emulate=True"],
        ["mesh.devices=0; accepted: at least 1"],
    ),
    "another architecture": (
        ["--config.model.checkpoint={folder}/llama"],
        ["model_type", "'llama'", "'glm_moe_dsa'"],
    ),
    "no checkpoint": (["--config.model.checkpoint={folder}/gone"], ["gone/config.json does not exist"]),
    "checkpoint not given": (
        ["--config.model.checkpoint="],
        ["model.checkpoint=''; accepted: a Hugging Face"],
    ),
    "row without prompt": (
        ["--config.data.paths=('{folder}/no_prompt.jsonl',)"],
        ["no_prompt.jsonl, line 2: field prompt is missing"],
    ),
    "row without answer": (
        ["--config.data.paths=('{folder}/no_answer.jsonl',)", "--config.reward.functions=('exact_match',)"],
        ["no_answer.jsonl, line 2: field ground_truth or reward_model.ground_truth is missing"],
    ),
    "no data": (["--config.data.paths=('{folder}/gone.jsonl',)"], ["data.paths: ", "gone.jsonl: no such file"]),
    "unknown reward": (
        ["--config.reward.functions=('nope',)"],
        ["reward.functions: 'nope'; accepted: digit_share, exact_match, boxed_math or 'module:function'"],
    ),
    "reward that cannot be imported": (
        ["--config.reward.functions=('nope:f',)"],
        ["reward.functions: 'nope:f'", "No module named 'nope'"],
    ),
    "reward that is no function": (
        ["--config.reward.functions=('os:path',)"],
        ["reward.functions: 'os:path' is of type module, no function; accepted: digit_share"],
    ),
    "rewards and weights": (
        ["--config.reward.weights=(1.0,2.0)"],
        ["reward.weights=(1.0, 2.0); accepted: 1 finite"],
    ),
    "no rewards": (["--config.reward.functions=()", "--config.reward.weights=()"], ["reward.functions=()"]),
    "reward timeout": (["--config.reward.timeout_s=0"], ["reward.timeout_s=0.0; accepted: seconds above 0"]),
    "unknown field": (
        ["--config.grpo.nope=1"],
        ["--config.grpo.nope: no field 'nope'; accepted: those of the --config file"],
    ),
    "unknown section": (["--config.nope.beta=1"], ["--config.nope.beta: no field 'nope'"]),
    "wrong type": (["--config.steps=soon"], ["flag --config.steps=soon; accepted: an integer"]),
    "wrong type of a number": (
        ["--config.grpo.temperature=warm"],
        ["flag --config.grpo.temperature=warm; accepted: a number"],
    ),
    "wrong type of a choice": (
        ["--config.grpo.router_replay=maybe"],
        ["flag --config.grpo.router_replay=maybe; accepted: true or false"],
    ),
    "a section as a value": (["--config.refresh=drift"], ["flag --config.refresh=drift; accepted: one of its fields"]),
    "slots": (["--config.grpo.slots=-1"], ["grpo.slots=-1; accepted: at least 0"]),
    "stop string": (["--config.grpo.stop=('ok','')"], ["grpo.stop=('ok', ''); accepted: strings of at least one char"]),
    "stop of another type": (["--config.grpo.stop=(1,)"], ["grpo.stop=(1,); accepted: a tuple, each a string"]),
    "too few bytes for a prompt": (
        ["--config.capture.resident_bytes=10"],
        ["capture.resident_bytes=10; accepted: 0 (one prompt), or at least "],
    ),
    "more bytes than there are": (
        ["--config.capture.resident_bytes=1000000000000000"],
        ["other prompts 1000000.00", "by more devices, a smaller capture.chunk, capture.resident_bytes"],
    ),
    "resident prompts that none would use": (
        ["--config.capture.resident_bytes=1000000", "--config.grpo.mode=exact"],
        ["capture.resident_bytes=1000000 with mode='exact'", "accepted: 0"],
    ),
    "refresh policy": (["--config.refresh.policy=weekly"], ["refresh.policy='weekly'; accepted: 'every_step' or 'ev"]),
    "age of a stale prompt": (["--config.refresh.every=0"], ["refresh.every=0; accepted: at least 1"]),
    "bound of the drift": (["--config.refresh.bound=nan"], ["refresh.bound=nan; accepted: a finite number"]),
    "probe": (["--config.refresh.probe_tokens=0"], ["refresh.probe_tokens=0; accepted: at least 1"]),
    "a stale prompt's gradient": (
        ["--config.refresh.policy=drift", "--config.grpo.mode=exact"],
        ["refresh.policy='drift' with mode='exact'", "accepted: 'every_step'"],
    ),
    "no steps": (["--config.steps=0"], ["steps=0; accepted: a positive multiple"]),
    "steps and updates": (["--config.steps=3", "--config.grpo.updates=2"], ["steps=3", "grpo.updates=2"]),
    "temperature": (["--config.grpo.temperature=0"], ["temperature=0.0; accepted: at least 0.001"]),
    "target that matches nothing": (
        ["--config.model.checkpoint={folder}/no_dense"],
        ["lora.targets='dense' matches no module", "accepted: [", "'routed'"],
    ),
    "unknown kernels": (["--config.model.kernels=fast"], ["kernels='fast'", "accepted: 'auto' or 'reference'"]),
    "negative rank": (["--config.lora.q_a.rank=-1"], ["lora.q_a.rank", "-1"]),
    "tokenizer larger than the vocabulary": (
        ["--config.model.checkpoint={folder}/narrow"],
        ["tokenizer of 265 ids; accepted: at most vocab_size=260"],
    ),
    "document without length": (["--config.data.document=python"], ["data.prompt_tokens=0"]),
    "unknown document": (
        ["--config.data.document=novel"],
        ["data.document='novel'; accepted: 'none' or 'python'"],
    ),
    "length without document": (
        ["--config.data.prompt_tokens=9"],
        ["dataset row of id 0, data.prompt_tokens=9", "accepted: the prompt's own 59, or a document"],
    ),
    "position range": (["--config.model.yarn_positions=100"], ["yarn_positions", "100", "256"]),
    "kl estimator": (["--config.grpo.kl_estimator=k1"], ["kl_estimator='k1'; accepted: k3, k2"]),
    "seed": (["--config.seed=-1"], ["seed=-1; accepted: 0 to 4294967295"]),
    "checkpoints kept": (["--config.checkpoint.keep=0"], ["checkpoint.keep=0; accepted: at least 1"]),
    "optimizer": (["--config.optimizer.b1=1.0"], ["optimizer.b1=1.0; accepted: 0 to below 1"]),
    "learning rate": (
        ["--config.optimizer.learning_rate=inf", "--config.grpo.temperature=nan"],
        ["optimizer.learning_rate=inf; accepted: a finite number", "grpo.temperature=nan; accepted: a finite number"],
    ),
    "stray argument": (["more"], ["arguments ['more']; accepted: --config=FILE --workdir=DIR"]),
}


@pytest.fixture(scope="module")
def results(folder):
    """Exit code, lines on stderr and the run folder of every entry of BAD."""
    calls = {}
    for number, (name, (arguments, _)) in enumerate(BAD.items()):
        out = folder / f"call{number}"
        given = [argument.format(folder=folder) for argument in arguments]
        calls[name] = (str(out), [f"--config={folder / 'config.py'}", f"--workdir={out}", *given])
    (folder / "calls.json").write_text(json.dumps(list(calls.values())))
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"} | {"PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", FORKS, str(MAIN), str(folder / "calls.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = {}
    for name, (out, _) in calls.items():
        code, err = (pathlib.Path(out + ending).read_text() for ending in (".code", ".err"))
        found[name] = (int(code), err.splitlines(), pathlib.Path(out))
    return found


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_exit_code_2_and_nothing_written(name, results):
    code, lines, workdir = results[name]
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: "), lines
    for part in BAD[name][1]:
        assert part in lines[0], lines[0]
    assert not workdir.exists()


def test_devices_that_the_processes_cannot_share_are_refused():
    with pytest.raises(ValueError, match="^mesh.devices=0; accepted: at least 1$"):
        train_grpo.set_devices(tiny_jobs.config(**{"mesh.devices": 0}))
    with pytest.raises(ValueError, match="mesh.devices=5; accepted: at least 1, a multiple of the 2 processes$"):
        train_grpo.set_devices(tiny_jobs.config(**{"mesh.devices": 5}), 2)


def test_another_configurations_folder_is_refused_before_weights_are_read(tmp_path):
    receipt.bind_config(tmp_path, train_grpo.plain(tiny_jobs.config(seed=1)))
    gone = tiny_jobs.config(**{"seed": 2, "model.checkpoint": str(tmp_path / "gone")})
    with pytest.raises(ValueError, match="belongs to another configuration: config.model.checkpoint = "):
        train_grpo.run(gone, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [receipt.CONFIG_FILE]


def test_a_folder_in_use_is_refused(tmp_path):
    with run_lock(tmp_path), pytest.raises(ValueError, match="is in use by another run"):
        train_grpo.run(tiny_jobs.config(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]
