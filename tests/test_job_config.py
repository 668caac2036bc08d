"""The main job's configuration as typed parts: every value out of range is told, not the first alone."""

import math
import pathlib
import types

import numpy as np
import pytest
import tiny_jobs
from ml_collections import ConfigDict

from longstraw_jax import job_config
from longstraw_jax.io import data, prompt


def test_a_sound_configuration_has_no_problems():
    assert job_config.value_problems(tiny_jobs.config()) == []


def test_every_problem_of_the_values_is_told():
    changes = {"steps": 0, "seed": -1, "checkpoint.every": 0, "data.document": "novel", "reward.timeout_s": 1e300}
    problems = job_config.value_problems(tiny_jobs.config(**changes))
    assert [problem.partition("=")[0] for problem in problems] == [
        "steps", "checkpoint.every", "seed", "data.document", "reward.timeout_s"
    ]  # fmt: skip
    assert all("; accepted: " in problem for problem in problems)


def test_a_row_whose_prompt_has_no_token_is_named():
    rows = types.SimpleNamespace(rows=[{"id": 3, "prompt": "q"}])
    with pytest.raises(prompt.PromptError, match="row of id 3, .* 0 tokens; accepted: at least 1"):
        job_config.longest_prompt(tiny_jobs.config(), rows, lambda _: np.zeros((0,), np.int32))


def test_paths_that_were_not_given_are_told_by_their_field():
    with pytest.raises(data.DataError, match=r"^data.paths=\('',\); accepted: JSONL or parquet files"):
        job_config.read_dataset(tiny_jobs.config(**{"data.paths": ("",)}))


def changed(field, value):
    """The tiny job with one field of any type, as a file for --config may hold it."""
    made = tiny_jobs.config().to_dict()
    *sections, name = field.split(".")
    at = made
    for section in sections:
        at = at[section]
    at[name] = value
    return ConfigDict(made)


@pytest.mark.parametrize("field, value", tiny_jobs.leaves(tiny_jobs.defaults()).items())
def test_every_field_has_its_type(field, value):
    """The table of types is that of the defaults: another type is refused by name, an integer is a number."""
    numbers = isinstance(value, float) or (isinstance(value, tuple) and any(isinstance(v, float) for v in value))
    wrong = [None, {}, 1.5, math.inf, b""]
    wrong += [] if isinstance(value, str) else ["2"]
    wrong += [] if isinstance(value, bool) else [True]
    wrong += [2] if isinstance(value, (str, bool, tuple)) else [2.0]
    wrong += [(0, "x"), (None,)] if isinstance(value, tuple) else [(value,)]
    if isinstance(value, float):
        wrong = [w for w in wrong if w not in (1.5, 2.0)]
        assert job_config.type_problems(changed(field, 2)) == []
    for other in wrong:
        (problem,) = job_config.value_problems(changed(field, other))
        assert problem.startswith(f"{field}=") and "; accepted: " in problem
    if numbers and isinstance(value, tuple):
        assert job_config.type_problems(changed(field, [1])) == []


def test_unknown_and_missing_fields_are_named_all_at_once():
    made = tiny_jobs.config().to_dict()
    made["optimizer"]["nesterov"], made["nope"], made["capture"] = True, {"a": 1}, 3
    made["model"]["architecture"] = {"hidden_size": 4}  # of the parity check
    del made["grpo"]["beta"]
    fields = [p.replace("=", " ").split()[0] for p in job_config.type_problems(ConfigDict(made))]
    assert sorted(fields) == ["capture", "grpo.beta", "nope", "optimizer.nesterov"]


@pytest.mark.parametrize(
    "field, value",
    [
        *[("grpo.group", 1), ("grpo.temperature", 1e-40), ("grpo.kl_estimator", "k1"), ("capture.chunk", 0)],
        *[("refresh.policy", "never"), ("refresh.every", 0), ("refresh.bound", -1.0)],
    ],
)
def test_a_policy_out_of_range_names_its_section(field, value):
    with pytest.raises(ValueError, match=rf"^{field}[=:]"):
        job_config.policy_config(tiny_jobs.config(**{field: value}), (0,), 8)


def test_the_parts_are_those_of_the_configuration():
    changes = {"lora.q_a.rank": 0, "grpo.tis_cap": 2.0, "model.yarn_positions": 512, "capture.resident_bytes": 7}
    config = tiny_jobs.config(**changes)
    assert "q_a" not in {name for name, _, _ in job_config.lora_config(config).targets}
    assert job_config.objective_config(config).tis_cap == 2.0
    assert job_config.objective_config(tiny_jobs.config()).tis_cap is None
    assert job_config.architecture(config).max_position_embeddings == 512
    policy = job_config.policy_config(config, (5,), 77)
    assert (policy.capacity, policy.eos_ids, policy.group, policy.resident_bytes) == (77, (5,), 4, 7)


def test_stop_sequences_are_the_tokenizers_and_named_by_their_field(byte_tokenizer):
    config = tiny_jobs.config(**{"grpo.stop": ("\n\n", "<|user|>")})
    stop = job_config.stop_sequences(config, byte_tokenizer)
    assert stop.ids == ((10, 10), tuple(byte_tokenizer.encode("<|user|>"))) and len(stop.ids[1]) == 1
    assert job_config.policy_config(config, (5,), 77, stop).stop is stop
    assert job_config.stop_sequences(tiny_jobs.config(), byte_tokenizer) is None
    with pytest.raises(ValueError, match=r"^grpo.stop='123456789' is 9 tokens; accepted: at most max_new_tokens=8"):
        job_config.stop_sequences(tiny_jobs.config(**{"grpo.stop": ("123456789",)}), byte_tokenizer)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused():
    folder = pathlib.Path(tiny_jobs.checkpoint())
    assert job_config.load_tokenizer(folder, 288).vocab_size == 265
    with pytest.raises(ValueError, match="tokenizer of 265 ids; accepted: at most vocab_size=264"):
        job_config.load_tokenizer(folder, 264)
