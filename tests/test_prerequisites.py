"""Prerequisites: everything that stands in a run's way at once, and the run refuses the same."""

import dataclasses
import functools
import importlib.metadata
import pathlib
import shutil

import jax
import pytest
import tiny_jobs
import train_grpo
from ml_collections import ConfigDict

from longstraw_jax import fingerprint
from longstraw_jax.evidence import prerequisites, topology
from longstraw_jax.evidence.prerequisites import BLOCKER, NOT_CHECKED, OK
from longstraw_jax.rl import objectives

ON_32 = {"mesh.devices": 32}
CPU_32 = topology.parse("cpu:32")


def examine(workdir=pathlib.Path("runs"), chips=None, hash_weights=False, **changes):
    """Status and detail of every check."""
    _, rows = prerequisites.examine(tiny_jobs.config(**changes), workdir, chips=chips, hash_weights=hash_weights)
    found = {row.check: row[1:] for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of one's own to break."""
    return shutil.copytree(tiny_jobs.checkpoint(), tmp_path / "checkpoint")


def test_a_sound_run_has_no_blockers_and_nothing_is_left_unchecked(tmp_path):
    found = examine(tmp_path / "gone", **ON_32)
    assert {status for status, _ in found.values()} == {OK}
    assert "32 of 32 cpu" in found["devices"][1]
    assert " tensors in 1 files, 0.0 GB, all whole" in found["checkpoint files"][1]
    assert "of 256 positions" in found["position window"][1]
    assert not (tmp_path / "gone").exists()


def test_a_checkout_that_is_not_installed_serves(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    found = examine(**ON_32)
    assert found.pop("versions") == (NOT_CHECKED, "this checkout is not installed: pip install -e .")
    assert {status for status, _ in found.values()} == {OK}


def test_every_blocker_is_listed_at_once_and_the_run_says_the_same(checkpoint, tmp_path):
    (checkpoint / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    (checkpoint / "chat_template.jinja").unlink()
    changes = {
        "model.checkpoint": str(checkpoint),
        "mesh.devices": 64,
        "data.paths": ("gone.jsonl",),
        "optimizer.b1": 1.0,
        "grpo.group": 1,
        "checkpoint.keep": 0,
        "reward.functions": ("nope",),
    }
    found = examine(**changes)
    blocked = {name: detail for name, (status, detail) in found.items() if status == BLOCKER}
    assert "a Git LFS pointer" in blocked.pop("checkpoint files")
    assert "no chat template" in blocked.pop("chat template")
    assert "mesh.devices=64 is not available; accepted: 1 to 32" in blocked.pop("devices")
    assert "data.paths: gone.jsonl: no such file" in blocked.pop("dataset")
    assert "optimizer.b1=1.0" in blocked.pop("optimizer")
    assert "accepted: an integer of at least 2" in blocked.pop("policy")
    assert "checkpoint.keep=0; accepted: at least 1" in blocked.pop("values 1")
    assert blocked == {}
    assert found["memory"][0] == found["rewards"][0] == NOT_CHECKED
    with pytest.raises(ValueError) as error:
        train_grpo.run(tiny_jobs.config(**changes), tmp_path / "run")
    assert str(error.value).startswith("7 blockers: ")
    for detail in (detail for status, detail in found.values() if status == BLOCKER):
        assert detail in str(error.value)
    assert not (tmp_path / "run").exists()


def test_memory_is_judged_for_the_chips_asked_for():
    """The tiny model fits a v5p and not a chip of a megabyte."""
    config = tiny_jobs.config(**ON_32)
    v5p = topology.parse("tpu:v5p:4x4x2")
    for chips, status in ((v5p, OK), (v5p._replace(memory=1 << 20), BLOCKER)):
        _, rows = prerequisites.examine(config, pathlib.Path("runs"), chips=chips)
        row = next(row for row in rows if row.check == "memory")
        assert row.status == status and "GB a device by formula" in row.detail and "tpu:v5p:4x4x2" in row.detail
    assert "accepted: 0.00 GB (tpu:v5p:4x4x2)" in row.detail


def test_memory_by_formula_is_what_the_run_then_holds():
    """Base weights and pages of a device, as their arrays lie there."""
    job = tiny_jobs.job(**ON_32)
    need = prerequisites.memory_need(job.model, job.optimizer, job.policy, job.policy.capacity)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(job.base))
    assert {kinds["base weights"] for kinds in need.values()} == {held}
    assert all(size > 0 for kinds in need.values() for size in kinds.values())
    assert "gradient pages" not in need["replay"]


def test_memory_is_that_of_the_largest_phase():
    """A chunk's temporaries, the sampled members' tails and the gradients are not alive together."""
    for changes, phase, kind, want in (
        ({"grpo.group": 2}, "capture", "a chunk", OK),
        ({"grpo.group": 10**8}, "sample 100000000", "tails", BLOCKER),
        ({"lora.routed.rank": 10**5}, "add", "member's gradients", BLOCKER),
    ):
        status, detail = examine(**changes)["memory"]
        assert status == want and f"in phase '{phase}' (" in detail
        kinds = [k for k in ("a chunk", "tails", "member's gradients") if f", {k} " in detail]
        assert kinds == [kind]


@functools.cache
def parts_on_32():
    return prerequisites.examine(tiny_jobs.config(**ON_32), pathlib.Path("runs"))[0]


def needed(**changes):
    """Bytes in each phase by kind, with these changes to the policy."""
    parts = parts_on_32()
    policy = dataclasses.replace(parts.policy, **changes)
    return prerequisites.memory_need(parts.model, parts.optimizer, policy, policy.capacity)


def test_memory_counts_the_rows_that_decode_at_once():
    """64 members are 2 a device; with 32 slots one of them has a tail at a time."""
    whole, few = (needed(group=64, slots=slots)["sample 64"] for slots in (0, 32))
    assert all(whole[kind] == 2 * few[kind] for kind in ("tails", "logits"))


def test_memory_counts_recorded_choices():
    """While sampling a device holds those of its one member of 8 tokens and the group's; padded to 32 in the others."""
    without = needed(updates=2)
    both = {"router_replay": True, "selection_replay": True}
    for changes, token in (
        ({"router_replay": True}, 4 * 2),  # experts, in one sparse layer
        (both, 4 * (2 + 16)),  # and keys, in one full layer
    ):
        tokens = {"sample 4": (1 + 4) * 8, "score": 4 * 32, "replay": 32}
        assert needed(updates=2, **changes) == {
            name: kinds | ({"recorded choices": token * tokens[name]} if name in tokens else {})
            for name, kinds in without.items()
        }
    assert "recorded choices" not in needed(**both)["score"]  # one update: the old policy is not scored


def test_memory_counts_the_references_prompt_beside_the_policys():
    """And that can be what does not fit; a frozen prompt is the reference's own."""
    objective, config, without = objectives.GRPOConfig(beta=0.1), parts_on_32().model.config, needed()
    need = needed(objective=objective)
    own = need["capture"]["latent pages"] + need["capture"]["index keys"]
    assert own == 64 * 4 * (2 * config.latent_dim + config.index_head_dim)  # a page: short prompts have one a device
    assert need == without | {"reference": need["capture"] | {"reference pages": own}}
    assert needed(objective=objective, mode="frozen") == without
    chips = topology.parse("tpu:v5p:4x4x2")._replace(memory=max(sum(kinds.values()) for kinds in without.values()))
    assert examine(chips=chips, **ON_32)["memory"][0] == OK
    status, detail = examine(chips=chips, **ON_32 | {"grpo.beta": 0.1})["memory"]
    assert status == BLOCKER and "in phase 'reference' (" in detail and ", reference pages " in detail


def test_the_mesh_must_be_the_topologys():
    found = examine(chips=CPU_32, **{"mesh.devices": 8})
    assert found["devices"] == (BLOCKER, "mesh.devices=8 for topology cpu:32; accepted: 32")


def test_a_disk_without_room_is_a_blocker(tmp_path):
    """Adapters of a rank whose checkpoints no disk holds."""
    status, detail = examine(tmp_path / "run", **{"lora.q_a.rank": 10**14})["disk"]
    assert status == BLOCKER and "workdir: " in detail and f"bytes free at {tmp_path}; accepted: " in detail


def test_a_workdir_that_is_a_file_is_a_blocker(tmp_path):
    (tmp_path / "notes").touch()
    for workdir in (tmp_path / "notes", tmp_path / "notes" / "run"):
        found = examine(workdir)
        said = f"workdir={workdir}: {tmp_path / 'notes'} is a file; accepted: a folder, or a new place for one"
        assert found["workdir"] == (BLOCKER, said) and found["disk"][0] == NOT_CHECKED


def test_fields_of_another_type_are_told_and_nothing_else_is_tried():
    config = tiny_jobs.config().to_dict()
    config["steps"], config["capture"]["chunk"], config["mesh"]["devices"] = "2", 64.5, "1"
    parts, rows = prerequisites.examine(ConfigDict(config), pathlib.Path("runs"))
    fields = [row.detail.partition("=")[0] for row in rows if row.status == BLOCKER]
    assert fields == ["steps", "mesh.devices", "capture.chunk"] and parts.model is None
    with pytest.raises(ValueError, match="^steps='2'; accepted: an integer; mesh.devices='1'; .*; capture.chunk=64.5"):
        train_grpo.set_devices(ConfigDict(config))


def test_a_failure_that_nobody_foresaw_is_a_blocker_and_the_other_checks_go_on():
    found = prerequisites._Findings()
    assert found.attempt("lengths", lambda: [0][1]) is None
    assert found.attempt("other", lambda: 7) == 7
    assert found.rows[0] == ("lengths", BLOCKER, "lengths: IndexError: list index out of range")


def test_a_longer_range_than_the_native_one_is_named():
    found = examine(**{"grpo.max_new_tokens": 300, "model.yarn_positions": 1024})
    status, detail = found["position window"]
    assert status == OK and "of 1024 positions: " in detail and "beyond the native 256" in detail


def test_hashes_are_compared_with_those_beside_the_checkpoint(checkpoint):
    changes = {"model.checkpoint": str(checkpoint)}
    assert "no SHA256SUMS" in examine(**changes)["checkpoint hashes"][1]
    names = ("config.json", "model.safetensors")
    lines = [f"{fingerprint.sha256_file(checkpoint / name)}  {name}\n" for name in names]
    (checkpoint / "SHA256SUMS").write_text("".join(lines))
    status, detail = examine(**changes)["checkpoint hashes"]
    assert status == OK and detail == "1 files as in SHA256SUMS; 1 weight files not read (--hash_weights)"
    data = bytearray((checkpoint / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(data)
    assert examine(**changes)["checkpoint hashes"][0] == OK
    status, detail = examine(hash_weights=True, **changes)["checkpoint hashes"]
    assert status == BLOCKER and "model.safetensors: sha256 is" in detail
    (checkpoint / "SHA256SUMS").write_text("".join([*lines, "0" * 64 + "  gone.json\n"]))
    assert "gone.json of SHA256SUMS does not exist" in examine(**changes)["checkpoint hashes"][1]


def test_a_truncated_checkpoint_is_found_by_its_size(checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    status, detail = examine(**{"model.checkpoint": str(checkpoint)})["checkpoint files"]
    assert status == BLOCKER and "truncated" in detail
