"""The command that writes task rows: what it takes, what it writes, and that the main job could start with it."""

import json
import pathlib
import subprocess
import sys
import types

import pytest
import tiny_jobs  # puts experiments on the path

from longstraw_jax import fingerprint
from longstraw_jax.evidence import prerequisites

import build_tasks  # isort: skip

FLAGS = {
    "checkpoint": None, "tokens": ["230"], "kinds": ["needle", "sum"], "positions": ["early", "0.5"],
    "distractors": 0, "digits": 4, "seeds": 2, "first_seed": 3, "native_window": 0, "text": "python",
    "reasoning": [], "out": None,
}  # fmt: skip


def values(tmp_path, **changes):
    given = {"checkpoint": str(tiny_jobs.checkpoint()), "out": str(tmp_path / "rows.jsonl")}
    return types.SimpleNamespace(**FLAGS | given | changes)


def test_the_same_flags_write_the_same_bytes_and_the_main_job_takes_them(tmp_path):
    record = build_tasks.build(values(tmp_path))
    first = (tmp_path / "rows.jsonl").read_bytes()
    assert record["rows"] == 8 and record["sha256"] == fingerprint.sha256_file(tmp_path / "rows.jsonl")
    assert json.loads((tmp_path / "rows.json").read_text()) == record
    rows = [json.loads(line) for line in first.splitlines()]
    assert [row["extra_info"]["index"] for row in rows] == list(range(8))
    assert {row["extra_info"]["position"] for row in rows} == {"early", 0.5}
    assert {row["extra_info"]["seed"] for row in rows} == {3, 4}
    build_tasks.build(values(tmp_path))
    assert (tmp_path / "rows.jsonl").read_bytes() == first
    config = tiny_jobs.config(
        **{
            "data.paths": (str(tmp_path / "rows.jsonl"),),
            "data.prompt_tokens": 230,
            "reward.functions": ("exact_match", "longstraw_jax.tasks.rewards:leading_share"),
            "reward.weights": (1.0, 1.0),
        }
    )
    parts, findings = prerequisites.examine(config, tmp_path / "run")
    assert prerequisites.blockers(findings) == [] and len(parts.dataset.rows) == 8


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"tokens": ["230", "many"]}, "tokens=230,many; accepted: positive integers"),
        ({"positions": ["nowhere"]}, "positions='nowhere'; accepted: early, middle"),
        ({"kinds": ["haystack"]}, "kind='haystack'; accepted: needle"),
        ({"positions": []}, r"positions=\[\] make no rows; accepted: at least 1"),
        ({"kinds": []}, r"kinds=\[\], .*make no rows; accepted: at least 1"),
        ({"seeds": 0}, "seeds=0; accepted: at least 1"),
        ({"out": "rows.parquet"}, "out='rows.parquet'; accepted: a file name that ends in .jsonl"),
        ({"reasoning": ["gcd"]}, "reasoning='gcd'; accepted: name:size"),
        ({"native_window": -1}, "native_window=-1; accepted: 0"),
        ({"positions": ["beyond"]}, "'beyond' with tokens=230; accepted: more than the native 256"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(tmp_path, changes, said):
    if "reasoning" in changes:
        pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (extra `tasks`)")
    with pytest.raises(ValueError, match=said):
        build_tasks.build(values(tmp_path, **changes))
    assert not list(tmp_path.iterdir())


def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, str(tiny_jobs.EXPERIMENTS / "build_tasks.py"), f"--out={tmp_path / 'rows.jsonl'}"]
    done = subprocess.run(
        [*command, f"--checkpoint={pathlib.Path('gone')}", "--tokens=99"], capture_output=True, text=True
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "gone: no tokenizer" in done.stderr
