"""Dataset rows of retrieval tasks: a prompt of an exact number of tokens, the evidence where it is asked for."""

import dataclasses
import hashlib
import os
import re
from typing import Any

import numpy as np

from longstraw_jax import config as config_lib
from longstraw_jax import fingerprint
from longstraw_jax.io import payload
from longstraw_jax.io import prompt as prompt_lib
from longstraw_jax.io.prompt import DOCUMENT_SEPARATOR, ChatTemplate, PromptError
from longstraw_jax.io.tokenizer import Tokenizer
from longstraw_jax.tasks.retrieval import Task

# Shares of the native window that the evidence of each position lies in; `beyond` is apart.
BANDS = {"early": (0.05, 0.15), "middle": (0.45, 0.55), "late": (0.85, 0.95)}
POSITIONS = (*BANDS, "beyond")
DEPTH_BAND = 0.1  # width of the band around a stated depth
WORDS_BELOW = 32_768  # tokens; longer prompts are filled by lines, which are fewer
# Characters counted at once; within them a word or line has its share of the tokens.
SHORT_PIECE, LONG_PIECE = 1_000, 65_536
TAIL_CHARACTERS = 2_000  # counted again for each trial of a padding
MOST_TRIALS = 64
# Tried in this order until the length is exact: a word of one token in most vocabularies, then single bytes.
PADDINGS = (" a", ".", " ", "\n", "x")


@dataclasses.dataclass(frozen=True)
class Reader:
    """What turns a row into token ids.

    Attributes:
      tokenizer, template: of the checkpoint.
      native_window: positions that the checkpoint was trained for.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    native_window: int

    def ids(self, prompt: Any) -> np.ndarray:
        """Token ids of a row's prompt, as the main job builds them."""
        return prompt_lib.build_prompt(prompt, self.tokenizer, self.template)


def native_window(checkpoint: str | os.PathLike) -> int:
    """Positions before any extension of a checkpoint folder. Raises ConfigError."""
    found = config_lib.load_model_config(checkpoint)
    return found.rope_parameters.original_max_position_embeddings or found.max_position_embeddings


def band(position: str | float, tokens: int, window: int) -> tuple[float, float]:
    """First and last token between which the evidence is to lie.

    `early`, `middle` and `late` are shares of the native window or of the prompt, whichever is shorter; `beyond` is
    the middle half of what follows the native window; a number is a depth, 0 to 1, of the whole prompt.

    Raises:
      PromptError: another position, or `beyond` where nothing follows the window.
    """
    if position == "beyond":
        if tokens <= window:
            raise PromptError(f"position='beyond' with tokens={tokens}; accepted: more than the native {window}")
        return window + (tokens - window) / 4, window + (tokens - window) * 3 / 4
    if position in BANDS:
        low, high = BANDS[position]
        return low * min(tokens, window), high * min(tokens, window)
    if isinstance(position, str) or not 0 <= position <= 1:
        raise PromptError(f"position={position!r}; accepted: {', '.join(POSITIONS)}, or a depth from 0 to 1")
    low = min(max(position - DEPTH_BAND / 2, 0), 1 - DEPTH_BAND)
    return low * tokens, (low + DEPTH_BAND) * tokens


def make(
    task: Task, reader: Reader, source: payload.Source, *, tokens: int, position: str | float, seed: int, index: int
) -> dict[str, Any]:
    """One row of the DAPO-Math schema whose prompt has exactly `tokens` tokens after the chat template.

    The user's message is text with the task's lines in it, each between newlines, a blank line, and the question.
    Distractors are spread evenly over the text. The text ends with a few padding words where whole words do not
    give the length.

    Args:
      source: of the text.
      seed: of the order of the texts and the distractors' places.
      index: the row's id.

    Returns:
      prompt, reward_model.ground_truth, and extra_info: index, task, position, tokens, distractors, seed,
      evidence_at (first and last + 1 token of each line of evidence), native_window, hashes of the prompt's ids, text,
      tokenizer and template.

    Raises:
      PromptError: the position is not in the prompt, or the length cannot be met.
    """
    prompt, ids = _fitted(task, reader, source, tokens, band(position, tokens, reader.native_window), seed)
    rendered = prompt_lib.render_chat(prompt, reader.template)
    places = _found(rendered, task.evidence, reader.tokenizer)
    if position == "beyond" and min(start for start, _ in places) < reader.native_window:
        raise PromptError(
            f"tokens={tokens}: evidence at {places} begins within the native {reader.native_window}; accepted: more"
        )
    return {
        "prompt": prompt,
        "reward_model": {"ground_truth": task.answer},
        "extra_info": {
            "index": index,
            "task": task.kind,
            "position": position,
            "tokens": int(ids.size),
            "distractors": len(task.distractors),
            "seed": seed,
            "evidence_at": places,
            "native_window": reader.native_window,
            "prompt_sha256": ids_sha256(ids),
            "text_sha256": source.sha256,
            "tokenizer_sha256": reader.tokenizer.sha256,
            "chat_template_sha256": fingerprint.sha256_json(reader.template.text),
        },
    }


