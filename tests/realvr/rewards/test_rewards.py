"""The paper's two rewards, and how reward functions are found."""

import pytest

from launch.errors import UserError
from realvr.config import RewardSettings
from realvr.rewards.rewards import accuracy, format, load_rewards

GOOD = "<|lvr_start|><|lvr|><|lvr|><|lvr_end|><answer>red</answer><|im_end|>"


def test_accuracy_wants_the_one_block_right():
    texts = [GOOD, GOOD.replace("red", "Red "), GOOD.replace("red", "blue"), "red"]
    assert accuracy(texts, ["red"] * 4) == [1, 1, 0, 0]
    assert accuracy(["<answer>dog</answer>"], ["B"], ["choice"], [("cat", "dog")]) == [1]


@pytest.mark.parametrize(
    "text",
    [GOOD, GOOD.replace("<|im_end|>", ""), GOOD.replace("<answer>", "\n <answer>"), GOOD.replace("red", "a red one")],
)
def test_format_accepts(text):
    assert format([text]) == [1.0]


@pytest.mark.parametrize(
    "text",
    [
        "well " + GOOD,
        GOOD.replace("<|lvr_end|>", ""),
        GOOD.replace("<|lvr_start|>", ""),
        GOOD.replace("<answer>", "so <answer>"),
        GOOD.replace("</answer>", "</answer>."),
        GOOD.replace("red", " "),
        GOOD.replace("<|im_end|>", "<answer>blue</answer>"),
        GOOD.replace("<|lvr_end|>", "<|lvr_end|><|lvr_start|><|lvr|><|lvr_end|>"),
        "<answer>red</answer>",
        "",
    ],
)
def test_format_refuses(text):
    assert format([text]) == [0.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("accuracy", "not a dotted path"),
        ("realvr.rewards.rewards.acuracy", "has no 'acuracy'"),
        ("nowhere.f", "no installed package"),
        ("tests.realvr.rewards.bad_rewards.slow_on_wait", "local: true"),
    ],
)
def test_functions_that_are_not_found(function, words):
    with pytest.raises(UserError, match=words):
        load_rewards([RewardSettings(function=function)])


def test_local_functions_and_names():
    local = RewardSettings(function="tests.realvr.rewards.bad_rewards.raises", local=True, weight=0.5)
    ours, other = load_rewards([RewardSettings(function="realvr.rewards.rewards.accuracy"), local])
    assert (ours.name, other.name, other.weight) == ("accuracy", "raises", 0.5)
    with pytest.raises(UserError, match="int, not a function"):
        load_rewards([RewardSettings(function="tests.realvr.rewards.bad_rewards.NUMBER", local=True)])
    with pytest.raises(UserError, match="twice"):
        load_rewards([local, local])
    with pytest.raises(UserError, match="empty"):
        load_rewards([])
