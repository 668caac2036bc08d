"""Training checkpoints: bits, meshes, kills at any moment, full disks, damage, and runs that do not match."""

import logging
import multiprocessing
import os
import resource
import shutil
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from longstraw_jax import sharding
from longstraw_jax.config import LoraConfig
from longstraw_jax.io import checkpoint

RUN = {"config_sha256": "c0", "dataset_sha256": "d0", "base_fingerprint": "b0", "mode": "detached"}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def _host_state(seed: int) -> dict:
    """One leaf of every kind that a run saves; floats hold -0.0, a subnormal and a NaN with a payload."""
    rng = np.random.default_rng(seed)
    odd = np.array([0x80000000, 0x00000001, 0x7FC12345], np.uint32).view(np.float32)
    experts = rng.standard_normal((2, 32, 4, 3), np.float32)
    experts[0, 0, 0] = odd
    adapters = {"q_a": {"a": rng.standard_normal((2, 6, 3), np.float32)}, "mlp.experts.up": {"a": experts}}
    return {
        "adapters": adapters,
        "optimizer": OPTIMIZER.init(adapters),
        "bfloat16": rng.standard_normal(70).astype(jnp.bfloat16),
        "step": np.int32(seed),
        "key_data": rng.integers(2**32, size=(2,), dtype=np.uint32),
        "finite": np.bool_(True),
    }


def _place(state: dict, devices: int) -> dict:
    """The state on a mesh: experts sharded, the rest whole on every device; and a typed random key."""
    mesh = sharding.make_mesh(devices)

    def put(path, leaf):
        expert = any(getattr(key, "key", None) == "mlp.experts.up" for key in path)
        spec = PartitionSpec(None, sharding.AXIS) if expert else PartitionSpec()
        return jax.device_put(leaf, sharding.named(mesh, spec))

    placed = jax.tree_util.tree_map_with_path(put, state)
    key = jax.device_put(jax.random.key(int(state["step"])), sharding.named(mesh, PartitionSpec()))
    return placed | {"key": key}


def _state(seed: int, devices: int = 1) -> dict:
    return _place(_host_state(seed), devices)


def _bytes(tree) -> list[tuple[str, bytes]]:
    def raw(leaf):
        typed_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if typed_key else leaf).tobytes()

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape}", raw(leaf)) for path, leaf in leaves]


def _abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _folders(directory) -> list[str]:
    return sorted(os.listdir(directory))


@pytest.mark.parametrize("saved_on, restored_on", [(1, 8), (8, 32), (32, 32), (32, 1)])
def test_bits_survive_on_every_mesh(tmp_path, saved_on, restored_on):
    state = _state(3, saved_on)
    checkpoint.save(tmp_path, 3, state, RUN)
    like = _abstract(_state(4, restored_on))
    restored, metadata = checkpoint.restore(tmp_path, like, expected=RUN)
    assert metadata == RUN
    assert _bytes(restored) == _bytes(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, restored, like))


def test_the_newest_are_kept_and_found(tmp_path):
    directory = tmp_path / "checkpoints"
    assert checkpoint.latest_step(directory) is None
    assert not directory.exists()  # looking leaves no trace
    for step in (5, 10, 15, 20):
        checkpoint.save(directory, step, _state(step), RUN, keep=3)
    assert _folders(directory) == ["10", "15", "20"]
    assert checkpoint.latest_step(directory) == 20
    older, _ = checkpoint.restore(directory, _state(0), step=10, expected=RUN)
    assert _bytes(older) == _bytes(_state(10))
    checkpoint.save(directory, 21, _state(21), RUN, keep=1)
    assert _folders(directory) == ["21"]