def ids_sha256(ids: np.ndarray) -> str:
    """SHA-256 of token ids as little-endian int32."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()


def _rendered(text: str, task: Task, template: ChatTemplate) -> str:
    return prompt_lib.render_chat([{"role": "user", "content": text + DOCUMENT_SEPARATOR + task.question}], template)


def _fitted(
    task: Task, reader: Reader, source: payload.Source, tokens: int, span: tuple[float, float], seed: int
) -> tuple[list[dict[str, str]], np.ndarray]:
    """The messages and their ids, of exactly the wanted length."""

    def size(text: str) -> int:
        return len(reader.tokenizer.encode(_rendered(text, task, reader.template)))

    lines = "".join(f"\n{line}\n" for line in (*task.evidence, *task.distractors))
    least, chat = size(lines), size("")
    if least > tokens:
        raise PromptError(f"tokens={tokens}; accepted: at least {least}, of chat, question and the task's lines")
    head = _rendered("", task, reader.template).partition(DOCUMENT_SEPARATOR + task.question)[0]
    start = len(reader.tokenizer.encode(head))
    places = _places(task, [min(max(at - start, 0), tokens - chat) for at in span], tokens - chat, seed)
    lengths = [len(reader.tokenizer.encode(f"\n{line}\n")) for _, line in places]
    units, ends = _filler(source, reader.tokenizer, tokens - least, seed, whole_lines=tokens >= WORDS_BELOW)
    count, most = int(np.searchsorted(ends, tokens - least, side="right")), len(units)
    for _ in range(MOST_TRIALS):
        text = _woven(units[:count], ends[:count], places, lengths)
        left = tokens - size(text)
        # The running sum is an estimate.
        fitting = int(np.searchsorted(ends, left + (ends[count - 1] if count else 0), side="right"))
        if left < 0:
            most = count - 1
        elif min(fitting, most) <= count:
            padding = _padding(text, task, reader.tokenizer, left)
            if padding is not None:
                content = text + padding + DOCUMENT_SEPARATOR + task.question
                prompt = [{"role": "user", "content": content}]
                if (ids := reader.ids(prompt)).size == tokens:
                    return prompt, ids
            most = count - 1
        count = min(fitting, most)
        if count < 0:
            break
    raise PromptError(f"tokens={tokens}: no text of exactly this length was found with {reader.tokenizer.name}")


def _filler(
    source: payload.Source, tokenizer: Tokenizer, room: int, seed: int, *, whole_lines: bool
) -> tuple[list[str], np.ndarray]:
    """Words with the space before them, or lines: more than `room` tokens of them, and the running sum of tokens."""
    units: list[str] = []
    sizes: list[float] = []
    total, length = 0, LONG_PIECE if whole_lines else SHORT_PIECE
    for text in payload.pieces(source, seed, [0]):
        for start in range(0, len(text), length):
            piece = text[start : start + length]
            count = len(tokenizer.encode(piece))
            here = piece.splitlines(keepends=True) if whole_lines else re.findall(r"\s*\S+|\s+", piece)
            units += here
            sizes += [count * len(unit) / len(piece) for unit in here]
            total += count
            if total >= 1.05 * room + 64:
                return units, np.cumsum(sizes)


def _padding(text: str, task: Task, tokenizer: Tokenizer, left: int) -> str | None:
    """What adds `left` tokens at the text's end, counted by its last part alone; None if nothing tried does."""

    def size(padding: str) -> int:
        return len(tokenizer.encode(text[-TAIL_CHARACTERS:] + padding + DOCUMENT_SEPARATOR + task.question))

    padding, now = "", size("")
    target = now + left
    while now < target:
        for unit in PADDINGS:
            if now < (grown := size(padding + unit)) <= target:
                padding, now = padding + unit, grown
                break
        else:
            return None
    return padding


def _places(task: Task, span: list[float], room: int, seed: int) -> list[tuple[float, str]]:
    """Every line and the token of the text, which has `room`, where it is to begin; in their order."""
    low, high = span
    placed = [(low + (high - low) * (i + 0.5) / len(task.evidence), line) for i, line in enumerate(task.evidence)]
    words = np.random.Philox(key=np.array([seed, 1], np.uint64)).random_raw(len(task.distractors))
    for i, (word, line) in enumerate(zip(words, task.distractors, strict=True)):
        placed.append((room * (i + int(word) / 2**64) / len(task.distractors), line))
    return sorted(placed, key=lambda place: place[0])


def _woven(units: list[str], ends: np.ndarray, places: list[tuple[float, str]], lengths: list[int]) -> str:
    """The filler with every line in its place."""
    parts, done, before = [], 0, 0
    for (at, line), length in zip(places, lengths, strict=True):
        upto = max(int(np.searchsorted(ends, at - before, side="right")), done)
        parts += [*units[done:upto], f"\n{line}\n"]
        done, before = upto, before + length
    return "".join([*parts, *units[done:]])


def _found(rendered: str, lines: tuple[str, ...], tokenizer: Tokenizer) -> list[list[int]]:
    """First and last + 1 token of each line, which newlines keep apart from what is around them."""
    starts = {line: rendered.index(line) for line in lines}
    places, counted, before = {}, 0, 0
    for line in sorted(lines, key=starts.get):
        before += len(tokenizer.encode(rendered[counted : starts[line]]))
        counted = starts[line]
        places[line] = [before, before + len(tokenizer.encode(line))]
    return [places[line] for line in lines]
