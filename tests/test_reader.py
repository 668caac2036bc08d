"""The reader that ships: it is what its receipt says, its scores come out again, and nothing jumps at index_topk."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import tiny_jobs

from longstraw_jax import fingerprint, forward
from longstraw_jax.config import load_model_config
from longstraw_jax.io import hf_checkpoint, prompt, tokenizer
from longstraw_jax.model import decoder
from longstraw_jax.model.choices import NONE, Choices
from longstraw_jax.pretrain import corpus, measure, packed_rows
from longstraw_jax.tasks import retrieval

import pretrain_tiny  # isort: skip
from configs import pretrain_tiny as defaults  # isort: skip

# The receipt's is of the run's weights before the file held routers and indexers' head weights in bf16 as well.
WEIGHTS = "3aa7bd5f2a96dcbb"
READER = tiny_jobs.EXPERIMENTS / "reader"
RECEIPT = json.loads((tiny_jobs.EXPERIMENTS / "results" / "reader_h200.json").read_text())
LENGTH, ROWS = 1024, 8  # of the receipt's 64 rows of text and 128 questions
# Above the receipt's loss, with eight rows among 64 and of another Python's text. Below it is much room: there what is
# held out overlaps with what was trained on.
NATS = 0.1
JUMP = 0.01  # nats a token: hardly a key is left out just above index_topk; round-off of bf16 averages to less
WINDOW, BORDER_ROWS = 128, 2


@pytest.fixture(scope="module")
def reader():
    """The configuration of the run, its job, the weights and what the evaluation's rows are made of."""
    config = defaults.get_config()
    tokens = tokenizer.load_tokenizer(READER)
    frame = packed_rows.frame_of(prompt.load_chat_template(READER), tokens)
    _, held_out = corpus.read(corpus.python_texts(), tokens)
    _, base = hf_checkpoint.load(READER)
    return config, pretrain_tiny.load_job(config), base, held_out, frame, tokens


def test_the_checkpoint_is_the_receipts(reader):
    config, job, base, *_ = reader
    configs = ("config.json", "generation_config.json", "tokenizer_config.json")
    files = ("model.safetensors", "chat_template.jinja", *configs)
    size = sum((READER / name).stat().st_size for name in files)
    assert size == RECEIPT["checkpoint"]["bytes"] <= 10_000_000
    assert fingerprint.tree_fingerprint(base) == WEIGHTS
    assert sum(x.size for x in jax.tree.leaves(base)) == RECEIPT["parameters"]
    assert dataclasses.replace(load_model_config(READER), eos_token_id=()) == job.model.config


def test_the_receipt_is_the_present_configurations_and_reached_its_goals(reader):
    plain = json.loads(reader[0].to_json())
    assert fingerprint.sha256_json(plain) == RECEIPT["config_sha256"] and plain == RECEIPT["config"]
    assert RECEIPT["problems"] == pretrain_tiny.problems_of(reader[0], RECEIPT) == []


def test_loss_and_answers_come_out_again(reader):
    """The first rows of those that pretrain_tiny.evaluate draws."""
    config, job, base, held_out, frame, tokens = reader
    seed, keys = (config.seed, pretrain_tiny.EVALUATION, LENGTH), job.model.config.index_topk
    text = packed_rows.text_batch(held_out, ROWS, LENGTH, seed)
    loss, told = measure.held_out_loss(job.model, base, text, keys), RECEIPT["held_out_loss"][str(LENGTH)]
    assert told / 2 < loss < told + NATS
    mix = job.mixes[-1]
    asked = packed_rows.question_batch(held_out, frame, tokens, mix, "needle", ROWS, LENGTH, (*seed, 0))
    # All of 128 were right; one may be lost to other text around it.
    assert measure.retrieval(job.model, base, asked, keys)["exact"] >= (ROWS - 1) / ROWS


@functools.partial(jax.jit, static_argnums=0)
def served_nll(model, base, ids, held):
    """Negative log-likelihood of every token but the first, as the model is served."""
    hidden, _ = forward.forward(model, base, None, ids, held=held)
    scores = jax.nn.log_softmax(forward.logits(model, base, None, hidden)[:, :-1])
    return -jax.numpy.take_along_axis(scores, ids[:, 1:, None], axis=-1)[..., 0]


def told_first(text, frame, tokens, length, seed):
    """A row whose first lines tell what its end asks for, with text between; its last five tokens answer."""
    task = retrieval.make("needle", seed, distractors=2)
    told = [*frame.head, *tokens.encode("".join(f"{line}\n" for line in (*task.evidence, *task.distractors)))]
    asked = [*tokens.encode(f"\n\n{task.question}"), *frame.ask, *tokens.encode(task.answer), frame.again[0]]
    between = packed_rows.excerpt(text, length - len(told) - len(asked), np.random.default_rng(seed))
    return np.concatenate([told, between, asked], dtype=np.int32)


def best(config, scores):
    """For each query [B, T] the keys of the largest `scores` [B, T, T] among those that it sees, for all layers."""
    length, keys = scores.shape[-1], config.index_topk
    order = np.argsort(np.where(np.tri(length, dtype=bool), -scores, np.inf), axis=-1)[..., :keys]
    chosen = np.where(np.arange(keys) <= np.arange(length)[:, None], order, -1).astype(np.int32)
    return Choices(selections=tuple(np.tile(chosen, (s.repeat, 1, 1, 1)) for s in config.segments()))


def test_f9_no_jump_in_loss_at_index_topk(reader):
    """Below it every key is selected, just above it all but a few, which the reader hardly misses.

    Neither in text nor where an answer stands in the first lines, which a selection of the most recent keys evicts.
    """
    _, job, base, held_out, frame, tokens = reader
    config, keys = job.model.config, job.model.config.index_topk
    length = keys + WINDOW + 1
    ids = packed_rows.text_batch(held_out, BORDER_ROWS, length, (pretrain_tiny.EVALUATION, 9)).ids
    ids = np.concatenate([ids, [told_first(held_out, frame, tokens, length, seed) for seed in range(BORDER_ROWS)]])
    sparse = decoder.make_model(config, kernels="reference")
    dense = decoder.make_model(dataclasses.replace(config, index_topk=length), kernels="reference")
    whole = np.asarray(served_nll(dense, base, ids, NONE))
    assert whole[BORDER_ROWS:, -5:].mean() < 0.1  # nats: the dense model reads the answers

    def above_dense(selections):
        excess = np.asarray(served_nll(sparse, base, ids, selections)) - whole
        text = excess[:BORDER_ROWS]
        return text[:, keys - WINDOW : keys].mean(), text[:, keys:].mean(), excess[BORDER_ROWS:, -5:].mean()

    below, above, answers = above_dense(NONE)
    assert max(abs(below), abs(above), answers) < JUMP, (below, above, answers)
    # The same figures tell wrong selections: any keys for text, the most recent ones for answers.
    drawn = np.random.default_rng(0).random((BORDER_ROWS, length, length))
    recent = np.broadcast_to(np.arange(length), drawn.shape)
    _, above, answers = above_dense(best(config, np.concatenate([drawn, recent])))
    assert min(above, answers) > 10 * JUMP, (above, answers)
