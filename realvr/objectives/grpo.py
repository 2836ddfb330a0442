"""GRPO on text tokens: advantages inside a group, the clipped loss, and its three normalisations.

Every loss here is a *sum over this micro-batch divided by counts of the global batch*, so that summing over
micro-batches and ranks gives the loss of the whole batch, however it was split. A data-parallel engine that averages
gradients over ranks therefore wants the loss times the number of ranks.
"""

from dataclasses import dataclass

import torch

from realvr.config import GrpoSettings


@dataclass(frozen=True)
class GlobalCounts:
    """What the loss is divided by, over all ranks and micro-batches of one optimizer step.

    completions: number of completions, those without a loss token included (as in TRL: they add 0 to the sum and 1 to
    the count). tokens: number of loss tokens. max_new_tokens: longest completion allowed (`dr_grpo`). Filler groups
    (mask all False, there to give every rank the same number of forwards) are counted in neither.
    """

    completions: int
    tokens: int
    max_new_tokens: int


def group_advantages(rewards: torch.Tensor, eps: float = 1e-4) -> torch.Tensor:
    """rewards [B, G] → advantages [B, G] = (r − mean) / (std + eps), std with ddof=1; a row of equal rewards gives 0.

    Raises ValueError for G < 2. Source: paper, stage 2.
    """
    if rewards.shape[-1] < 2:
        raise ValueError(f"a group needs at least 2 completions to be compared, got {rewards.shape[-1]}")
    centred = rewards - rewards.mean(-1, keepdim=True)
    advantages = centred / (rewards.std(-1, correction=1, keepdim=True) + eps)
    equal = (rewards == rewards[..., :1]).all(-1, keepdim=True)  # else rounding of the mean would leave a residue
    return advantages.masked_fill(equal, 0.0)


def policy_loss(
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    counts: GlobalCounts,
    settings: GrpoSettings,
    *,
    old_logprobs: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
    reference_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped policy loss of a micro-batch (paper, stage 2; PPO's surrogate with one advantage a completion).

    logprobs: [..., T] of the sampled tokens under the learner (bans and temperature applied), with gradient.
    advantages: [...]; mask: [..., T], True at loss tokens. What stands at masked positions is never read, so it may be
    infinite. old_logprobs: [..., T], the policy that the ratio and its clip refer to; None means the learner's own,
    detached (exact while a batch gets one optimizer step). rollout_logprobs: [..., T] as the engine gave them; they are
    required by `settings.old == "rollout"`, which multiplies each token's loss by min(exp(own − rollout), tis_cap), and
    otherwise only measured. reference_logprobs: [..., T], required by `settings.beta > 0`: k3 times the ratio, whose
    gradient is that of the reverse KL even where the ratio is 1 (k3's alone is not).

    Returns (loss, sums): a scalar, and detached sums over this micro-batch's loss tokens, to be added up over the
    global batch and divided by `tokens`: `tokens`, `clipped` (clip active), `capped` (importance weight cut), `kl`,
    `gap` (|own − rollout|); `gap_max` is combined by maximum.
    """
    mask = mask.bool()
    logprobs = logprobs.masked_fill(~mask, 0.0)
    own = logprobs.detach()
    old = own if old_logprobs is None else old_logprobs.detach().masked_fill(~mask, 0.0)
    advantage = advantages.detach().unsqueeze(-1)
    ratio = torch.exp(logprobs - old)
    low, high = 1 - settings.clip, 1 + settings.clip
    losses = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    zero = torch.zeros_like(own)
    gap, capped, kl = zero, zero, zero
    if rollout_logprobs is not None:
        gap = own - rollout_logprobs.detach().masked_fill(~mask, 0.0)
    if settings.old == "rollout":
        if rollout_logprobs is None:
            raise ValueError("grpo.old: rollout needs the rollout's log-probabilities")
        weight = gap.exp()
        capped = (weight > settings.tis_cap).to(own.dtype)
        losses = losses * weight.clamp(max=settings.tis_cap)
    if settings.beta > 0:
        if reference_logprobs is None:
            raise ValueError("grpo.beta > 0 needs the reference policy's log-probabilities")
        kl = k3(logprobs, reference_logprobs.detach().masked_fill(~mask, 0.0))
        losses = losses + settings.beta * ratio * kl
    clipped = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
    inside = mask.to(own.dtype)
    sums = {
        "tokens": inside.sum(),
        "clipped": (clipped * inside).sum(),
        "capped": (capped * inside).sum(),
        "kl": (kl.detach() * inside).sum(),
        "gap": (gap.abs() * inside).sum(),
        "gap_max": gap.abs().max() if gap.numel() else zero.sum(),
    }
    return normalise(losses, mask, counts, settings.normalisation), sums


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(policy ‖ reference): exp(ref − own) − (ref − own) − 1, elementwise, never negative."""
    difference = reference - logprobs
    return torch.exp(difference) - difference - 1


def normalise(losses: torch.Tensor, mask: torch.Tensor, counts: GlobalCounts, how: str) -> torch.Tensor:
    """Token losses [..., T] under mask [..., T] → this micro-batch's share of the global loss (a scalar).

    `grpo`: a completion's mean over its loss tokens, summed, over the global number of completions; `bnpo`: sum over
    the global number of loss tokens; `dr_grpo`: sum over (global completions · max_new_tokens). A count of 0 acts as 1.
    """
    losses = losses * mask
    if how == "grpo":
        means = losses.sum(-1) / mask.sum(-1).clamp(min=1)
        return means.sum() / max(counts.completions, 1)
    if how == "bnpo":
        return losses.sum() / max(counts.tokens, 1)
    if how == "dr_grpo":
        return losses.sum() / (max(counts.completions, 1) * counts.max_new_tokens)
    raise ValueError(f"unknown normalisation {how!r}")
