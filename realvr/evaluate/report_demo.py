"""What the demo's report says beforehand about its four arms, and what one small run can and cannot show."""

from collections.abc import Sequence

import numpy as np

from realvr.evaluate.report_data import Arm, Evaluation, Expectation, load_evaluation, read_metrics

BASE, SFT, RL, REALVR = "base", "LVR-SFT", "LVR-RL", "ReaLVR"
BASE_ACCURACY, REWARD_RISE, DISTANCE_RATIO, DROP_GAIN, ALIGNMENT = 0.84, 0.08, 1.5, 0.03, 0.3
_TOP4 = "drop_p/contrast/donor/4"


def expectations(arms: Sequence[Arm]) -> tuple[Expectation, ...]:
    """The demo's expectations, checked on what its arms measured; what was not measured stays open."""
    found = {arm.name: load_evaluation(arm.name, arm.evaluation) for arm in arms}
    rises = {arm.name: _rise(arm) for arm in arms}
    base, sft, rl, realvr = (found.get(name) for name in (BASE, SFT, RL, REALVR))
    near, far = _value(realvr, "distance_irrelevant"), _value(realvr, "distance_relevant")
    less, more = _value(rl, _TOP4), _value(realvr, _TOP4)
    aligned = f"After stage 1, latents point to the evidence (cosine at least {ALIGNMENT})"
    rise = "the reward rises by at least"
    moved = f"{REALVR}: latents move {DISTANCE_RATIO} times further under relevant edits than under irrelevant ones"
    used = f"Replacing four latents costs {REALVR} {DROP_GAIN} more probability than {RL}"
    return (
        _at_least(f"The base model's accuracy is at least {BASE_ACCURACY}", _value(base, "accuracy"), BASE_ACCURACY),
        _at_least(aligned, _value(sft, "cos_roi"), ALIGNMENT),
        *(_at_least(f"{name}: {rise} {REWARD_RISE}", rises.get(name), REWARD_RISE) for name in (RL, REALVR)),
        _pair(moved, far, near, None if far is None or near is None else far > DISTANCE_RATIO * near),
        _pair(used, more, less, None if more is None or less is None else more > less + DROP_GAIN),
    )


SMOKE = """
This was a smoke run: a few steps of every stage. It shows that every part works together; its numbers mean nothing.
"""
ONE_RUN = """
This is one run of one seed on a generated world, with a model of 0.3 million parameters and learning rates to match.
It shows that the whole system works: rollouts with latents, rewards, evidence, sharded learners, weight sync,
checkpoints, evaluation. It is no evidence for a claim about the method, and the intervals above do not cover what
another seed would give.
"""
TRIALS = """
In trials of this recipe in plain PyTorch over five seeds, the ratio of latent distance under relevant and irrelevant
edits was higher with the evidence loss every time, and replacing latents cost the ReaLVR arm more than the GRPO arm
on three seeds of five. So a run in which an expectation fails is no surprise, and one in which all hold is no proof.
"""
NOT_SHOWN = """
Not to be expected here: a gain in accuracy over GRPO at equal compute (a longer GRPO run catches up), a benefit of
contrastive over uniform routing at this size, or a latent model that beats the base model. Stage 1 is short on
purpose: after a long one latents matter even without the evidence loss. In so few steps the reward rises mostly by
format.
"""
MEASURES = """
Latent distance alone does not say that latents are used: replacement and transplant ask that. A cosine between latents
and evidence says even less.
"""


def limits(smoke: bool = False) -> tuple[str, ...]:
    """Paragraphs for the end of the report."""
    return tuple(" ".join(text.split()) for text in (SMOKE if smoke else ONE_RUN, TRIALS, NOT_SHOWN, MEASURES))


def _rise(arm: Arm) -> float | None:
    """Mean reward of the last steps minus that of the first three; None without a log of at least six steps."""
    rewards = [line["reward/mean"] for line in read_metrics(arm.metrics) if line.get("reward/mean") is not None]
    if len(rewards) < 6:
        return None
    return float(np.mean(rewards[-min(5, len(rewards) // 2) :]) - np.mean(rewards[:3]))


def _value(evaluation: Evaluation | None, metric: str) -> float | None:
    estimate = evaluation.metrics.get(metric) if evaluation else None
    return None if estimate is None else estimate.value


def _at_least(text: str, value: float | None, least: float) -> Expectation:
    return Expectation(text, "–" if value is None else f"{value:.3f}", None if value is None else value >= least)


def _pair(text: str, first: float | None, second: float | None, met: bool | None) -> Expectation:
    return Expectation(text, "–" if met is None else f"{first:.3f} and {second:.3f}", met)
