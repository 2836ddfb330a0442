"""One micro-batch: the tree's forwards, GRPO on text, evidence on latents. One call, one loss, one backward.

The loss is already divided by the global batch's counts: the gradient of a step is the *sum* over micro-batches and
ranks (an engine that averages over ranks wants it times their number). Source: paper, stage 2.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from realvr.config import EvidenceSettings, GrpoSettings, RLSettings
from realvr.families.base import TokenIds
from realvr.learner.batching import MicroBatch
from realvr.learner.statistics import Sums, mean_of, ratio
from realvr.objectives import evidence, grpo, routing
from realvr.policy.kv import Chunk
from realvr.policy.model import Policy, PolicyRoot, adapters_off
from realvr.policy.spans import State, ban_table
from realvr.policy.tree import AnswerBatch, CompletionBatch, First, Tree


@dataclass(frozen=True)
class StepSettings:
    """What a micro-batch needs to know. attention: `merged` (log-sum-exp) or `dense` (mask; the fall-back).

    recompute: checkpoint the first forward.
    """

    grpo: GrpoSettings
    evidence: EvidenceSettings
    k: int
    temperature: float
    attention: Literal["merged", "dense"] = "merged"
    recompute: bool = True

    @classmethod
    def of(cls, config: RLSettings) -> "StepSettings":
        """From the job's settings."""
        return cls(
            grpo=config.grpo,
            evidence=config.evidence,
            k=config.latent.k,
            temperature=config.rollout.temperature,
            recompute=config.model.gradient_checkpointing,
        )


@dataclass(frozen=True)
class Evidence:
    """What the evidence loss sees. z_RKd: latents of R = B rows, or B·G with `trajectory: saved`; rows_R bool."""

    z_RKd: torch.Tensor
    rows_R: torch.Tensor
    credit: routing.Credit