def test_requests_that_cannot_be_met_write_nothing(tmp_path):
    checkpoint.save(tmp_path, 4, _state(4), RUN)
    with pytest.raises(checkpoint.CheckpointError, match="keep=0; accepted: at least 1"):
        checkpoint.save(tmp_path, 5, _state(5), RUN, keep=0)
    for step in (3, 4):
        with pytest.raises(checkpoint.CheckpointError, match=f"step={step}: .* holds step 4; accepted: a later"):
            checkpoint.save(tmp_path, step, _state(5), RUN)
    with pytest.raises(ValueError, match="'loss'.* is float; accepted: arrays"):
        checkpoint.save(tmp_path, 5, {"loss": 0.5}, RUN)
    with pytest.raises(ValueError, match="not JSON compliant"):
        checkpoint.save(tmp_path, 5, _state(5), RUN | {"loss": float("nan")})
    assert _folders(tmp_path) == ["4"]
    with pytest.raises(checkpoint.CheckpointError, match=r"step=9 is not in .*; accepted: \[4\]"):
        checkpoint.restore(tmp_path, _state(0), step=9, expected=RUN)
    with pytest.raises(checkpoint.CheckpointError, match="none holds no checkpoint"):
        checkpoint.restore(tmp_path / "none", _state(0), expected=RUN)


def test_another_state_is_refused_and_never_cast(tmp_path):
    state = _state(1)
    checkpoint.save(tmp_path, 1, state, RUN)
    cast = state | {"bfloat16": state["bfloat16"].astype(jnp.float32)}
    with pytest.raises(
        checkpoint.CheckpointMismatchError,
        match=r"\['bfloat16'\]: checkpoint has bfloat16\[70\], this run has float32\[70\]",
    ):
        checkpoint.restore(tmp_path, cast, expected=RUN)
    less = {name: leaf for name, leaf in state.items() if name != "step"}
    with pytest.raises(checkpoint.CheckpointMismatchError, match=r"has int32\[\], this run has nothing"):
        checkpoint.restore(tmp_path, less, expected=RUN)
    with pytest.raises(checkpoint.CheckpointMismatchError, match=r"has nothing, this run has int32\[\]"):
        checkpoint.restore(tmp_path, state | {"skipped": state["step"]}, expected=RUN)
    with pytest.raises(checkpoint.CheckpointError, match=r"like\['step'\] is int32 without a sharding"):
        checkpoint.restore(tmp_path, state | {"step": np.int32(1)}, expected=RUN)


def _lora_entries(lora: LoraConfig) -> dict:
    return {"lora": {name: {"rank": rank, "alpha": alpha} for name, rank, alpha in lora.targets}}


@pytest.mark.parametrize(
    "targets, message",
    [
        ((("o", 4, 8.0), ("q_a", 8, 16.0)), "lora.q_a.rank: checkpoint has 4, this run has 8"),
        ((("o", 4, 4.0), ("q_a", 4, 16.0)), "lora.o.alpha: checkpoint has 8.0, this run has 4.0"),
        ((("q_a", 4, 16.0),), "lora.o.rank: checkpoint has 4, this run has nothing"),
    ],
)
def test_g5_another_rank_alpha_or_target_is_refused(tmp_path, targets, message):
    saved = _lora_entries(LoraConfig((("o", 4, 8.0), ("q_a", 4, 16.0))))
    checkpoint.save(tmp_path, 1, _state(1), RUN | saved)
    checkpoint.restore(tmp_path, _state(0), expected=saved)
    with pytest.raises(checkpoint.CheckpointMismatchError, match=message):
        checkpoint.restore(tmp_path, _state(0), expected=RUN | _lora_entries(LoraConfig(targets)))


ROWS = 7


def _first_state() -> dict:
    adapters = {"a": jax.random.normal(jax.random.key(1), (8, 2)), "b": jnp.zeros((2, 8))}
    return {
        "adapters": adapters,
        "optimizer": OPTIMIZER.init(adapters),
        "key": jax.random.key(7),
        "row": jnp.int32(0),
    }


@jax.jit
def _train_step(state: dict) -> tuple[dict, dict]:
    """A step whose data, noise and moments all come from the state, as in a real run."""
    key, draw = jax.random.split(state["key"])
    inputs = jax.random.normal(draw, (4, 8)) + state["row"]

    def loss(adapters):
        return jnp.mean((inputs + inputs @ adapters["a"] @ adapters["b"] - 1.0) ** 2)

    grads = jax.grad(loss)(state["adapters"])
    updates, optimizer = OPTIMIZER.update(grads, state["optimizer"], state["adapters"])
    new = {
        "adapters": optax.apply_updates(state["adapters"], updates),
        "optimizer": optimizer,
        "key": key,
        "row": (state["row"] + 1) % ROWS,
    }
    return new, {"row": state["row"], "draw": jax.random.key_data(draw)}


