"""From groups to scored groups: rewards, advantages, and the wrong answers that the evidence is contrasted with."""

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch

from launch.errors import UserError
from realvr.config import GrpoSettings, RewardSettings
from realvr.families.base import END, START
from realvr.objectives.grpo import group_advantages
from realvr.rewards.answers import block
from realvr.rewards.rewards import Reward, check, load_rewards
from realvr.rewards.workers import Call, Outcome, WorkerPool
from realvr.rollout.records import Group, ScoredGroup

log = logging.getLogger(__name__)
ACCURACY = "realvr.rewards.rewards.accuracy"

METRICS = {
    "reward/mean": "mean over completions of the weighted sum of rewards",
    "reward/<name>": "mean over completions of one reward function (accuracy, format, …), before its weight",
    "reward/zero_variance_groups": "share of groups whose completions all have the same reward (no GRPO gradient)",
    "reward/failed": "completions whose reward function raised, crashed or was too slow; they got 0",
    "rollout/closed_span_rate": "share of completions with a latent span that was opened and closed",
    "rollout/open_span_rate": "share of completions that opened a latent span",
    "rollout/answered_rate": "share of completions with exactly one readable answer block",
    "rollout/completion_tokens": "mean tokens of a completion, latents and EOS counted",
    "rollout/truncated_rate": "share of completions cut at the longest allowed length",
    "evidence/groups_with_wrong_answers": "share of groups with at least one readable wrong answer",
    "evidence/wrong_answers": "mean number of distinct wrong answers of a group",
}
"""Names and meanings of what `reward_metrics` gives."""