class LearnerModule(nn.Module):
    """The root module of the learner's engine: forward(micro-batch) → (loss, statistics).

    With grpo.beta > 0 the reference policy is `reference` (a second, frozen root), or with LoRA the root without its
    adapters. `weights_BK` holds the last micro-batch's evidence weights, for the table of samples.
    """

    def __init__(self, policy: Policy, settings: StepSettings, tokens: TokenIds, reference: PolicyRoot | None = None):
        super().__init__()
        self.policy, self.settings, self.tokens = policy, settings, tokens
        self.root = policy.root
        self.reference = None if reference is None else reference.requires_grad_(False)
        if settings.grpo.beta > 0 and reference is None and policy.settings.lora is None:
            raise ValueError("grpo.beta > 0 without LoRA needs a reference root")
        self.register_buffer("bans", ban_table(tokens, policy.vocabulary), persistent=False)
        self._squares: torch.Tensor | None = None
        self.weights_BK: torch.Tensor | None = None

    def take_gradient_squares(self) -> torch.Tensor:
        """float64 [2] since the last call: squared norms of what GRPO and the weighted evidence loss send back into the
        prompts' keys and values. Complete after the backward pass; sums over micro-batches and ranks, then square
        roots, compare the two losses. With `trajectory: saved` both come through the completions and the second is 0.
        """
        squares = self._squares if self._squares is not None else torch.zeros(2, dtype=torch.float64)
        self._squares = None
        return squares

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        """The micro-batch's share of the loss (a scalar with gradient) and its statistics."""
        if self._squares is None:
            self._squares = torch.zeros(2, dtype=torch.float64, device=batch.advantages_BG.device)
        tree = self._tree(self.root, batch, self._squares)
        first = tree.first(batch.completions)
        reference = self._reference_logprobs(batch)
        logprobs, entropy = self.logprobs(first.states_BGNd, batch.completions, self.root)
        loss, sums = grpo.policy_loss(
            logprobs,
            batch.advantages_BG,
            batch.completions.loss_BGN,
            batch.counts,
            self.settings.grpo,
            rollout_logprobs=batch.rollout_logprobs_BGN,
            reference_logprobs=reference,
        )
        statistics = _policy_statistics(loss, sums, entropy) | _drift(first, batch)
        if self.settings.evidence.weight > 0:
            value, more = self._evidence_loss(tree, first, batch)
            loss = loss + self.settings.evidence.weight * value
            statistics |= more
        return loss, statistics

    def _tree(self, root: PolicyRoot, batch: MicroBatch, squares: torch.Tensor | None = None) -> Tree:
        dense = self.settings.attention == "dense"
        recompute = self.settings.recompute
        return Tree(root, self.policy.family, batch.prompts, self.tokens.start, dense, recompute, squares)

    def logprobs(
        self, states: torch.Tensor, completions: CompletionBatch, root: PolicyRoot
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the loss tokens [B, G, N] (0 elsewhere) and their entropies, one a loss token [R].

        states [B, G, N, d] predict the tokens. The output layer sees loss tokens only; with none it sees one row, so
        that the graph and the module calls stay the same.
        """
        loss = completions.loss_BGN
        chosen = loss.flatten().nonzero()[:, 0]
        rows = chosen if len(chosen) else chosen.new_zeros(1)
        states_R = completions.states_BGN.flatten()[rows].clamp(max=State.SPENT)
        ids_R = completions.ids_BGN.flatten()[rows]
        values, entropy = root.lm_head(
            states.flatten(0, 2)[rows], ids_R, states_R, self.bans, self.settings.temperature
        )
        if not len(chosen):
            values, entropy = values * 0.0, entropy[:0]
        flat = values.new_zeros(loss.numel()).index_put((rows,), values)
        return flat.view(loss.shape), entropy

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor | None:
        """Reference log-probabilities [B, G, N] by one more first forward, when grpo.beta asks for them."""
        if self.settings.grpo.beta == 0:
            return None
        if batch.reference_logprobs_BGN is not None:
            return batch.reference_logprobs_BGN
        if self.reference is not None:
            return self._first_logprobs(self.reference, batch)
        with adapters_off(self.root):
            return self._first_logprobs(self.root, batch)

    def _first_logprobs(self, root: PolicyRoot, batch: MicroBatch) -> torch.Tensor:
        first = self._tree(root, batch).first(batch.completions)
        return self.logprobs(first.states_BGNd, batch.completions, root)[0]

    def _evidence_loss(self, tree: Tree, first: First, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        """Σ ℓ over the micro-batch's rows / rows of the global batch (λ not applied), and statistics."""
        settings = self.settings.evidence
        seen = self._saved(tree, first, batch) if settings.trajectory == "saved" else self._own(tree, first, batch)
        repeat = len(seen.rows_R) // len(batch.evidence_B)
        positive, negatives, present = (
            x.repeat_interleave(repeat, 0) for x in (batch.positive_BSd, batch.negatives_BMd, batch.negative_BM)
        )
        gaps = evidence.gaps(seen.z_RKd, positive, negatives, present)
        by_group = gaps.unflatten(0, (-1, repeat))[:, 0]
        weights, gamma = routing.weights(seen.credit, settings, by_group)
        losses = evidence.hinge(gaps, weights.repeat_interleave(repeat, 0), settings.margin, seen.rows_R)
        rows = seen.rows_R.unflatten(0, (-1, repeat))
        losses = losses.unflatten(0, (-1, repeat)).sum(1) / rows.sum(1).clamp(min=1)
        self.weights_BK = weights.detach()
        statistics = _evidence_statistics(gaps, gamma, losses, seen.rows_R, batch, settings)
        return losses.sum() / max(batch.evidence_rows, 1), statistics

    def _own(self, tree: Tree, first: First, batch: MicroBatch) -> Evidence:
        """Latents regenerated with the current weights, gradient through the recursion."""
        z, past = tree.recursion(first, self.settings.k)
        if self.settings.evidence.routing == "causal":
            return Evidence(z, batch.evidence_B, self._causal(tree, z, first.past, batch))
        return Evidence(z, batch.evidence_B, self._readout(tree, batch.answers, z[:, None, -1:], past))

    def _saved(self, tree: Tree, first: First, batch: MicroBatch) -> Evidence:
        """States of the replay one position before each saved latent, for every completion with a closed span; answers
        follow the latents of the group's first such completion. A group without one has no evidence row."""
        k = self.settings.k
        index = batch.span_BG[..., None] + torch.arange(k, device=batch.span_BG.device)
        z = torch.take_along_dim(first.states_BGNd, index[..., None], 2)
        saved = first.states_BGNd.new_zeros(*batch.completions.ids_BGN.shape, z.shape[-1])
        saved = saved.masked_scatter(batch.completions.latent_BGN[..., None], batch.completions.latents_Md.to(z.dtype))
        chosen = batch.closed_BG.int().argmax(1)
        rows = torch.arange(len(chosen), device=chosen.device)
        latents = torch.take_along_dim(saved[rows, chosen], index[rows, chosen][..., None], 1)
        if self.settings.evidence.routing == "causal":
            credit = self._causal(tree, latents, first.past, batch)
        else:
            credit = self._readout(tree, batch.answers, latents[:, None], first.past)
        mask = batch.closed_BG & batch.evidence_B[:, None]
        return Evidence(z.flatten(0, 1), mask.flatten(), credit)

    def _readout(
        self, tree: Tree, answers: AnswerBatch, latents: torch.Tensor, past: list[tuple[Chunk, Chunk]]
    ) -> routing.Credit:
        """Readouts of the right and the wrong answers; none for `uniform`, which reads nothing."""
        if self.settings.evidence.routing == "uniform":
            return routing.Credit(wrong_mask=answers.present_BA[:, 1:])
        gradient = not self.settings.evidence.detach_weights
        readout, _ = tree.answers(answers, latents, past, gradient)
        return routing.Credit(readout[:, 0], readout[:, 1:], answers.present_BA[:, 1:])

    def _causal(
        self, tree: Tree, z: torch.Tensor, past: list[tuple[Chunk, Chunk]], batch: MicroBatch
    ) -> routing.Credit:
        """Log-probability of the right answer's content minus the same with latent t replaced by the batch's mean
        latent of that slot (the other latents stay): K + 1 branches of one forward. z [B, K, d]."""
        if batch.latent_mean_Kd is None:
            raise ValueError("routing: causal needs the mean latents of the batch")
        k = self.settings.k
        variants = z[:, None].repeat(1, k + 1, 1, 1)
        slots = torch.arange(k, device=z.device)
        variants[:, slots + 1, slots] = batch.latent_mean_Kd.to(z.dtype)
        right = (x[:, :1].expand(-1, k + 1, *x.shape[2:]) for x in (batch.answers.ids_BAQ, batch.answers.content_BAQ))
        answers = AnswerBatch(*right, batch.answers.present_BA[:, :1].expand(-1, k + 1))
        gradient = not self.settings.evidence.detach_weights
        _, states = tree.answers(answers, variants, past, gradient)
        with torch.set_grad_enabled(gradient):
            spent = torch.full_like(answers.ids_BAQ, State.SPENT)
            asked = CompletionBatch(
                answers.ids_BAQ, answers.content_BAQ, states.flatten(0, 2)[:0], spent, answers.content_BAQ
            )
            totals = self.logprobs(states, asked, self.root)[0].sum(-1)
        return routing.Credit(drops=totals[:, :1] - totals[:, 1:], wrong_mask=batch.answers.present_BA[:, 1:])


def _policy_statistics(loss: torch.Tensor, sums: dict[str, torch.Tensor], entropy: torch.Tensor) -> Sums:
    tokens = sums["tokens"]
    statistics = {
        name: ratio(sums[key], tokens)
        for name, key in (("clip_fraction", "clipped"), ("tis_capped", "capped"), ("kl", "kl"), ("logprob_gap", "gap"))
    }
    statistics["grpo_loss_sum"] = loss.detach().double()
    statistics["loss_tokens_sum"] = tokens.detach().double()
    statistics["entropy"] = mean_of(entropy)
    statistics["logprob_gap_max"] = sums["gap_max"].detach().double()
    return statistics


def _drift(first: First, batch: MicroBatch) -> Sums:
    """How far the learner's states stand from the saved latents: 1 − cosine, and the largest difference of an element.

    The learner's state is the one before the latent, with the completion's own context and saved latents replayed.
    """
    completions = batch.completions
    own = evidence.wide(first.states_BGNd.detach()[completions.latent_BGN])
    saved = completions.latents_Md.to(own.dtype)
    largest = (own - saved).abs().amax() if len(saved) else own.new_zeros(())
    return {
        "latent_drift": mean_of(1 - F.cosine_similarity(own, saved, dim=-1)),
        "latent_drift_abs_max": largest.double(),
    }


def _evidence_statistics(
    gaps: torch.Tensor,
    gamma: torch.Tensor,
    losses: torch.Tensor,
    rows: torch.Tensor,
    batch: MicroBatch,
    settings: EvidenceSettings,
) -> Sums:
    groups = batch.evidence_B
    wrong = batch.answers.present_BA[:, 1:].any(1)
    every = rows[:, None].expand_as(gaps)
    statistics = {
        "evidence_loss": mean_of(losses, groups),
        "gamma_mass": mean_of(gamma.sum(-1), groups),
        "groups_with_wrong": mean_of(wrong.double(), batch.real_B),
        "distinct_negatives": mean_of(batch.negative_BM.sum(1).double(), groups),
        "gap": mean_of(gaps, every),
        "hinge_active": mean_of((gaps < settings.margin).double(), every),
    }
    statistics |= {f"gap_{t + 1}": mean_of(gaps[:, t], rows) for t in range(gaps.shape[1])}
    return statistics
