"""Retrieval tasks: what follows from the lines is the answer, and nothing else in them is."""

import hashlib
import re

import pytest

from longstraw_jax.tasks import retrieval

SEEDS = range(40)
VALUE = re.compile(r"The pass key of (\w+ \w+) is (\d+)\.")
LINK = re.compile(r"The pass key of (\w+ \w+) is that of (\w+ \w+)\.")


def solved(task: retrieval.Task) -> str:
    """The answer as a reader of all lines finds it, from the question's names."""
    values, links = {}, {}
    for line in (*task.evidence, *task.distractors):
        if found := VALUE.fullmatch(line):
            assert found[1] not in values | links, "a name owns one line"
            values[found[1]] = found[2]
        else:
            found = LINK.fullmatch(line)
            assert found and found[1] not in values | links
            links[found[1]] = found[2]

    def follow(name):
        while name in links:
            name = links[name]
        return values[name]

    asked = task.question.partition(" of ")[2].removesuffix("?")
    numbers = [follow(name) for name in re.split(r", | and ", asked)]
    addend = re.search(r"What is (\d+) plus ", task.question)
    return str(int(numbers[0]) + int(addend[1])) if addend else " ".join(numbers)


@pytest.mark.parametrize("kind", retrieval.KINDS)
def test_the_lines_give_the_answer_and_no_distractor_shows_it(kind):
    for seed in SEEDS:
        task = retrieval.make(kind, seed, distractors=30)
        assert solved(task) == task.answer
        assert re.fullmatch(r"\d+( \d+)*", task.answer)
        shown = {found[2] for line in task.distractors if (found := VALUE.fullmatch(line))}
        assert shown.isdisjoint(task.answer.split()) and len(task.distractors) == 30


def test_half_of_the_distractors_look_like_what_is_asked():
    task = retrieval.make("needle", 3, distractors=20)
    first, second = VALUE.fullmatch(task.evidence[0])[1].split()
    names = [VALUE.fullmatch(line)[1].split() for line in task.distractors]
    assert sum(a == first or b == second for a, b in names) >= 10


def test_a_chain_of_look_alikes_has_links_among_its_distractors():
    task = retrieval.make("chain", 1, distractors=8)
    assert sum(bool(LINK.fullmatch(line)) for line in task.distractors) == 4
    assert sum(bool(LINK.fullmatch(line)) for line in task.evidence) == retrieval.LINES - 1


def test_the_same_arguments_give_the_same_text_for_ever():
    """The hash was taken when the tasks were defined: prompts that are on disk stay what their parameters say."""
    text = repr([tuple(retrieval.make(kind, 7, distractors=5, digits=3)) for kind in retrieval.KINDS])
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "74405acec7805df9cf09d29764474bf36c160451ecdef5300313ace30fe09a38"
    assert len({retrieval.make("needle", seed).answer for seed in SEEDS}) > 30


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"kind": "haystack"}, "kind='haystack'; accepted: needle, needles, chain, sum"),
        ({"seed": -1}, "seed=-1; accepted: 0 to"),
        ({"distractors": 501}, "distractors=501; accepted: 0 to 500"),
        ({"digits": 0}, "digits=0; accepted: 1 to 12"),
        ({"digits": 1, "distractors": 7}, "accepted: at most 6, as values differ"),
    ],
)
def test_bad_arguments_are_named(arguments, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        retrieval.make(**{"kind": "needle", "seed": 0} | arguments)
