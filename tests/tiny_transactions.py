"""Transactions on the tiny job, one configuration of rows and rewards, so that the tests of the step share programs."""

import dataclasses
import functools

import jax
import numpy as np
import tiny_jobs

from longstraw_jax import fingerprint, train
from longstraw_jax.prefix import freshness
from longstraw_jax.prefix.capture import capture
from longstraw_jax.rl.objectives import GRPOConfig

G, T = 4, 8
# Three objectives, because each is a program of its own.
PLAIN = GRPOConfig()
NO_SIGNAL_OUT = GRPOConfig(beta=0.04, aggregation="sequence_mean", zero_variance_kl=False)
TRUNCATED_OUT = GRPOConfig(beta=0.04, aggregation="fixed_length", mask_truncated=True)


@functools.cache
def job():
    return tiny_jobs.job(**{"reward.functions": ("exact_match",)})


@functools.cache
def base_words():
    return jax.jit(fingerprint.device_fingerprint)(job().base)


def optimizer():
    return train.make_optimizer(job().optimizer)


def policy(**changes):
    return dataclasses.replace(job().policy, **changes)


def fresh_state(seed=0):
    return train.init_state(job().model, optimizer(), seed)


@functools.cache
def trained_state():
    """After two steps: B of every target has left zero."""
    state, _, _ = steps(fresh_state(), 2)
    return state


def prompt(row=0):
    return job().build(job().dataset.rows[row]["prompt"])


def byte_means(number, responses):
    return np.asarray([np.mean(ids) / 288 for ids in responses], np.float32), []


def transact(state, *, prompts=None, reward=byte_means, seed=0, **changes):
    """One transaction on the policy with these changes, which holds one prompt; the rest is passed on."""
    passed = {name: changes.pop(name) for name in ("spare", "between", "progress") if name in changes}
    held = changes.pop("held", None)
    state, reports, (held,) = train.transaction(
        job().model,
        policy(**changes),
        optimizer(),
        job().base,
        base_words(),
        state,
        [prompt()] if prompts is None else prompts,
        reward,
        jax.random.key(seed),
        held=() if held is None else (held,),
        **passed,
    )
    return state, reports, held


def steps(state, count, **changes):
    reports, held = [], None
    for seed in range(count):
        state, more, held = transact(state, seed=seed, held=held, **changes)
        reports += more
    return state, reports, held


@functools.cache
def prefix(adapted=True):
    adapters = trained_state().adapters if adapted else None
    words = freshness.weights_fingerprint(base_words(), adapters)
    return capture(
        job().model,
        job().base,
        adapters,
        prompt()[:-1],
        chunk=job().policy.chunk,
        fingerprint=words,
        capacity=job().policy.capacity,
    )


def same_bits(a, b):
    return fingerprint.tree_fingerprint(a) == fingerprint.tree_fingerprint(b)


def moments(state):
    return (state.adapters, state.opt_state)
