"""Prompts: the chat template as Hugging Face renders it, and a document cut to an exact number of tokens."""

import datetime
import json

import numpy as np
import pytest

from longstraw_jax.io import prompt as pr
from longstraw_jax.io import tokenizer as tk

QUESTION = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "How many 数?"}]
TINY = pr.ChatTemplate(pr.tiny_chat_template(), "tiny_chat_template.jinja")
ALL_WIDTHS = "aé数🙂 " * 200  # characters of one to four bytes


def render(text, messages=QUESTION, **variables):
    return pr.render_chat(messages, pr.ChatTemplate(text, "t.jinja", variables))


def test_tiny_template_is_glm_style():
    assert pr.render_chat(QUESTION, TINY) == "[gMASK]<sop><|system|>\nAnswer.<|user|>\nHow many 数?<|assistant|>"
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n"},
        {"role": "tool", "content": "c"},
        {"role": "observation", "content": "d"},
    ]
    closed = pr.render_chat(talk, TINY, add_generation_prompt=False)
    assert closed == "[gMASK]<sop><|user|>\na<|assistant|>\nb\n<|observation|>\nc<|observation|>\nd"
    with pytest.raises(pr.PromptError, match="tiny_chat_template.jinja: TemplateError: role critic is not one of"):
        pr.render_chat([{"role": "critic", "content": "a"}], TINY)


def test_tiny_template_has_only_tokens_that_the_byte_tokenizer_knows(byte_tokenizer):
    ids = byte_tokenizer.encode(pr.render_chat([{"role": role, "content": ""} for role in ("system", "user")], TINY))
    assert ids == [257, 258, 259, 10, 260, 10, 261]


def test_renders_as_hugging_face():
    assert render("{% if true %}\n  {% set x = 1 %}\nx{{ x }}\n{% endif %}\n") == "x1\n"  # blocks are trimmed
    assert render("{{ v | tojson }}", v={"k": "<é>"}) == '{"k": "<é>"}'  # neither HTML nor ASCII escapes
    assert render("{{ v | tojson(ensure_ascii=true, indent=1) }}", v=["é"]) == '[\n "\\u00e9"\n]'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}") == (
        "system"
    )
    assert render("{% if not tools and not documents %}a{% endif %}") == "a"
    assert render("{% generation %}a{{ messages[0].role }}{% endgeneration %}b") == "asystemb"


def test_template_errors_name_the_file():
    with pytest.raises(pr.PromptError, match="t.jinja, line 2: .*'frob'"):
        render("ok\n{% frob %}")
    with pytest.raises(pr.PromptError, match="t.jinja: TemplateError: no system turn please"):
        render("{{ raise_exception('no system turn please') }}")
    with pytest.raises(pr.PromptError, match="t.jinja: UndefinedError: .*'tone'"):
        render("{{ messages[0].tone.loud }}")
    with pytest.raises(pr.PromptError, match="t.jinja: TypeError: "):
        render("{{ 'a' + 1 }}")
    with pytest.raises(pr.PromptError, match="t.jinja: SecurityError: "):
        render("{{ ''.__class__.__mro__ }}")
    with pytest.raises(pr.PromptError, match="t.jinja: SecurityError: "):
        render("{{ messages.append(1) }}")


def test_template_file_comes_before_the_config_field(tmp_path):
    with pytest.raises(pr.PromptError, match="no chat template; expected chat_template.jinja, or a field"):
        pr.load_chat_template(tmp_path)
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "chat_template": "field"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert pr.render_chat(QUESTION, pr.load_chat_template(tmp_path)) == "field"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file{{ eos_token }}{{ mood }}")
    template = pr.load_chat_template(str(tmp_path), {"mood": "!", "bos_token": "<b>"})
    assert pr.render_chat(QUESTION, template) == "<b>file</s>!"
    assert template.source == str(tmp_path / "chat_template.jinja")