def _train(state: dict, steps: int) -> tuple[dict, list]:
    log = []
    for _ in range(steps):
        state, event = _train_step(state)
        log.append((int(event["row"]), event["draw"].tolist()))
    return state, log


def test_i1_a_resumed_run_sees_the_same_rows_keys_and_bits(tmp_path):
    straight, straight_log = _train(_first_state(), 10)
    half, first_log = _train(_first_state(), 5)
    checkpoint.save(tmp_path, 5, half, RUN)
    resumed, _ = checkpoint.restore(tmp_path, _first_state(), expected=RUN)
    finished, second_log = _train(resumed, 5)
    assert first_log + second_log == straight_log
    assert _bytes(finished) == _bytes(straight)


@pytest.mark.parametrize("field", ["config_sha256", "dataset_sha256", "mode"])
def test_i1_another_dataset_or_configuration_is_refused(tmp_path, field):
    checkpoint.save(tmp_path, 5, _first_state(), RUN)
    with pytest.raises(
        checkpoint.CheckpointMismatchError, match=f"{field}: checkpoint has {RUN[field]}, this run has other"
    ):
        checkpoint.restore(tmp_path, _first_state(), expected=RUN | {field: "other"})


def test_c6_kl_to_the_base_continues_and_another_base_is_refused(tmp_path):
    base = jax.random.normal(jax.random.key(3), (8, 8))
    inputs = jax.random.normal(jax.random.key(4), (16, 8))

    def kl(adapters):
        reference = jax.nn.log_softmax(inputs @ base)
        policy = jax.nn.log_softmax(inputs @ (base + adapters["a"] @ adapters["b"]))
        return float(jnp.mean(jnp.sum(jnp.exp(policy) * (policy - reference), -1)))

    state, _ = _train(_first_state(), 3)
    checkpoint.save(tmp_path, 3, state, RUN)
    resumed, _ = checkpoint.restore(tmp_path, _first_state(), expected=RUN)
    assert kl(resumed["adapters"]) == kl(state["adapters"]) > 1e-4  # not 0, as against restored adapters
    with pytest.raises(
        checkpoint.CheckpointMismatchError, match="base_fingerprint: checkpoint has b0, this run has b1"
    ):
        checkpoint.restore(tmp_path, _first_state(), expected=RUN | {"base_fingerprint": "b1"})


def test_d4_skipped_steps_and_untouched_moments_survive(tmp_path):
    adapters = {"a": jnp.arange(6.0).reshape(2, 3)}
    optimizer = optax.apply_if_finite(OPTIMIZER, max_consecutive_errors=100)
    good, bad = {"a": jnp.ones((2, 3))}, {"a": jnp.ones((2, 3)).at[1, 1].set(jnp.nan)}
    _, before = optimizer.update(good, optimizer.init(adapters), adapters)
    _, skipped = optimizer.update(bad, before, adapters)
    checkpoint.save(tmp_path, 2, {"optimizer": skipped}, RUN)
    like = {"optimizer": optimizer.init(adapters)}
    restored = checkpoint.restore(tmp_path, like, expected=RUN)[0]["optimizer"]
    assert int(restored.total_notfinite) == 1 and not bool(restored.last_finite)
    assert _bytes(restored.inner_state) == _bytes(before.inner_state)
    # The step after a resume is the step that an uninterrupted run would take.
    resumed, straight = (optimizer.update(good, opt, adapters) for opt in (restored, skipped))
    assert _bytes(resumed) == _bytes(straight)


# Processes that die are forked from a server that has imported JAX and started nothing.
FORKS = multiprocessing.get_context("forkserver")
FRESH = multiprocessing.get_context("spawn")  # the limit reaches whatever a forked process has open
FORKS.set_forkserver_preload(["longstraw_jax.io.checkpoint", "optax", "pytest"])


def _small_state(seed: int) -> dict:
    """Made without compiling: every forked process makes one."""
    values = np.random.default_rng(seed).standard_normal((40, 40), np.float32)
    return jax.device_put({"a": values, "step": np.int32(seed)})


def _run_apart(target, *args, context=FORKS) -> int:
    process = context.Process(target=target, args=args)
    process.start()
    process.join(60)
    return process.exitcode


