"""Scored groups → micro-batches of tensors: what a learner rank feeds to one forward.

A group stays whole: one row of a micro-batch. Normalisers are those of the global batch, so the loss of a batch is the
sum over micro-batches and ranks, however it was split. A rank that has fewer micro-batches than others fills up with
`filler` groups, which carry no loss and the same module calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from realvr.config import EvidenceSettings, LatentSettings
from realvr.data.examples import Example
from realvr.data.prompts import Prompt
from realvr.families.base import TokenIds, VisualFeatures
from realvr.objectives import prototypes
from realvr.objectives.grpo import GlobalCounts
from realvr.policy.spans import Parsed, State, parse
from realvr.policy.tree import AnswerBatch, CompletionBatch, PromptBatch
from realvr.rollout.records import Group, Rollout, ScoredGroup

OPEN, CLOSE = "<answer>", "</answer>"


@dataclass(frozen=True)
class AnswerBranch:
    """ids Long [Q]: END, then the tagged answer up to its last content token; content bool [Q]."""

    ids: torch.Tensor
    content: torch.Tensor


@dataclass(frozen=True)
class LearnerGroup:
    """One group as a learner rank holds it.

    parsed: the completions under the grammar. answers: the right answer's branch, then the distinct wrong ones'.
    positive: p⁺, float [d] or [K, d], None without an image. real: False for a filler.
    """

    scored: ScoredGroup
    prompt: Prompt
    features: VisualFeatures
    parsed: tuple[Parsed, ...]
    answers: tuple[AnswerBranch, ...]
    positive: torch.Tensor | None
    real: bool = True

    @property
    def evidence(self) -> bool:
        """Whether the group takes the evidence loss: it has an image."""
        return self.real and self.positive is not None

    @property
    def loss_tokens(self) -> int:
        """Tokens of GRPO's loss in all completions."""
        return sum(int(p.loss.sum()) for p in self.parsed) if self.real else 0

    @property
    def width(self) -> int:
        """Prompt tokens: groups of like width make micro-batches with little padding."""
        return len(self.prompt.input_ids)


@dataclass(frozen=True)
class MicroBatch:
    """B groups of G completions of up to N tokens; A answer branches; K latents; d the model's width.

    advantages_BG float; rollout_logprobs_BGN float, 0 where forced or padded; reference_logprobs_BGN the same of the
    reference policy, or None. positive_BSd: p⁺, S = 1 (shared) or K. negatives_BMd with negative_BM bool: p⁻ of other
    images. evidence_B bool: rows with evidence loss. real_B bool: rows that are no filler. closed_BG bool: completions
    with a closed span, whose latents start at span_BG Long (index of z_1; 0 elsewhere). latent_mean_Kd: mean saved
    latent of the global batch by slot, what `routing: causal` puts in a latent's place; None otherwise. counts,
    evidence_rows: normalisers over the global batch.
    """

    prompts: PromptBatch
    completions: CompletionBatch
    answers: AnswerBatch
    advantages_BG: torch.Tensor
    rollout_logprobs_BGN: torch.Tensor
    positive_BSd: torch.Tensor
    negatives_BMd: torch.Tensor
    negative_BM: torch.Tensor
    evidence_B: torch.Tensor
    real_B: torch.Tensor
    closed_BG: torch.Tensor
    span_BG: torch.Tensor
    counts: GlobalCounts
    evidence_rows: int
    latent_mean_Kd: torch.Tensor | None = None
    reference_logprobs_BGN: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same with every tensor on `device`."""
        return _to(self, device)


def _to(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple):
        return tuple(_to(v, device) for v in value)
    if is_dataclass(value):
        return replace(value, **{f.name: _to(getattr(value, f.name), device) for f in fields(value)})
    return value


def answer_branch(tokenizer: Any, text: str, tokens: TokenIds) -> AnswerBranch:
    """The branch of one answer: END + `<answer>` + stripped text + `</answer>`, no newline, no EOS.

    Content tokens are those that overlap the answer's characters, not the tags (one that holds characters of both
    counts). Tokens after the last content token are left out: nothing reads them.
    """
    text = text.strip()
    encoded = tokenizer(f"{OPEN}{text}{CLOSE}", add_special_tokens=False, return_offsets_mapping=True)
    first, last = len(OPEN), len(OPEN) + len(text)
    content = [start < last and end > first for start, end in encoded["offset_mapping"]]
    length = max((i + 1 for i, inside in enumerate(content) if inside), default=1)
    ids = torch.tensor([tokens.end, *encoded["input_ids"][:length]])
    return AnswerBranch(ids, torch.tensor([False, *content[:length]]))


def prepare_group(
    scored: ScoredGroup,
    prompt: Prompt,
    features: VisualFeatures,
    tokenizer: Any,
    tokens: TokenIds,
    latent: LatentSettings,
    evidence: EvidenceSettings,
) -> LearnerGroup:
    """Read one group: grammar, answer branches, p⁺. ValueError names the record whose completion breaks the grammar."""
    parsed = tuple(_parse(scored.group.example, i, r, tokens, latent) for i, r in enumerate(scored.group.rollouts))
    texts = (scored.group.example.answer, *scored.wrong_answers)
    answers = tuple(answer_branch(tokenizer, text, tokens) for text in texts)
    positive = None
    if len(features.embeds):
        boxes = [box.tolist() for box in prompt.roi]
        if evidence.prototype == "per_slot":
            positive = prototypes.per_slot(features.embeds, boxes, latent.k)
        else:
            positive = prototypes.positive(features.embeds, boxes)
    return LearnerGroup(scored, prompt, features, parsed, answers, positive)


def _parse(example: Example, number: int, rollout: Rollout, tokens: TokenIds, latent: LatentSettings) -> Parsed:
    try:
        parsed = parse(rollout.tokens, tokens, latent)
    except ValueError as error:
        raise ValueError(f"record {example.id}, completion {number}: {error}") from error
    if parsed.latent_positions.tolist() != np.asarray(rollout.latent_positions).tolist() or len(rollout.latents) != len(
        parsed.latent_positions
    ):
        raise ValueError(
            f"record {example.id}, completion {number}: latents stand at {parsed.latent_positions.tolist()}, "
            f"the rollout brings {len(rollout.latents)} for {np.asarray(rollout.latent_positions).tolist()}"
        )
    return parsed


def filler(tokens: TokenIds, width: int, dtype: torch.dtype = torch.float32) -> LearnerGroup:
    """The smallest group there is, without any loss: one prompt token, one completion token. width: the model's d."""
    ids = np.array([tokens.start])
    nothing = np.zeros(1, np.float32)
    no_latents = {"latents": np.zeros((0, width), np.float32), "latent_positions": np.zeros(0, np.int64)}
    rollout = Rollout(ids, nothing, **no_latents, versions=np.zeros(1, np.int32), text="", finish="length")
    scored = ScoredGroup(Group(Example("filler", (), "", ""), (rollout,)), {}, nothing, nothing)
    prompt = Prompt(
        torch.tensor([tokens.pad]), None, torch.zeros(0, 3, dtype=torch.long), torch.zeros(3, 1, dtype=torch.long), 1,
        torch.zeros(1, dtype=torch.bool), (), (),
    )  # fmt: skip
    parsed = Parsed(np.array([State.TEXT]), np.array([False]), ())
    branch = AnswerBranch(torch.tensor([tokens.end]), torch.tensor([False]))
    features = VisualFeatures(torch.zeros(0, width, dtype=dtype))
    return LearnerGroup(scored, prompt, features, (parsed,), (branch,), None, real=False)


