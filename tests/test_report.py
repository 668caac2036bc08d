"""The page of a run: its figures are the log's, its texts are escaped, and it fits a browser where there is one."""

import html.parser
import json
import re
import shutil
import subprocess
import sys

import browser
import numpy as np
import pytest
import run_folders
import tiny_jobs

from longstraw_jax.evidence import attended, report
from longstraw_jax.io import metrics, samples

import report as report_command  # isort: skip

NASTY = "<script>alert(1)</script><img src=x onerror=alert(2)>\x00\x1b & \u202e"
VOID = {"meta", "br"}


class Page(html.parser.HTMLParser):
    """Tags in order, the text below each section's heading, and whether every tag closes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.sections, self.attributes = [], [], {}, []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.sections[data] = ""
        elif self.sections:
            self.sections[list(self.sections)[-1]] += data + "|"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, _ = run_folders.make_run(tmp_path_factory.mktemp("report"))
    for step in (1, 12):
        members = [
            {
                "row_id": f"row-{step}",
                "member": i,
                "text": f"{NASTY}{step}",
                "reward": 0.25,
                "tokens": 3,
                "truncated": i == 1,
            }
            for i in range(report.MOST_SAMPLES + 2)
        ]
        samples.write_samples(folder, step, members)
    counts = attended.position_histogram(np.arange(100), 100, 20)
    attended.write_positions(folder, np.stack([counts, counts * 2]), [0, 2], prompt_tokens=100, queries=9)
    return folder


@pytest.fixture(scope="module")
def page(run):
    return report.page(run)


def test_claims_are_rows_of_their_own_with_their_evidence(run, page):
    told = Page(page).sections["Claims"]
    receipt = json.loads((run / "receipt.json").read_text())
    for row in receipt["claims"]:
        assert f"|{row['claim']}|{row['status']}|" in told.replace("\n", "")
    assert "|gradient|shown|artifacts/parity.json|" in told.replace("\n", "")
    assert "0 mismatched" in told


def test_curves_hold_a_point_a_step_and_tables_the_logs_values(run, page):
    steps = metrics.read_steps(run / "steps.jsonl")
    reward = re.search(r"<figcaption>Reward.*?</figure>", page, re.S)[0]
    assert reward.count('class="dot s0"') == len(steps) == 12
    said = re.findall(r"step (\d+), reward: (\S+?)<", reward)
    for (number, value), step in zip(said, steps, strict=True):
        assert int(number) == step["step"] and float(value) == pytest.approx(step["reward_mean"], rel=1e-3)
    rows = Page(page).sections["Every step"]
    assert all(f"|{step['step']}|" in rows.replace("\n", "") for step in steps)
    for title in ("Loss", "KL from the reference", "Ratio of new to old policy", "Peak memory", "Seconds a phase"):
        assert f"<figcaption>{title}" in page
    totals = {"capture": 12.0, "sample": 24.0, "replay": 78.0}
    times = Page(page).sections["Time and memory"].replace("\n", "")
    assert all(re.search(rf"\|{phase}\|[^|]+\|[^|]+\|{total:g}\|", times) for phase, total in totals.items())


def test_texts_of_the_model_are_shown_and_do_nothing(page):
    parsed = Page(page)
    assert not {"script", "img", "iframe", "link", "object"} & set(parsed.tags)
    assert not any(name.startswith("on") or name in ("src", "href") for _, name, _ in parsed.attributes)
    assert "\x00" not in page and "\x1b" not in page
    told = parsed.sections["Samples"]
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>\u2400\u241b & \u202e12" in told
    assert "row row-1, member 1: reward 0.25, 3 tokens, cut off" in told and "and 2 more" in told


def test_attended_positions_are_strips(page):
    assert "layer 2" in Page(page).sections["Prompt positions that the answers attended to"]
    assert page.count('class="heat"') == 3 * 20


def test_a_run_without_receipt_texts_and_positions_has_a_page(run, tmp_path):
    shutil.copy(run / "steps.jsonl", tmp_path)
    parsed = Page(report.page(tmp_path))
    assert "the run wrote no texts" in parsed.sections["Samples"]
    assert "None before the receipt" in parsed.sections["Claims"]
    assert "Prompt positions that the answers attended to" not in parsed.sections


def test_a_receipt_that_does_not_fit_is_told(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/parity.json").write_text("{}")
    assert "1 mismatched" in Page(report.page(tmp_path / "run")).sections["Claims"]


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("steps.jsonl", "", "steps.jsonl holds no steps"),
        ("steps.jsonl", "{}\n", "steps.jsonl line 1: step = None"),
        ("receipt.json", "{", "receipt.json: "),
        ("positions.json", "{}", "positions.json: receipt: 'schema_version' is a required property"),
    ],
)
def test_a_damaged_file_is_named(run, tmp_path, name, text, said):
    shutil.copy(run / "steps.jsonl", tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        report.page(tmp_path)


def test_a_receipt_that_breaks_its_schema_is_named(run, tmp_path):
    whole = (run / "receipt.json").read_text()
    assert whole.count('"created"') == 1
    shutil.copy(run / "steps.jsonl", tmp_path)
    for text in (whole.replace('"created"', '"creatad"'), "null", "[]"):
        (tmp_path / "receipt.json").write_text(text)
        with pytest.raises(ValueError, match="receipt.json: receipt: ") as caught:
            report.page(tmp_path)
        assert "\n" not in str(caught.value)


def test_the_command_writes_the_page_and_names_what_is_missing(run, page, tmp_path):
    assert report_command.write(run, tmp_path / "page.html") == len(page.encode())
    assert (tmp_path / "page.html").read_text() == page
    command = [sys.executable, str(tiny_jobs.EXPERIMENTS / "report.py"), str(tmp_path / "gone")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "gone/steps.jsonl" in done.stderr
    assert not (tmp_path / "gone").exists()


@pytest.mark.skipif(browser.find() is None, reason="no Chromium on the path, and CHROME names none")
def test_a_browser_shows_it_at_every_width_and_says_nothing(page, tmp_path):
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    papers = set()
    with browser.opened(browser.find()) as pages:
        for width in (375, 1280):
            for scheme in ("light", "dark"):
                found = browser.measure(pages, (tmp_path / "page.html").as_uri(), width=width, scheme=scheme)
                assert found["scroll"] <= found["inner"] == width and found["messages"] == []
                papers.add(found["paper"])
    assert len(papers) == 2
