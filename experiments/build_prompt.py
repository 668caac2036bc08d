"""Writes a prompt of exactly N tokens: real text in a seeded order with a question at a stated depth.

python experiments/build_prompt.py --tokens=2097152 --checkpoint=DIR --question="Which ...?" --out=runs/prompt

Writes prompt.npy (the ids), prompt.json (what they are, and their SHA-256) and rows.jsonl (the dataset row that
train_grpo.py takes with --config.data.prompt_file). The checkpoint's tokenizer and chat template are all that is read
of it. Exit status 2 on bad input.
"""

import json
import pathlib

from absl import app, flags

from longstraw_jax.command import fail, parse_flags
from longstraw_jax.io import payload, prompt, tokenizer
from longstraw_jax.io.whole_file import write_whole

ROWS_FILE = "rows.jsonl"


def build(values: flags.FlagValues) -> dict:
    """Writes the files of parsed flags; returns what prompt.json holds. Raises ValueError or OSError for bad input."""
    folder, out = pathlib.Path(values.checkpoint), pathlib.Path(values.out)
    source = payload.python_topics() if values.text == "python" else payload.text_folder(values.text)
    record = payload.write(
        out,
        tokenizer.load_tokenizer(folder),
        prompt.load_chat_template(folder),
        source,
        values.question,
        tokens=values.tokens,
        depth=values.depth,
        seed=values.seed,
    )
    row = {"prompt": [{"role": "user", "content": values.question}], "extra_info": {"index": 0}}
    if values.answer is not None:
        row["reward_model"] = {"ground_truth": values.answer}
    write_whole(out / ROWS_FILE, (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8"))
    return record


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    if len(argv) > 1 or None in (values.tokens, values.checkpoint, values.question):
        fail(f"arguments {argv[1:]}; accepted: --tokens=N --checkpoint=DIR --question=TEXT --out=DIR")
    try:
        record = build(values)
    except (ValueError, OSError) as error:
        fail(error)
    text, (start, stop) = record["text"], record["question_at"]
    print(f"{record['tokens']} tokens, question at {start} to {stop}, sha256 {record['sha256']}")
    print(f"text: {text['source']}, begun {text['passes']} times")
    print(
        f"train_grpo.py --config.data.paths='(\"{pathlib.Path(values.out) / ROWS_FILE}\",)' "
        f"--config.data.prompt_file={pathlib.Path(values.out) / payload.IDS_FILE}"
    )


if __name__ == "__main__":
    flags.DEFINE_integer("tokens", None, "Tokens of the prompt.")
    flags.DEFINE_string("checkpoint", None, "Hugging Face folder with the tokenizer and the chat template.")
    flags.DEFINE_string("question", None, "What the user asks.")
    flags.DEFINE_string("answer", None, "Ground truth for the reward function, if it compares with one.")
    flags.DEFINE_float("depth", 1.0, "Share of the text that comes before the question.")
    flags.DEFINE_string("text", "python", "'python' for Python's documentation, or a folder of text files.")
    flags.DEFINE_integer("seed", 0, "Of the order of the texts.")
    flags.DEFINE_string("out", "runs/prompt", "Folder of the three files.")
    app.run(main, flags_parser=parse_flags)