def _save_and_die(directory: str, step: int, moment: int) -> None:
    """Saves, and kills itself just before its file operation number `moment`."""
    state, left = _small_state(step), [moment]

    def count(event: str, args: tuple) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    checkpoint.save(directory, step, state, RUN, keep=1)


def test_i1_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    step, moment, outcomes, leftovers = 1, 1, set(), 0
    checkpoint.save(tmp_path, step, _small_state(step), RUN)
    while True:
        killed = _run_apart(_save_and_die, str(tmp_path), step + 1, moment) == -signal.SIGKILL
        newest = checkpoint.latest_step(tmp_path)
        assert newest in (step, step + 1)
        restored, _ = checkpoint.restore(tmp_path, _small_state(0), expected=RUN)
        assert _bytes(restored) == _bytes(_small_state(newest))
        if not killed:
            break
        outcomes.add("new" if newest > step else "old")
        leftovers += any(name.endswith("tmp") for name in _folders(tmp_path))
        step, moment = newest, moment + 5
    assert newest == step + 1  # the last one lived, and saved
    assert outcomes == {"old", "new"} and leftovers
    assert _folders(tmp_path) == [str(newest)]  # what the killed ones left is gone


def _save_on_a_full_disk(directory: str, step: int, free: int, answer) -> None:
    """Sends the error of a save where no file can grow beyond `free` bytes, and what was logged."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("absl").addHandler(handler)
    state = _small_state(step)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # they may be files, which cannot grow either
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, resource.RLIM_INFINITY))
    try:
        checkpoint.save(directory, step, state, RUN)
    except Exception as error:  # another kind than CheckpointSaveError shows in its text
        answer.send((str(error), [record.getMessage() for record in records]))


def test_a_full_disk_names_path_and_cause_and_the_previous_one_stands(tmp_path):
    checkpoint.save(tmp_path, 1, _small_state(1), RUN)
    for free in (0, 600, 4000):
        receiver, sender = FRESH.Pipe(duplex=False)
        assert _run_apart(_save_on_a_full_disk, str(tmp_path), 2, free, sender, context=FRESH) == 0
        assert receiver.poll(), f"a save with {free} bytes a file did not fail"
        message, logged = receiver.recv()
        assert message.startswith(f"checkpoint {tmp_path}/2 could not be written: ")
        assert "File too large" in message and message.endswith("; step 1 still stands")
        assert not logged  # the error says it all
        restored, _ = checkpoint.restore(tmp_path, _small_state(0), expected=RUN)
        assert _bytes(restored) == _bytes(_small_state(1))
    checkpoint.save(tmp_path, 2, _small_state(2), RUN)
    assert _folders(tmp_path) == ["1", "2"]


def _flip_a_bit(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def _halve(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "file, damage",
    [
        ("state/ocdbt.process_0/d/*", _flip_a_bit),
        ("state/ocdbt.process_0/d/*", _halve),
        ("state/_METADATA", _halve),
        ("state/manifest.ocdbt", os.remove),
        ("_CHECKPOINT_METADATA", os.remove),
        ("_CHECKPOINT_METADATA", _halve),
        ("state", shutil.rmtree),
    ],
)
def test_a_damaged_newest_is_named_with_the_way_back(tmp_path, file, damage):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, _state(step), RUN)
    for path in (tmp_path / "2").glob(file):
        damage(path)
    with pytest.raises(
        checkpoint.CheckpointCorruptError,
        match=f"checkpoint {tmp_path}/2 (is damaged|cannot be read): .*; move it away to resume from step 1",
    ):
        checkpoint.restore(tmp_path, _state(0), expected=RUN)
    (tmp_path / "2").rename(tmp_path / "2.damaged")
    restored, _ = checkpoint.restore(tmp_path, _state(0), expected=RUN)
    assert _bytes(restored) == _bytes(_state(1))


def test_a_changed_record_is_damage_and_not_another_run(tmp_path):
    checkpoint.save(tmp_path, 1, _state(1), RUN)
    path = tmp_path / "1" / "_CHECKPOINT_METADATA"
    path.write_text(path.read_text().replace('"d0"', '"d1"'))
    with pytest.raises(checkpoint.CheckpointCorruptError, match="record of the run .* has changed"):
        checkpoint.restore(tmp_path, _state(0), expected=RUN)
