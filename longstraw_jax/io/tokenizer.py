"""Tokenizers of a checkpoint folder: `tokenizer.json`, or bytes plus special tokens for tiny checkpoints."""

import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import tokenizers

from longstraw_jax import fingerprint
from longstraw_jax.io.whole_file import write_whole

# The tokens of GLM's chat format, in the order that a byte-level checkpoint numbers them from 256 on.
GLM_SPECIAL_TOKENS = (
    "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<think>", "</think>",
)  # fmt: skip

# GLM ends a turn with the next role's token.
GLM_EOS_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")

BYTE_CLASS = "ByteTokenizer"

StrPath = str | os.PathLike[str]


class TokenizerError(ValueError):
    """A checkpoint folder whose tokenizer or eos ids cannot be read; the message names file and field."""


class Tokenizer(Protocol):
    """What the rest of the code may ask of a tokenizer.

    Attributes:
      name: the kind and the folder's name, for receipts.
      sha256: hex digest of what defines the ids.
      vocab_size: one above the largest id; the model's own vocabulary may be padded beyond it.
      eos_ids: the ids that end a response; several for GLM.
    """

    name: str
    sha256: str
    eos_ids: tuple[int, ...]

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added; special tokens written in the text become their ids."""
        ...

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        ...


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0..255 are bytes, special tokens follow. Ids beyond (a padded vocabulary) decode to U+FFFD."""

    special_tokens: tuple[str, ...]
    eos_ids: tuple[int, ...]
    name: str = BYTE_CLASS

    @property
    def vocab_size(self) -> int:
        return 256 + len(self.special_tokens)

    @functools.cached_property
    def sha256(self) -> str:
        return fingerprint.sha256_json([BYTE_CLASS, *self.special_tokens])

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {token: 256 + index for index, token in enumerate(self.special_tokens)}

    @functools.cached_property
    def _split(self) -> re.Pattern:
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(self._split.split(text) if self.special_tokens else [text]):
            if index % 2:  # re.split puts what the group matched at odd places
                ids.append(self._ids[part])
            else:
                ids.extend(part.encode("utf-8"))
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        parts: list[str] = []
        run = bytearray()
        for token in map(int, ids):
            if 0 <= token < 256:
                run.append(token)
                continue
            if token < 0:
                raise ValueError(f"token id {token}; accepted: 0 and up")
            # Bytes on both sides of a special token never join into one character.
            parts.append(run.decode("utf-8", errors="replace"))
            run.clear()
            if token >= self.vocab_size:
                parts.append("\ufffd")
            elif not skip_special:
                parts.append(self.special_tokens[token - 256])
        parts.append(run.decode("utf-8", errors="replace"))
        return "".join(parts)


@dataclasses.dataclass(frozen=True)
class FastTokenizer:
    """A `tokenizer.json` run by the `tokenizers` library. Ids that it does not define decode to nothing."""

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]
    name: str
    sha256: str

    @functools.cached_property
    def vocab_size(self) -> int:
        # Not get_vocab_size: it counts entries, and added tokens may leave holes.
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=skip_special)