def test_config_field_with_several_templates(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    path.write_text(json.dumps({"chat_template": several}))
    assert pr.load_chat_template(tmp_path).text == "plain"
    for wrong in (several[:1], [5], 5):
        path.write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(pr.PromptError, match="no chat template; .*one named default"):
            pr.load_chat_template(tmp_path)
    path.write_text("{")
    with pytest.raises(tk.TokenizerError, match="tokenizer_config.json: not JSON"):
        pr.load_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    path.unlink()
    with pytest.raises(pr.PromptError, match="chat_template.jinja: not UTF-8"):
        pr.load_chat_template(tmp_path)


def test_without_document_the_whole_chat_is_tokenized(tokenizer):
    ids = pr.build_prompt(QUESTION, tokenizer, TINY)
    assert ids.dtype == np.int32 and tokenizer.decode(ids) == pr.render_chat(QUESTION, TINY)
    assert pr.build_prompt(QUESTION, tokenizer, TINY, target_tokens=len(ids)).tolist() == ids.tolist()
    with pytest.raises(pr.PromptError, match=f"target_tokens=5; accepted: the prompt's own {len(ids)}, or a document"):
        pr.build_prompt(QUESTION, tokenizer, TINY, target_tokens=5)
    string = pr.build_prompt("hi", tokenizer, TINY)
    assert tokenizer.decode(string) == "[gMASK]<sop><|user|>\nhi<|assistant|>"


def test_whole_document_stands_before_the_question(tokenizer):
    ids = pr.build_prompt(QUESTION, tokenizer, TINY, document=ALL_WIDTHS)
    assert tokenizer.decode(ids) == (
        f"[gMASK]<sop><|system|>\nAnswer.<|user|>\n{ALL_WIDTHS}\n\nHow many 数?<|assistant|>"
    )


def test_prompt_has_exactly_the_tokens_asked_for(tokenizer):
    before, after = "[gMASK]<sop><|system|>\nAnswer.<|user|>\n", "\n\nHow many 数?<|assistant|>"
    smallest = len(tokenizer.encode(before)) + len(tokenizer.encode(after))
    largest = len(pr.build_prompt(QUESTION, tokenizer, TINY, document=ALL_WIDTHS))
    for target in (*range(smallest, smallest + 60), largest - 1, largest):
        ids = pr.build_prompt(QUESTION, tokenizer, TINY, document=ALL_WIDTHS, target_tokens=target)
        text = tokenizer.decode(ids)
        assert len(ids) == target
        assert text.startswith(before) and text.endswith(after)  # the question is whole
        kept = text[len(before) : -len(after)]
        assert ALL_WIDTHS.startswith(kept.rstrip("\n"))  # from its start, no half characters
        assert len(kept) - len(kept.rstrip("\n")) <= 3


def test_real_text_to_exact_length(tokenizer):
    document = pr.python_documentation_text(40_000)
    ids = pr.build_prompt(QUESTION, tokenizer, TINY, document=document, target_tokens=4_096)
    text = tokenizer.decode(ids)
    start, end = text.index(document[:100]), text.index("\n\nHow many")
    assert len(ids) == 4_096 and document.startswith(text[start:end])


def test_target_out_of_reach(tokenizer):
    whole = len(pr.build_prompt(QUESTION, tokenizer, TINY, document="short"))
    has = len(tokenizer.encode("short"))
    with pytest.raises(
        pr.PromptError, match=f"target_tokens={whole + 1}; accepted: at most {whole}, as the document has {has}"
    ):
        pr.build_prompt(QUESTION, tokenizer, TINY, document="short", target_tokens=whole + 1)
    with pytest.raises(pr.PromptError, match=f"accepted: at least the {whole - has} of the chat and the question"):
        pr.build_prompt(QUESTION, tokenizer, TINY, document="short", target_tokens=whole - has - 1)


def test_document_goes_to_the_last_user_message(byte_tokenizer):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    text = byte_tokenizer.decode(pr.build_prompt(talk, byte_tokenizer, TINY, document="D"))
    assert text == "[gMASK]<sop><|user|>\na<|assistant|>\nb<|user|>\nD\n\nc<|assistant|>"
    with pytest.raises(pr.PromptError, match="needs a user message to stand in; the prompt's roles: system"):
        pr.build_prompt(QUESTION[:1], byte_tokenizer, TINY, document="D")


def test_template_must_write_the_question_once(byte_tokenizer):
    for text, times in (("{{ messages[0].content }}", 0), ("{{ messages[1].content * 2 }}", 2)):
        with pytest.raises(pr.PromptError, match=f"t.jinja: writes the last user message {times} times"):
            pr.build_prompt(QUESTION, byte_tokenizer, pr.ChatTemplate(text, "t.jinja"), document="D")


def test_python_documentation_text():
    text, short = pr.python_documentation_text(100_000), pr.python_documentation_text(1_000)
    assert len(text.encode()) >= 100_000 and len(short.encode()) >= 1_000
    assert text.startswith(short) and len(short) < len(text)
    assert "assert" in short
    with pytest.raises(pr.PromptError, match=r"min_bytes is 1000000000; Python's .* topics hold \d{6} bytes"):
        pr.python_documentation_text(10**9)