def plan_micro_batches(widths: Sequence[int], per_batch: int) -> list[list[int]]:
    """Indices of groups in micro-batches of at most `per_batch`, longest prompts first, so that padding is little.

    Deterministic: equal widths keep their order. The first micro-batch is the largest, so memory fails early or never.
    """
    order = sorted(range(len(widths)), key=lambda i: (-widths[i], i))
    return [order[at : at + per_batch] for at in range(0, len(order), per_batch)]


def local_counts(groups: Sequence[LearnerGroup]) -> dict[str, int]:
    """This rank's completions, loss tokens and evidence rows; summed over ranks they are the normalisers."""
    real = [g for g in groups if g.real]
    return {
        "completions": sum(len(g.parsed) for g in real),
        "tokens": sum(g.loss_tokens for g in real),
        "evidence_rows": sum(g.evidence for g in real),
    }


def latent_sums(groups: Sequence[LearnerGroup], k: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum [K, d] and number [K] of this rank's saved latents by slot, float32: summed over ranks they give the mean."""
    total, number = torch.zeros(k, width), torch.zeros(k)
    for rollout in (r for g in groups if g.real for r in g.scored.group.rollouts):
        slots = torch.arange(len(rollout.latents)) % k
        total.index_add_(0, slots, torch.as_tensor(rollout.latents, dtype=torch.float32))
        number += torch.bincount(slots, minlength=k)
    return total, number


def build_micro_batch(
    groups: Sequence[LearnerGroup],
    counts: GlobalCounts,
    evidence_rows: int,
    tokens: TokenIds,
    *,
    negatives: tuple[torch.Tensor, torch.Tensor] | None = None,
    latent_mean: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pad B ≥ 1 groups into tensors on `device`.

    negatives: table [B, M, d] and mask [B, M] as `PrototypeBank.negatives` gives them for the groups' keys; None is
    the ablation without. latent_mean [K, d]: needed by `routing: causal`.
    """
    width = groups[0].features.embeds.shape[-1]
    positive = _positives(groups, width)
    if negatives is None:
        negatives = (torch.zeros(len(groups), 0, width), torch.zeros(len(groups), 0, dtype=torch.bool))
    completions = _completions(groups, tokens, width)
    number, length = completions.ids_BGN.shape[1:]
    closed, span = (
        torch.zeros(len(groups), number, dtype=torch.bool),
        torch.zeros(len(groups), number, dtype=torch.long),
    )
    advantages, logprobs = torch.zeros(len(groups), number), torch.zeros(len(groups), number, length)
    for b, group in enumerate(groups):
        for g, (rollout, parsed) in enumerate(zip(group.scored.group.rollouts, group.parsed, strict=True)):
            advantages[b, g] = float(group.scored.advantages[g])
            logprobs[b, g, : len(rollout.logprobs)] = torch.as_tensor(rollout.logprobs)
            if parsed.closed:
                closed[b, g], span[b, g] = True, parsed.spans[0].latents[0]
    return MicroBatch(
        prompts=_prompts(groups, tokens),
        completions=completions,
        answers=_answers(groups, tokens),
        advantages_BG=advantages,
        rollout_logprobs_BGN=logprobs,
        positive_BSd=positive,
        negatives_BMd=negatives[0],
        negative_BM=negatives[1],
        evidence_B=torch.tensor([g.evidence for g in groups]),
        real_B=torch.tensor([g.real for g in groups]),
        closed_BG=closed,
        span_BG=span,
        counts=counts,
        evidence_rows=evidence_rows,
        latent_mean_Kd=latent_mean,
    ).to(device)


def _prompts(groups: Sequence[LearnerGroup], tokens: TokenIds) -> PromptBatch:
    lengths = tuple(g.width for g in groups)
    shape = (len(groups), max(lengths))
    ids, visual = torch.full(shape, tokens.pad), torch.zeros(shape, dtype=torch.bool)
    positions = torch.zeros(3, *shape, dtype=torch.long)
    for b, group in enumerate(groups):
        at = shape[1] - lengths[b]
        ids[b, at:], visual[b, at:] = group.prompt.input_ids, group.prompt.visual_mask
        positions[:, b, at:] = group.prompt.positions
    following = torch.tensor([g.prompt.next_position for g in groups])
    return PromptBatch(ids, visual, positions, following, lengths, _features(groups))


def _features(groups: Sequence[LearnerGroup]) -> VisualFeatures:
    seen = [g.features for g in groups if len(g.features.embeds)]
    if not seen:
        return VisualFeatures(groups[0].features.embeds)
    levels = zip(*(f.deepstack for f in seen), strict=True)
    return VisualFeatures(torch.cat([f.embeds for f in seen]), tuple(torch.cat(level) for level in levels))


def _completions(groups: Sequence[LearnerGroup], tokens: TokenIds, width: int) -> CompletionBatch:
    number = max(len(g.parsed) for g in groups)
    length = max(len(r.tokens) for g in groups for r in g.scored.group.rollouts)
    shape = (len(groups), number, length)
    ids, states = torch.full(shape, tokens.pad), torch.full(shape, int(State.FORCED))
    latent, loss = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    latents = [torch.zeros(0, width)]
    for b, group in enumerate(groups):
        for g, (rollout, parsed) in enumerate(zip(group.scored.group.rollouts, group.parsed, strict=True)):
            n = len(rollout.tokens)
            ids[b, g, :n], states[b, g, :n] = torch.as_tensor(rollout.tokens), torch.as_tensor(parsed.states)
            loss[b, g, :n] = torch.as_tensor(parsed.loss) & group.real
            fed = parsed.latent_positions < length - 1
            latent[b, g, torch.as_tensor(parsed.latent_positions[fed])] = True
            latents.append(torch.as_tensor(np.asarray(rollout.latents)[fed]))
    return CompletionBatch(ids, latent, torch.cat(latents), states, loss)


def _answers(groups: Sequence[LearnerGroup], tokens: TokenIds) -> AnswerBatch:
    number = max(len(g.answers) for g in groups)
    length = max(len(a.ids) for g in groups for a in g.answers)
    ids = torch.full((len(groups), number, length), tokens.pad)
    content = torch.zeros(ids.shape, dtype=torch.bool)
    present = torch.zeros(ids.shape[:2], dtype=torch.bool)
    for b, group in enumerate(groups):
        for a, branch in enumerate(group.answers):
            ids[b, a, : len(branch.ids)], content[b, a, : len(branch.ids)] = branch.ids, branch.content
            present[b, a] = True
    return AnswerBatch(ids, content, present)


def _positives(groups: Sequence[LearnerGroup], width: int) -> torch.Tensor:
    known = [g.positive for g in groups if g.positive is not None]
    slots = 1 if not known or known[0].dim() == 1 else len(known[0])
    table = torch.zeros(len(groups), slots, width, dtype=known[0].dtype if known else torch.float32)
    for b, group in enumerate(groups):
        if group.positive is not None:
            table[b] = group.positive
    return table