class Scorer:
    """Scores groups by the reward functions of the configuration, which run in processes that can be killed.

    A completion whose reward raises, crashes or is too slow gets 0 and is counted in `failed` (of the last batch); the
    step goes on. A function that fails on every completion of a batch stops the run: nothing would be learnt.
    """

    def __init__(self, rewards: Sequence[RewardSettings], grpo: GrpoSettings, workers: int = 2):
        self.rewards = load_rewards(rewards)
        # Wrong answers are those that accuracy rejects, also where the configuration does not reward it.
        if any(r.path == ACCURACY for r in self.rewards):
            self._judges = self.rewards
        else:
            self._judges = [*self.rewards, *load_rewards([RewardSettings(function=ACCURACY, weight=0.0)])]
        self.grpo = grpo
        self.failed = 0
        self._pool = WorkerPool(workers)

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def __call__(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """One ScoredGroup a group, in order. Raises UserError for a reward function that does not work at all."""
        values = {reward.path: self._values(reward, groups) for reward in self._judges}
        right = values[ACCURACY]
        self.failed = sum(int(np.isnan(v).sum()) for r in self.rewards for v in values[r.path])
        scored = []
        for i, group in enumerate(groups):
            named = {r.name: np.nan_to_num(values[r.path][i]).astype(np.float32) for r in self.rewards}
            total = sum(r.weight * np.nan_to_num(values[r.path][i]) for r in self.rewards)
            advantages = torch.zeros(len(total), dtype=torch.float64)
            if len(total) > 1:  # validation decodes one completion, which is compared with nothing
                advantages = group_advantages(torch.from_numpy(total)[None], self.grpo.std_eps)[0]
            scored.append(
                ScoredGroup(
                    group=group,
                    rewards=named,
                    total=total.astype(np.float32),
                    advantages=advantages.numpy().astype(np.float32),
                    wrong_answers=wrong_answers(group, right[i]),
                )
            )
        return scored

    def _values(self, reward: Reward, groups: Sequence[Group]) -> list[np.ndarray]:
        """float64 [G] a group; NaN where the function failed: a failed group is tried again one by one."""
        whole = self._pool.run([Call(reward.path, columns(g), reward.timeout_s) for g in groups])
        single = [(i, j) for i, o in enumerate(whole) if not o.ok for j in range(len(groups[i].rollouts))]
        calls = [Call(reward.path, columns(groups[i], slice(j, j + 1)), reward.timeout_s) for i, j in single]
        parts = dict(zip(single, self._pool.run(calls), strict=True))
        self._complain(reward, parts, sum(len(g.rollouts) for g in groups))
        values = []
        for i, (group, outcome) in enumerate(zip(groups, whole, strict=True)):
            size = len(group.rollouts)
            if outcome.ok:
                row = check(reward, outcome.value, size)
            else:
                mine = [parts[i, j] for j in range(size)]
                row = [check(reward, o.value, 1)[0] if o.ok else np.nan for o in mine]
            values.append(np.array(row, dtype=np.float64))
        return values

    def _complain(self, reward: Reward, parts: dict[tuple[int, int], Outcome], number: int) -> None:
        bad = [o for o in parts.values() if not o.ok]
        if not bad:
            return
        reason = f"{bad[0].status}: {bad[0].reason}"
        if len(bad) == number:
            raise UserError(
                f"rewards: {reward.path} failed on all {number} completions of a batch ({reason}); mend the function "
                f"or raise its timeout_s (now {reward.timeout_s:g})"
            )
        log.warning(
            "reward %s failed on %d of %d completions, which get 0; first: %s", reward.name, len(bad), number, reason
        )


def columns(group: Group, part: slice = slice(None)) -> dict[str, Any]:
    """Keyword arguments of a reward function for (part of) a group: lists of equal length, as TRL passes them."""
    example, rollouts = group.example, group.rollouts[part]
    shared = {
        "prompts": example.question,
        "answer": example.answer,
        "kind": example.kind,
        "options": example.options,
        "id": example.id,
        "images": example.images,
        "source": example.source,
        "meta": example.meta,
    }
    own = {
        "completions": [r.text for r in rollouts],
        "completion_ids": [r.tokens.tolist() for r in rollouts],
        "finish": [r.finish for r in rollouts],
    }
    return own | {name: [value] * len(rollouts) for name, value in shared.items()}


def wrong_answers(group: Group, accuracy: np.ndarray) -> tuple[str, ...]:
    """Distinct wrong answers of a group, in order of first appearance; accuracy: [G], NaN where grading failed.

    An answer counts if it can be read (exactly one block, not blank) and was graded wrong. Answers that differ only in
    case or outer white space are one; the first spelling stands for them.
    """
    seen = {group.example.answer.strip().casefold()}
    wrong = []
    for rollout, value in zip(group.rollouts, accuracy, strict=True):
        answer = block(rollout.text)
        if value == 0 and answer is not None and answer.casefold() not in seen:
            seen.add(answer.casefold())
            wrong.append(answer)
    return tuple(wrong)


def has_closed_span(text: str) -> bool:
    """Whether a completion opened a latent span and closed it."""
    return END in text.partition(START)[2]


def reward_metrics(scored: Sequence[ScoredGroup], failed: int = 0) -> dict[str, float]:
    """Figures of a scored batch for the log, by the names of `METRICS`. UserError for an empty batch."""
    if not scored:
        raise UserError("a batch has no groups: nothing to learn from; check data.train and max_prompt_tokens")
    rollouts = [r for s in scored for r in s.group.rollouts]
    share = lambda flags: float(np.mean([bool(f) for f in flags]))  # noqa: E731
    metrics = {"reward/mean": float(np.mean(np.concatenate([s.total for s in scored])))}
    for name in scored[0].rewards:
        metrics[f"reward/{name}"] = float(np.mean(np.concatenate([s.rewards[name] for s in scored])))
    return metrics | {
        "reward/zero_variance_groups": share((s.total == s.total[0]).all() for s in scored),
        "reward/failed": float(failed),
        "rollout/closed_span_rate": share(has_closed_span(r.text) for r in rollouts),
        "rollout/open_span_rate": share(START in r.text for r in rollouts),
        "rollout/answered_rate": share(block(r.text) is not None for r in rollouts),
        "rollout/completion_tokens": float(np.mean([len(r.tokens) for r in rollouts])),
        "rollout/truncated_rate": share(r.finish == "length" for r in rollouts),
        "evidence/groups_with_wrong_answers": share(s.wrong_answers for s in scored),
        "evidence/wrong_answers": float(np.mean([len(s.wrong_answers) for s in scored])),
    }
