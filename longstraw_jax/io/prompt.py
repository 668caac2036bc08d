"""Prompts: messages through the chat template, a long document in front of the question, token ids."""

import dataclasses
import datetime
import importlib.resources
import json
import os
import pathlib
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
from jaxtyping import Int32

from longstraw_jax.io.data import as_messages
from longstraw_jax.io.tokenizer import Tokenizer, read_json_object

# Between the document and the question that follows it in the user message.
DOCUMENT_SEPARATOR = "\n\n"

# Stands where the document goes while the template renders; private-use characters that no text holds.
_SLOT = "\ue000document\ue001"

StrPath = str | os.PathLike[str]


class PromptError(ValueError):
    """A template that cannot be read or rendered, or a prompt of the wrong length."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template and what it may refer to.

    Attributes:
      text: Jinja source.
      source: file named in errors.
      variables: names besides `messages` and `add_generation_prompt`: the special tokens of
        tokenizer_config.json, and what the caller adds (GLM's own template reads `enable_thinking`).
    """

    text: str
    source: str = "chat template"
    variables: Mapping[str, object] = dataclasses.field(default_factory=dict)


def load_chat_template(checkpoint_dir: StrPath, variables: Mapping[str, object] | None = None) -> ChatTemplate:
    """The chat template of a Hugging Face checkpoint folder.

    It is chat_template.jinja, else the field `chat_template` of tokenizer_config.json (of a list of several, the
    one named `default`).

    Args:
      checkpoint_dir: the folder.
      variables: added to the special tokens that tokenizer_config.json names.

    Raises:
      PromptError: neither is there, or the template is not UTF-8.
      TokenizerError: tokenizer_config.json is not a JSON object.
    """
    folder = pathlib.Path(checkpoint_dir)
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_json_object(config_path) if config_path.is_file() else {}
    special = {}
    for name, token in config.items():
        token = token.get("content") if isinstance(token, dict) else token  # an AddedToken
        if name.endswith("_token") and isinstance(token, str):
            special[name] = token
    names = special | dict(variables or {})
    if template_path.is_file():
        try:
            return ChatTemplate(template_path.read_text(encoding="utf-8"), str(template_path), names)
        except UnicodeDecodeError as error:
            raise PromptError(f"{template_path}: not UTF-8 ({error})") from error
    text = config.get("chat_template")
    if isinstance(text, list):
        named = {entry.get("name"): entry.get("template") for entry in text if isinstance(entry, dict)}
        text = named.get("default")
    if not isinstance(text, str):
        raise PromptError(
            f"{folder}: no chat template; expected chat_template.jinja, or a field chat_template (a string,"
            " or a list with one named default) in tokenizer_config.json"
        )
    return ChatTemplate(text, str(config_path), names)


def tiny_chat_template() -> str:
    """Source of the GLM-style template that byte-level checkpoints are written with."""
    return (importlib.resources.files("longstraw_jax.io") / "tiny_chat_template.jinja").read_text("utf-8")


