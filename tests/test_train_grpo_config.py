"""Every field of experiments/configs/grpo.py changes something, and the table below says what."""

import dataclasses
import functools
import pathlib
import tempfile
import time

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_jobs
import train_grpo

from longstraw_jax import fingerprint, job_config, lora, train
from longstraw_jax.io import metrics
from longstraw_jax.rl import advantages, masks, objectives, rewards


@functools.cache
def tiny_job():
    return tiny_jobs.job()


def loss_of(config):
    """Sum and count of two responses that meet every branch of the loss: a mixed group and a truncated one."""
    objective = job_config.objective_config(config)
    ids, rewards = jnp.asarray([0, 0, 0, 1, 1]), jnp.asarray([0.0, 1.0, 0.3, 0.5, 0.5])
    scales = {"scale": objective.advantage_scale, "baseline": objective.baseline}
    mask = objectives.loss_mask(
        masks.response_mask(jnp.asarray([4, 2, 3, 4, 1]), 4),
        truncated=jnp.asarray([True, False, False, False, False]),
        signal=advantages.carries_signal(rewards, ids, num_groups=2),
        config=objective,
    )
    old, new, reference = (jnp.asarray(np.random.default_rng(n).normal(-1, 0.5, (5, 4))) for n in range(3))
    total, _ = objectives.member_loss(
        new,
        -new,
        old_logp=old,
        advantage=advantages.group_advantages(rewards, ids, num_groups=2, **scales),
        mask=mask,
        config=objective,
        ref_logp=reference,
        sampler_logp=old - 0.2,
        max_len=6,
    )
    return float(total.sum), float(total.count)


def two_updates(config):
    """A and B after two optimizer steps on gradients above the clip norm."""
    optimizer = train.make_optimizer(train.OptimizerConfig(**config.optimizer))
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    state = optimizer.init(params)
    for scale in (1.0, 1e-3):
        grads = {"a": scale * jnp.asarray([1.0, 2.0, -3.0]), "b": scale * jnp.asarray([1e-7, 1.0, 2.0])}
        updates, state = optimizer.update(grads, state, params)
        params = {name: params[name] + updates[name] for name in params}
    return [np.asarray(x).tolist() for x in params.values()]


def first_adapters(config):
    """Digest of what a new run starts from."""
    made = job_config.lora_config(config)
    sizes = lora.count_parameters(tiny_job().model.config, made)
    model = dataclasses.replace(tiny_job().model, lora=made)
    state = train.init_state(model, train.make_optimizer(tiny_job().optimizer), config.seed)
    return sizes, made.scales(), fingerprint.tree_fingerprint(state.adapters)


def loaded(pick):
    """An observer of what the job is loaded as."""
    return lambda config: pick(train_grpo.load_job(config, pathlib.Path("runs")))


def logged(config):
    """Steps as a run logs them, and the checkpoints it leaves; programs are shared with the other tests of runs."""
    with tempfile.TemporaryDirectory() as folder:
        train_grpo.run(config, pathlib.Path(folder))
        steps = metrics.read_steps(pathlib.Path(folder) / "steps.jsonl")
        kept = sorted(p.name for p in (pathlib.Path(folder) / "checkpoints").iterdir())
    return kept, [{k: v for k, v in s.items() if k not in ("seconds", "peak_bytes", "mode")} for s in steps]


def killed_after(config):
    """What a reward function that never returns is told."""
    function = rewards.load("tiny_rewards:hangs", answer_timeout_s=config.reward.answer_timeout_s)
    with pytest.raises(rewards.RewardError) as error:
        rewards.score([function], None, ["p"], ["c"], [[1]], {}, config.reward.timeout_s)
    return str(error.value)


@functools.cache
def another_checkpoint():
    folder = tiny_jobs.checkpoint().with_name("another")
    tiny_jobs.make_tiny_checkpoint.write(folder, tiny_jobs.RAW, 1)
    return str(folder)


@functools.cache
def another_dataset():
    return str(tiny_jobs.write_rows(tiny_jobs.rows().with_name("another.jsonl"), note="other"))


# On, so that what belongs to them shows.
OBJECTIVE = {"grpo.beta": 0.1, "grpo.tis_cap": 1.1, "grpo.mis_cap": 1.23}
RUN = {"reward.functions": ("tiny_rewards:mean_byte",)}

