"""Tokenizers: bytes with special tokens, a real BPE tokenizer.json, and every eos id of a checkpoint folder."""

import hashlib
import json

import numpy as np
import pytest
import tokenizers

from longstraw_jax.io import tokenizer as tk
from longstraw_jax.io.prompt import python_documentation_text

TEXT = "Straße, 数学, 🙂 and\n\ttabs\0"


def test_bytes_and_special_tokens_keep_their_ids(tmp_path):
    tokenizer = tk.save_byte_tokenizer(tmp_path / "tiny")
    assert tokenizer.encode("A\xff") == [65, 0xC3, 0xBF]
    text = "[gMASK]<sop><|user|>\nhi<|assistant|><think>"
    ids = tokenizer.encode(text)
    assert ids == [257, 258, 260, 10, 104, 105, 261, 263]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.array(ids), skip_special=True) == "\nhi"
    assert tokenizer.vocab_size == 256 + len(tk.GLM_SPECIAL_TOKENS) == 265
    assert tokenizer.name == "ByteTokenizer tiny"
    again = tk.load_tokenizer(str(tmp_path / "tiny"))
    assert again == tokenizer and again.sha256 == tokenizer.sha256


def test_longest_special_token_wins(tmp_path):
    tokenizer = tk.save_byte_tokenizer(tmp_path, ["<a", "<a>", "<a>b"], ["<a>"])
    assert tokenizer.encode("<a>b<a>c<a") == [258, 257, ord("c"), 256]
    assert tk.save_byte_tokenizer(tmp_path, ["<a", "<a>"], ["<a>"]).sha256 != tokenizer.sha256


def test_no_special_tokens(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByteTokenizer", "special_tokens": []}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    tokenizer = tk.load_tokenizer(tmp_path)
    assert (tokenizer.encode("<|user|>"), tokenizer.vocab_size) == (list(b"<|user|>"), 256)


def test_byte_decode_is_lossless_or_replaces(tmp_path):
    tokenizer = tk.save_byte_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode([0x61, 0xFF, 0x62]) == "a\ufffdb"
    # é split by a special token stays two broken halves, also when the token is not shown
    assert tokenizer.decode([0xC3, 256, 0xA9], skip_special=True) == "\ufffd\ufffd"
    assert tokenizer.decode([0x61, 5000, 0x62]) == "a\ufffdb"  # the model's padded vocabulary
    with pytest.raises(ValueError, match="token id -1; accepted: 0 and up"):
        tokenizer.decode([-1])


def test_bpe_round_trip_and_settings(bpe_folder):
    tokenizer = tk.load_tokenizer(bpe_folder)
    text = python_documentation_text(5_000) + TEXT
    ids = tokenizer.encode("[gMASK]<sop><|user|>" + text)
    assert 100 < len(ids) < len(text) / 2  # merged, and neither cut to 16 nor filled to 32
    assert len(tokenizer.encode("a")) == 1
    assert tokenizer.decode(ids) == "[gMASK]<sop><|user|>" + text
    assert tokenizer.decode(np.array(ids), skip_special=True) == text
    assert tokenizer.vocab_size == 600
    assert tokenizer.sha256 == hashlib.sha256((bpe_folder / "tokenizer.json").read_bytes()).hexdigest()
    assert tokenizer.name == f"tokenizer.json {bpe_folder.name}"


def test_vocab_size_counts_holes(tmp_path):
    model = tokenizers.models.WordLevel({"a": 0, "b": 9}, unk_token="a")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert tk.load_tokenizer(tmp_path).vocab_size == 10


def test_b1_every_eos_id_is_read(tmp_path, bpe_folder):
    saved = tk.save_byte_tokenizer(tmp_path)
    assert [saved.decode([token]) for token in saved.eos_ids] == ["<|endoftext|>", "<|user|>", "<|observation|>"]
    bpe = tk.load_tokenizer(bpe_folder)
    assert [bpe.decode([token]) for token in bpe.eos_ids] == ["<|endoftext|>", "<|user|>", "<|observation|>"]


@pytest.mark.parametrize(
    "generation, config, expected",
    [
        ({"eos_token_id": [5, 3, 5]}, {"eos_token_id": 9}, (5, 3)),
        ({"eos_token_id": 4}, None, (4,)),
        ({"temperature": 1.0}, {"eos_token_id": [1, 2]}, (1, 2)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0,)),
        (None, {"eos_token_id": 7}, (7,)),
    ],
)
def test_b1_generation_config_comes_before_config(tmp_path, generation, config, expected):
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (tmp_path / name).write_text(json.dumps(value))
    assert tk.read_eos_ids(tmp_path) == expected


def test_b1_absent_or_wrong_eos_is_an_error(tmp_path):
    with pytest.raises(tk.TokenizerError, match=r"no eos_token_id; .*config.json \(no such file\)"):
        tk.read_eos_ids(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(tk.TokenizerError, match=r" config.json \(field absent\); expected an id or a list"):
        tk.read_eos_ids(tmp_path)
    for wrong in ([], "</s>", [1, None], True, -1):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(tk.TokenizerError, match="config.json: eos_token_id is .*; expected an id or a list"):
            tk.read_eos_ids(tmp_path)


def test_eos_outside_the_vocabulary(tmp_path):
    tk.save_byte_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [256, 265]}')
    with pytest.raises(tk.TokenizerError, match=r"eos_token_id \[265\]; accepted: 0 to 264"):
        tk.load_tokenizer(tmp_path)


def test_bad_folders(tmp_path):
    with pytest.raises(tk.TokenizerError, match="no tokenizer; expected tokenizer.json, or tokenizer_config.json"):
        tk.load_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    for content, message in (
        ("{", "tokenizer_config.json: not JSON"),
        ("[]", "tokenizer_config.json: list; expected a JSON object"),
        ('{"tokenizer_class": "ByteTokenizer"}', "special_tokens is None; expected a list of strings"),
        ('{"tokenizer_class": "ByteTokenizer", "special_tokens": [""]}', "expected a list of strings, none empty"),
        ('{"tokenizer_class": "ByteTokenizer", "special_tokens": ["a", "a"]}', r"special_tokens repeats \['a'\]"),
    ):
        config.write_text(content)
        with pytest.raises(tk.TokenizerError, match=message):
            tk.load_tokenizer(tmp_path)
    config.write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(tk.TokenizerError, match="tokenizer.json: not a tokenizer.json that can be read"):
        tk.load_tokenizer(tmp_path)


def test_bad_save_leaves_the_folder_alone(tmp_path):
    tokenizer = tk.save_byte_tokenizer(tmp_path)
    for special, eos in ((["a"], []), (["a"], ["b"]), (["a", "a"], ["a"])):
        with pytest.raises(tk.TokenizerError, match="eos is|repeats"):
            tk.save_byte_tokenizer(tmp_path, special, eos)
    assert tk.load_tokenizer(tmp_path) == tokenizer
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generation_config.json", "tokenizer_config.json"]