def load_tokenizer(checkpoint_dir: StrPath) -> Tokenizer:
    """The tokenizer of a Hugging Face checkpoint folder, with the eos ids of `read_eos_ids`.

    `tokenizer_config.json` with `"tokenizer_class": "ByteTokenizer"` gives bytes plus its `special_tokens`.
    Any other folder needs `tokenizer.json`, whose truncation and padding settings are switched off, because
    they would cut or fill prompts unasked.

    Raises:
      TokenizerError: no tokenizer files, unreadable ones, no eos ids, or an eos id outside the vocabulary.
    """
    folder = pathlib.Path(checkpoint_dir)
    config_path, fast_path = folder / "tokenizer_config.json", folder / "tokenizer.json"
    config = read_json_object(config_path) if config_path.is_file() else {}
    if config.get("tokenizer_class") == BYTE_CLASS:
        special = _checked_special_tokens(config.get("special_tokens"), str(config_path))
        tokenizer = ByteTokenizer(special, read_eos_ids(folder), f"{BYTE_CLASS} {folder.name}")
    elif fast_path.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(fast_path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{fast_path}: not a tokenizer.json that can be read ({error})") from error
        backend.no_truncation()
        backend.no_padding()
        digest = fingerprint.sha256_file(fast_path)
        tokenizer = FastTokenizer(backend, read_eos_ids(folder), f"tokenizer.json {folder.name}", digest)
    else:
        raise TokenizerError(
            f"{folder}: no tokenizer; expected tokenizer.json, or tokenizer_config.json with"
            f' "tokenizer_class": "{BYTE_CLASS}"'
        )
    outside = [token for token in tokenizer.eos_ids if token >= tokenizer.vocab_size]
    if outside:
        raise TokenizerError(f"{folder}: eos_token_id {outside}; accepted: 0 to {tokenizer.vocab_size - 1}")
    return tokenizer


def read_eos_ids(checkpoint_dir: StrPath) -> tuple[int, ...]:
    """Every id that ends a response: `eos_token_id`, an id or a list, of generation_config or config.json.

    generation_config.json comes first, as in Hugging Face `generate`: config.json often names one of several.

    Raises:
      TokenizerError: neither file has the field, or it holds something else than ids.
    """
    folder = pathlib.Path(checkpoint_dir)
    paths = (folder / "generation_config.json", folder / "config.json")
    for path in paths:
        value = read_json_object(path).get("eos_token_id") if path.is_file() else None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(type(token) is int and token >= 0 for token in ids):
            raise TokenizerError(f"{path}: eos_token_id is {value!r}; expected an id or a list of ids")
        return tuple(dict.fromkeys(ids))
    raise TokenizerError(
        f"{folder}: no eos_token_id; looked in " + ", ".join(
            f"{path.name} ({'field absent' if path.is_file() else 'no such file'})" for path in paths
        ) + "; expected an id or a list of ids"
    )  # fmt: skip


def save_byte_tokenizer(
    checkpoint_dir: StrPath,
    special_tokens: Sequence[str] = GLM_SPECIAL_TOKENS,
    eos: Sequence[str] = GLM_EOS_TOKENS,
) -> ByteTokenizer:
    """Writes tokenizer_config.json and generation_config.json of a byte-level checkpoint; returns what loads.

    Args:
      checkpoint_dir: made if absent; files of these two names are replaced.
      special_tokens: numbered from 256 on.
      eos: those of `special_tokens` that end a response, at least one.

    Raises:
      TokenizerError: repeated or empty tokens, or an eos that is not a special token.
    """
    special = _checked_special_tokens(list(special_tokens), "special_tokens")
    if not eos or not set(eos) <= set(special):
        raise TokenizerError(f"eos is {list(eos)}; expected one or more of {list(special)}")
    folder = pathlib.Path(checkpoint_dir)
    for name, value in (
        ("tokenizer_config.json", {"tokenizer_class": BYTE_CLASS, "special_tokens": special}),
        ("generation_config.json", {"eos_token_id": [256 + special.index(token) for token in eos]}),
    ):
        write_whole(folder / name, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))
    return load_tokenizer(folder)


def read_json_object(path: StrPath) -> dict:
    """A JSON object from a file of a checkpoint folder.

    Raises:
      TokenizerError: the file is not JSON in UTF-8, or not an object.
    """
    try:
        value = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: {type(value).__name__}; expected a JSON object")
    return value


def _checked_special_tokens(tokens: object, place: str) -> tuple[str, ...]:
    if not isinstance(tokens, list) or not all(isinstance(token, str) and token for token in tokens):
        raise TokenizerError(f"{place}: special_tokens is {tokens!r}; expected a list of strings, none empty")
    repeated = sorted({token for token in tokens if tokens.count(token) > 1})
    if repeated:
        raise TokenizerError(f"{place}: special_tokens repeats {repeated}; expected each once")
    return tuple(tokens)