# Field: another value, what is looked at, what else is set on both sides.
FIELDS = {
    "seed": (1, first_adapters, {}),
    "steps": (4, logged, RUN),
    "model.checkpoint": (another_checkpoint, loaded(lambda job: job.base_sha), {}),
    "model.latent_norm_eps": (1e-3, loaded(lambda job: job.model.config.latent_norm_eps), {}),
    "model.kernels": ("reference", loaded(lambda job: job.model.kernels), {}),
    "model.yarn_positions": (512, loaded(lambda job: job.model.config.rope_parameters), {}),
    "mesh.devices": (2, loaded(lambda job: job.model.devices), {}),
    "data.paths": (lambda: (another_dataset(),), loaded(lambda job: job.dataset.rows), {}),
    "data.rows_per_step": (2, logged, RUN),
    "data.document": ("python", loaded(lambda job: job.build(job.dataset.rows[0]["prompt"]).tolist()), {}),
    "data.prompt_tokens": (
        200,
        loaded(lambda job: job.policy.capacity),
        {"data.document": "python", "data.prompt_tokens": 180},
    ),
    "grpo.mode": ("frozen", logged, RUN),
    "grpo.group": (3, loaded(lambda job: job.policy.group), {}),
    "grpo.slots": (2, loaded(lambda job: job.policy.slots), {}),
    "grpo.stop": (("\n",), loaded(lambda job: job.policy.stop and job.policy.stop.ids), {}),
    "grpo.max_new_tokens": (9, loaded(lambda job: job.policy.max_new_tokens), {}),
    "grpo.temperature": (0.7, logged, RUN),
    "grpo.top_p": (0.9, loaded(lambda job: job.policy.top_p), {}),
    "grpo.updates": (2, logged, RUN),
    "grpo.max_resamples": (1, logged, {"reward.functions": ("tiny_rewards:second_row_alone",)}),
    "grpo.clip_low": (0.1, loss_of, OBJECTIVE),
    "grpo.clip_high": (0.1, loss_of, OBJECTIVE),
    "grpo.importance_level": ("sequence", loss_of, OBJECTIVE),
    "grpo.beta": (0.2, loss_of, OBJECTIVE),
    "grpo.kl_estimator": ("k2", loss_of, OBJECTIVE),
    "grpo.entropy_coef": (0.1, loss_of, OBJECTIVE),
    "grpo.aggregation": ("fixed_length", loss_of, OBJECTIVE),
    "grpo.advantage_scale": ("none", loss_of, OBJECTIVE),
    "grpo.baseline": ("leave_one_out", loss_of, OBJECTIVE),
    "grpo.tis_cap": (0.0, loss_of, OBJECTIVE),
    "grpo.mis_cap": (1.1, loss_of, OBJECTIVE),
    "grpo.mis_level": ("sequence", loss_of, OBJECTIVE),
    "grpo.mask_truncated": (True, loss_of, OBJECTIVE),
    "grpo.zero_variance_kl": (False, loss_of, OBJECTIVE),
    "capture.chunk": (32, loaded(lambda job: job.policy.chunk), {}),
    "grpo.router_replay": (True, loaded(lambda job: job.policy.recorded), {}),
    "grpo.selection_replay": (True, loaded(lambda job: job.policy.recorded), {}),
    "capture.keep_selection": (True, loaded(lambda job: job.policy.keep_selection), {"grpo.mode": "exact"}),
    "capture.resident_bytes": (1 << 24, loaded(lambda job: job.policy.resident_bytes), {}),
    "refresh.policy": ("drift", loaded(lambda job: job.policy.refresh), {}),
    "refresh.every": (3, loaded(lambda job: job.policy.refresh), {}),
    "refresh.bound": (0.5, loaded(lambda job: job.policy.refresh), {}),
    "refresh.probe_tokens": (3, loaded(lambda job: job.policy.refresh), {}),
    "reward.functions": (("digit_share",), logged, RUN),
    "reward.weights": ((0.5,), logged, RUN),
    "reward.overlong_cache": (4, logged, RUN),
    "reward.overlong_penalty": (2.0, logged, RUN | {"reward.overlong_cache": 4}),
    "reward.timeout_s": (0.2, killed_after, {"reward.timeout_s": 0.1}),
    "optimizer.learning_rate": (1e-3, two_updates, {}),
    "optimizer.b1": (0.5, two_updates, {}),
    "optimizer.b2": (0.5, two_updates, {}),
    "optimizer.eps": (1e-3, two_updates, {}),
    "optimizer.weight_decay": (0.2, two_updates, {}),
    "optimizer.max_grad_norm": (0.5, two_updates, {}),
    "checkpoint.every": (2, logged, RUN),
    "checkpoint.keep": (1, logged, RUN),
    **{f"lora.{name}.rank": (3, first_adapters, {}) for name in tiny_jobs.defaults().lora},
    **{f"lora.{name}.alpha": (1.0, first_adapters, {}) for name in tiny_jobs.defaults().lora},
}
# Seen by tests of their own.
ELSEWHERE = {
    "data.prompt_file": "test_build_prompt",
    "mesh.emulate": "test_train_grpo_input, 'mesh that does not divide' and 'more devices than there are'",
    "grpo.stop_without_signal": "test_train_grpo, 'a run without a signal'",
    "reward.answer_timeout_s": "test_a7_answer_timeout_s_is_what_an_answer_gets",
}


@functools.cache
def observed(observe, changes):
    return observe(tiny_jobs.config(**dict(changes)))


def test_a7_the_table_is_the_configuration():
    assert FIELDS.keys() | ELSEWHERE.keys() == tiny_jobs.leaves(tiny_jobs.defaults()).keys()


@pytest.mark.parametrize("field", FIELDS)
def test_a7_every_field_changes_something(field):
    value, observe, setup = FIELDS[field]
    changed = setup | {field: value() if callable(value) else value}
    if field == "data.document":
        setup, changed = {}, changed | {"data.prompt_tokens": 200}
    assert observed(observe, tuple(changed.items())) != observed(observe, tuple(setup.items()))


def test_a7_answer_timeout_s_is_what_an_answer_gets():
    """A tower of powers is graded as unscorable after the limit, not after the five seconds of the default."""
    function = rewards.load("boxed_math", answer_timeout_s=1.5)

    def graded(text):
        return rewards.score([function], None, ["p"], [text], [[1]], {"ground_truth": ["1"]}, 60.0)[0][0]

    assert graded(r"\boxed{1}") == 1.0  # and its process is up
    started = time.perf_counter()
    assert np.isnan(graded(r"\boxed{9^{9^{9^{9}}}}"))
    assert time.perf_counter() - started < 4.0
