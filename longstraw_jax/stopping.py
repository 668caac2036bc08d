"""Stop sequences: strings that end a response as an eos does, like TRL's and vLLM's `stop`."""

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from longstraw_jax.sampling import Samples

Encode = Callable[[str], list[int]]
Decode = Callable[[Iterable[int]], str]


@dataclasses.dataclass(frozen=True)
class StopSequences:
    """What ends a response, the string that ended it included.

    Attributes:
      texts: the strings.
      ids: token ids of each as it is encoded alone: what the decode loop compares, to end early. A tokenizer may merge
        a string with what stands beside it, so `cut` looks at the text.
      decode: token ids -> text, special tokens shown.
    """

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    decode: Decode


def stop_sequences(texts: Sequence[str], encode: Encode, decode: Decode, most: int) -> StopSequences | None:
    """The strings as token ids; None for none.

    Args:
      most: tokens of a response.

    Raises:
      ValueError: a string that is empty, of more tokens than a response, or that its token ids do not spell.
    """
    encoded = []
    for text in texts:
        ids = tuple(encode(text)) if text else ()
        if not ids:
            raise ValueError(f"stop={tuple(texts)}; accepted: strings of at least one character")
        if len(ids) > most:
            raise ValueError(f"stop={text!r} is {len(ids)} tokens; accepted: at most max_new_tokens={most}")
        if text not in decode(ids):
            raise ValueError(f"stop={text!r}; accepted: what the tokenizer gives back, not {decode(ids)!r}")
        encoded.append(ids)
    return StopSequences(tuple(texts), tuple(encoded), decode) if encoded else None


def cut(samples: Samples, stop: StopSequences | None) -> Samples:
    """The responses up to the first token at which their text holds a stop string; such ones are not truncated.

    Args:
      samples: on the host.

    Returns:
      Samples whose tokens, log-probabilities, lengths, truncated and choices agree after the cut.
    """
    if stop is None:
        return samples
    lengths, truncated = samples.lengths.copy(), samples.truncated.copy()
    for member, length in enumerate(samples.lengths):
        kept = _first_end(samples.tokens[member, :length].tolist(), stop)
        if kept is not None:
            lengths[member], truncated[member] = kept, False
    inside = np.arange(samples.tokens.shape[1]) < lengths[:, None]
    return samples._replace(
        tokens=np.where(inside, samples.tokens, 0),
        logprobs=np.where(inside, samples.logprobs, np.float32(0)),
        lengths=lengths,
        truncated=truncated,
        choices=jax.tree.map(lambda ids: np.where(inside[..., None], ids, -1), samples.choices),
    )


def ending(ids: Sequence[int], stop: StopSequences | None) -> int:
    """How many tokens at the end of a response that is not truncated ended it: those of its stop string, or the eos."""
    text = stop.decode(ids) if stop else ""
    begins = [text.find(wanted) for wanted in stop.texts if wanted in text] if stop else []
    if not begins:
        return 1
    before = bisect.bisect_right(range(len(ids) + 1), min(begins), key=lambda count: len(stop.decode(ids[:count]))) - 1
    return len(ids) - before


def _first_end(ids: list[int], stop: StopSequences) -> int | None:
    """How many tokens it takes until the text holds a stop string; None where it never does."""

    def ended(count):
        text = stop.decode(ids[:count])
        return any(wanted in text for wanted in stop.texts)

    if not ended(len(ids)):
        return None
    return bisect.bisect_left(range(len(ids) + 1), True, key=ended)  # a text that holds it goes on to hold it