def render_chat(messages: Sequence[Mapping], template: ChatTemplate, *, add_generation_prompt: bool = True) -> str:
    """Renders messages to text as Hugging Face `apply_chat_template` does (same environment and helpers).

    Args:
      messages: {role, content} mappings.
      template: from `load_chat_template`, or `ChatTemplate(text)`.
      add_generation_prompt: end where the assistant is to speak.

    Raises:
      PromptError: the template does not parse, raises, or reaches for what the sandbox forbids.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationSpan, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    names = {"tools": None, "documents": None, **template.variables}
    names |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
    try:
        return environment.from_string(template.text).render(names)
    except jinja2.TemplateSyntaxError as error:
        raise PromptError(f"{template.source}, line {error.lineno}: {error.message}") from error
    except Exception as error:  # a template can raise whatever its expressions raise
        raise PromptError(f"{template.source}: {type(error).__name__}: {error}") from error


def build_prompt(
    prompt: str | Sequence[Mapping],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    document: str | None = None,
    target_tokens: int | None = None,
) -> Int32[np.ndarray, "S"]:
    """Token ids of a row's prompt, up to where the assistant is to speak.

    A document goes in front of the last user message's text, followed by a blank line. The text before the
    document, the document, and the text after it are tokenized apart, so that no token spans their borders.
    With a target, the document then loses whole tokens at its end until the prompt has exactly that many;
    merges of a BPE tokenizer cannot change the count, because nothing is tokenized again. Where the cut would
    split a character, newlines take the place of its bytes. Nothing else is ever cut.

    Special tokens written in a message or in the document become their ids, as in Hugging Face.

    Args:
      prompt: a string (one user message) or {role, content} messages.
      tokenizer: from `load_tokenizer`.
      template: from `load_chat_template`.
      document: long text that the question is about.
      target_tokens: exact length S of the prompt.

    Returns:
      int32 [S].

    Raises:
      PromptError: no user message to put the document in, a template that drops or repeats it, or a target
        that cannot be met: below what the question needs, or above what the document gives.
    """
    messages = as_messages(prompt)
    if document is None:
        ids = tokenizer.encode(render_chat(messages, template))
        if target_tokens is not None and len(ids) != target_tokens:
            raise PromptError(
                f"target_tokens={target_tokens}; accepted: the prompt's own {len(ids)}, or a document before it"
            )
        return np.asarray(ids, np.int32)
    before, after = (tokenizer.encode(text) for text in _around_document(messages, template))
    middle = tokenizer.encode(document)
    if target_tokens is not None:
        room = target_tokens - len(before) - len(after)
        if room < 0:
            raise PromptError(
                f"target_tokens={target_tokens}; accepted: at least the {len(before) + len(after)} of the chat and the "
                "question, which are never cut"
            )
        if room > len(middle):
            raise PromptError(
                f"target_tokens={target_tokens}; accepted: at most {target_tokens - room + len(middle)}, as the "
                f"document has {len(middle)} tokens"
            )
        middle = cut(middle, room, tokenizer)
    return np.asarray(before + middle + after, np.int32)


def python_documentation_text(min_bytes: int) -> str:
    """Real text that ships with every CPython: the language reference as `pydoc_data.topics` holds it.

    Whole topics in the order of their names until there are `min_bytes` bytes of UTF-8. The text differs from
    one Python version to the next.

    Raises:
      PromptError: there is less; the message says how much.
    """
    from pydoc_data.topics import topics  # half a megabyte that few runs read

    texts, size = [], 0
    for name in sorted(topics):
        if size >= min_bytes:
            break
        texts.append(topics[name])
        size += len(topics[name].encode("utf-8"))
    if size < min_bytes:
        raise PromptError(f"min_bytes is {min_bytes}; Python's documentation topics hold {size} bytes")
    return "".join(texts)


def _around_document(messages: list[dict], template: ChatTemplate) -> tuple[str, str]:
    """The rendered chat before and after the place of the document."""
    user = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not user:
        roles = ", ".join(message["role"] for message in messages)
        raise PromptError(f"a document needs a user message to stand in; the prompt's roles: {roles}")
    question = messages[user[-1]]
    marked = question | {"content": _SLOT + DOCUMENT_SEPARATOR + question["content"]}
    rendered = render_chat([*messages[: user[-1]], marked, *messages[user[-1] + 1 :]], template)
    if rendered.count(_SLOT) != 1:
        raise PromptError(
            f"{template.source}: writes the last user message {rendered.count(_SLOT)} times; expected once"
        )
    before, _, after = rendered.partition(_SLOT)
    return before, after


def cut(ids: list[int], length: int, tokenizer: Tokenizer) -> list[int]:
    """The first `length` ids; newlines at their end where a character would be split."""
    kept = ids[:length]
    if length < len(ids):
        for _ in range(3):  # a UTF-8 character has at most three bytes before its last
            if not tokenizer.decode(kept[-8:]).endswith("\ufffd"):
                break
            kept.pop()
        kept += tokenizer.encode("\n")[:1] * (length - len(kept))
    return kept


class _GenerationSpan(jinja2.ext.Extension):
    """The tag `generation` of training templates marks the assistant's text; rendering looks through it."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter escapes HTML; Hugging Face replaces it by plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _strftime_now(pattern):
    return datetime.datetime.now().strftime(pattern)
