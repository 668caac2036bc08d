"""The main job's configuration as typed parts: every value out of range is told, not the first alone."""

import pathlib

import pytest
import tiny_jobs

from longstraw_jax import job_config


def test_a_sound_configuration_has_no_problems():
    assert job_config.value_problems(tiny_jobs.config()) == []


def test_every_problem_of_the_values_is_told():
    changes = {"steps": 0, "seed": -1, "checkpoint.every": 0, "data.document": "novel", "reward.timeout_s": 0.0}
    problems = job_config.value_problems(tiny_jobs.config(**changes))
    assert [problem.partition("=")[0] for problem in problems] == [
        "steps", "checkpoint.every", "seed", "data.document", "reward.timeout_s"
    ]  # fmt: skip
    assert all("; accepted: " in problem for problem in problems)


def test_the_parts_are_those_of_the_configuration():
    config = tiny_jobs.config(**{"lora.q_a.rank": 0, "grpo.tis_cap": 2.0, "model.yarn_positions": 512})
    assert "q_a" not in {name for name, _, _ in job_config.lora_config(config).targets}
    assert job_config.objective_config(config).tis_cap == 2.0
    assert job_config.objective_config(tiny_jobs.config()).tis_cap is None
    assert job_config.architecture(config).max_position_embeddings == 512
    policy = job_config.policy_config(config, (5,), 77)
    assert (policy.capacity, policy.eos_ids, policy.group) == (77, (5,), 4)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused():
    folder = pathlib.Path(tiny_jobs.checkpoint())
    assert job_config.load_tokenizer(folder, 288).vocab_size == 265
    with pytest.raises(ValueError, match="tokenizer of 265 ids; accepted: at most vocab_size=264"):
        job_config.load_tokenizer(folder, 264)
