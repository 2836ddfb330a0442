"""Graders by kind: own samples, the shared cases where they are present, and what must never be guessed."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realvr.rewards.answers import block, extract, normalise, plain
from realvr.rewards.grading import equal_maths, grade

SAMPLES = Path(__file__).parents[2] / "samples" / "grading.jsonl"
SHARED = Path(__file__).parents[4] / "shared" / "cases" / "grading.jsonl"


def cases(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("case", cases(SAMPLES) + cases(SHARED), ids=lambda c: f"{c['kind']}-{c['output'][:30]}")
def test_verdicts(case):
    verdict = grade(case["output"], case["gold"], case["kind"], case["mode"], case.get("options", ()))
    assert verdict.correct is case["correct"], verdict


def test_a_verdict_says_what_was_read_and_why_not():
    assert grade("<answer>Blue</answer>", "red").extracted == "Blue"
    assert "another text" in grade("<answer>Blue</answer>", "red").reason
    assert grade("no tags", "red").extracted is None
    with pytest.raises(ValueError, match="unknown kind"):
        grade("<answer>x</answer>", "x", kind="number")


@pytest.mark.parametrize("text", ["{0}{0}", "{0}<answer>", "</answer>{0}", "<answer>{0}", "{0} {0}</answer>"])
def test_reward_mode_reads_exactly_one_block(text):
    whole = text.format("<answer>red</answer>")
    assert block(whole) is None and not grade(whole, "red").correct
    assert grade("so: <answer>red</answer> indeed", "red").correct


def test_an_empty_gold_is_matched_by_nothing():
    assert not grade("<answer>.</answer>", "").correct


def test_a_special_token_inside_an_answer_makes_it_unreadable():
    assert block("<answer>red<|lvr|></answer>") is None
    assert block("<|lvr_start|><|lvr_end|><answer> red </answer><|im_end|>") == "red"


def test_full_width_and_superscripts():
    assert normalise("Ａ．１２") == "A.12"
    assert normalise("x²") == "x^{2}"
    assert equal_maths("1.5", "1½", 5.0)[0]


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("5 m", "5 cm", False), ("5", "5 cm", True), ("12 cm", "12 cm^2", False), ("60°", "60 degrees", True),
        ("1 1/2", "1", False), ("3/2", "1 1/2", True), ("1.5", "1\\frac{1}{2}", True), ("3", "1 2", False),
        ("13", "12=13", False), ("5", "2+3=5", True), ("5", "x=5", True), ("13", "12 or 13", False),
        ("13", "12, 13", False), ("5", "5!", False), ("120", "5!", True), ("on", "no", False), ("yes", "Yes.", True),
        ("3", "I have 3 apples", False), ("1000", "1e3", True), ("x^2", "x²", True), ("2\\sqrt{2}", "√8", True),
        ("\\pi", "π", True), ("7", "7/", False), ("[1,2]", "(1,2)", False), ("1,2", "2,1", True),
    ],
)  # fmt: skip
def test_maths_is_neither_fooled_nor_pedantic(gold, answer, same):
    assert grade(f"<answer>{answer}</answer>", gold, "math").correct is same


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (C).", "C"), ("The correct option is **C**, because", "C"), ("Answer:\nD", "D"),
        ("答案是B。", "B"),
        ("The answer is A. No wait, the answer is B.", "B"), ("The answer is D, A blue cube is left of it.", "D"),
        ("<|lvr_start|><|lvr|><|lvr_end|>\nB<|im_end|>", "B"), ("<answer>A</answer> no: <answer>B</answer>", "B"),
        ("\\boxed{\\mathbf{(B)}}", "B"), ("B. Vitamin C", "B"), ("(b) red", "B"),
        ("The answer is A or B.", None), ("The answer is A/B", None), ("The answer is A blue cube", None),
        ("The answer is not B", None), ("Is the answer B?", None), ("A. red B. blue", None), ("A) or B)", None),
        ("A, B", None), ("ABCD", None), ("<answer>B", None), ("", None), ("I think so", None),
    ],
)  # fmt: skip
def test_letters_are_read_not_guessed(text, letter):
    assert extract(text, "choice", "eval").text == letter


def test_maths_that_never_ends_costs_a_verdict_not_the_run():
    same, reason = equal_maths("1", "10^{10^{10^{10}}}", 1.0)
    assert same is False and reason


@given(st.text(st.characters(exclude_characters="<|"), min_size=1, max_size=20).filter(str.strip))
def test_what_is_written_into_one_block_is_read_back(text):
    assert block(f"noise <answer>{text}</answer>") == text.strip()


@given(st.text(max_size=40))
def test_extraction_never_raises_and_comparison_is_stable(text):
    for kind in ("text", "choice", "math"):
        for mode in ("reward", "eval"):
            extract(text, kind, mode, ("cat", "dog"))
    assert plain(plain(text)) == plain(text)
