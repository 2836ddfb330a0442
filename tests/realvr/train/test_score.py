"""From groups to scored groups: weights, failures, advantages, and which wrong answers count."""

import numpy as np
import pytest

from launch.errors import UserError
from realvr.config import GrpoSettings, RewardSettings
from realvr.data.examples import Example
from realvr.rollout.records import Group, Rollout
from realvr.train.score import Scorer, reward_metrics

BAD = "tests.realvr.rewards.bad_rewards."
ACCURACY = RewardSettings(function="realvr.rewards.rewards.accuracy")
FORMAT = RewardSettings(function="realvr.rewards.rewards.format", weight=0.5)
SPAN = "<|lvr_start|><|lvr|><|lvr_end|>"


def rollout(text: str, finish: str = "stop") -> Rollout:
    tokens = np.arange(len(text))
    return Rollout(tokens, np.zeros(len(text)), np.zeros((0, 2)), np.zeros(0, int), tokens, text, finish)


def group(*texts: str, answer: str = "red") -> Group:
    return Group(Example("e", (), "what colour?", answer), tuple(rollout(t) for t in texts))


@pytest.fixture(scope="module")
def scorer():
    with Scorer([ACCURACY, FORMAT], GrpoSettings(), workers=1) as scorer:
        yield scorer


def test_rewards_weights_and_advantages(scorer):
    texts = (f"{SPAN}<answer>red</answer>", "<answer>red</answer>", f"{SPAN}<answer>blue</answer>", "nothing")
    (scored,) = scorer([group(*texts)])
    np.testing.assert_array_equal(scored.rewards["accuracy"], [1, 1, 0, 0])
    np.testing.assert_array_equal(scored.rewards["format"], [1, 0, 1, 0])
    np.testing.assert_array_equal(scored.total, [1.5, 1, 0.5, 0])
    expected = (scored.total - 0.75) / (np.std(scored.total, ddof=1) + 1e-4)
    np.testing.assert_allclose(scored.advantages, expected, rtol=1e-6)


def test_wrong_answers_are_distinct_readable_and_of_the_whole_group(scorer):
    texts = [
        "<answer>Blue</answer>", "<answer>blue </answer>", "<answer>RED</answer>", "<answer>green</answer>",
        "<answer>GREEN</answer>",
        "<answer>up</answer><answer>left</answer>", "yellow", "<answer> </answer>", "<answer>the red</answer>",
    ]  # fmt: skip
    (scored,) = scorer([group(*texts)])
    assert scored.wrong_answers == ("Blue", "green")


def test_equal_rewards_give_no_advantage_and_one_completion_is_not_compared(scorer):
    alike, single = scorer([group("a", "b", "c"), group("<answer>red</answer>")])
    assert not alike.advantages.any() and not single.advantages.any()
    metrics = reward_metrics([alike, single])
    assert metrics["reward/zero_variance_groups"] == 1.0
    assert metrics["reward/accuracy"] == 0.25 and metrics["rollout/answered_rate"] == 0.25


@pytest.mark.parametrize(("function", "word"), [("slow_on_wait", "wait"), ("dies_on_crash", "crash")])
def test_a_bad_reward_costs_its_sample_only(function, word):
    reward = RewardSettings(function=BAD + function, local=True, timeout_s=0.5)
    with Scorer([reward], GrpoSettings(), workers=1) as scorer:
        (scored,) = scorer([group("fine", word, "fine")])
        np.testing.assert_array_equal(scored.total, [1, 0, 1])
        assert scorer.failed == 1
        assert reward_metrics([scored], scorer.failed)["reward/failed"] == 1


@pytest.mark.parametrize(
    ("function", "words"),
    [("raises", "failed on all 2 completions"), ("too_few", "returned 1 values for 2"), ("infinite", "inf")],
)
def test_a_reward_that_does_not_work_stops_the_run(function, words):
    with (
        Scorer([RewardSettings(function=BAD + function, local=True)], GrpoSettings(), workers=1) as scorer,
        pytest.raises(UserError, match=words),
    ):
        scorer([group("a", "b")])


def test_an_empty_batch_is_an_error():
    with pytest.raises(UserError, match="no groups"):
        reward_metrics([])
