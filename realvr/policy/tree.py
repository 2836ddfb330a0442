"""A group computed once: the shared-prefix tree of a prompt, its completions, the regenerated latents and answers.

    prompt ─┬─ completion 1 … G          first forward, with gradient
            └─ START z_1 … z_K ─┬─ END right answer
              first forward,    ├─ END wrong answer 1
              then K−1 steps    └─ …     last forward, each branch begins with z_K

Rows of a micro-batch are groups: prompts are left-padded, everything else is right-padded. Whatever the groups hold,
the number and order of module calls is the same (first, K − 1 steps, answers), as ZeRO-3 needs. Source: paper, stage 2.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from realvr.families.base import Family, VisualFeatures
from realvr.policy.kv import Chunk, KVView, Plan, Readout, Segment, append, detached
from realvr.policy.model import PolicyRoot


@dataclass(frozen=True)
class PromptBatch:
    """Prompts, left-padded. ids_BP Long; visual_BP bool, image tokens; positions_3BP Long; next_B Long, the position
    after the prompt; lengths: unpadded lengths; features: of all image tokens, row after row.
    """

    ids_BP: torch.Tensor
    visual_BP: torch.Tensor
    positions_3BP: torch.Tensor
    next_B: torch.Tensor
    lengths: tuple[int, ...]
    features: VisualFeatures


@dataclass(frozen=True)
class CompletionBatch:
    """Completions, right-padded. ids_BGN Long; latent_BGN bool, where a saved latent is fed (never in the last column,
    which is not fed); latents_Md: those latents in row-major order; states_BGN Long, each token's State (row of the ban
    table); loss_BGN bool, loss tokens.
    """

    ids_BGN: torch.Tensor
    latent_BGN: torch.Tensor
    latents_Md: torch.Tensor
    states_BGN: torch.Tensor
    loss_BGN: torch.Tensor


@dataclass(frozen=True)
class AnswerBatch:
    """Answer branches, right-padded: branch 0 is the right answer, the others are the distinct wrong ones. ids_BAQ
    Long, END and then the tagged answer; content_BAQ bool, tokens of the answer itself; present_BA bool.
    """

    ids_BAQ: torch.Tensor
    content_BAQ: torch.Tensor
    present_BA: torch.Tensor


@dataclass(frozen=True)
class First:
    """What the first forward leaves: states_BGNd, the state that predicts each completion token (the last prompt row
    for the first token); start_B1d, the state at `<|lvr_start|>`, which is z_1; past: trunk and START chunk by layer.
    """

    states_BGNd: torch.Tensor
    start_B1d: torch.Tensor
    past: list[tuple[Chunk, Chunk]]


class Tree:
    """The forwards over one micro-batch of B groups. `start_id` is `<|lvr_start|>`'s.

    dense: attention by dense masks instead of merged parts. recompute: checkpoint the first forward. squares_2: float
    [2] that gathers, in the backward pass, the squared gradient norms that completions and latents send into the
    prompts' keys and values.
    """

    def __init__(
        self,
        root: PolicyRoot,
        family: Family,
        prompts: PromptBatch,
        start_id: int,
        dense: bool = False,
        recompute: bool = False,
        squares_2: torch.Tensor | None = None,
    ):
        self.root, self.family, self.prompts, self.start_id = root, family, prompts, start_id
        self.dense, self.recompute = dense, recompute
        self.squares = (None, None) if squares_2 is None else (squares_2[:1], squares_2[1:])
        width = prompts.ids_BP.shape[1]
        self.starts = tuple(width - n for n in prompts.lengths)

    def _positions(self, offsets: torch.Tensor) -> torch.Tensor:
        """Positions [3, B, S] of tokens that stand `offsets` [S] after the prompt."""
        return (self.prompts.next_B[:, None] + offsets[None]).expand(3, -1, -1)

    def _plan(self, *segments: Segment, trunk: int = 0, readout: Readout | None = None, dense: bool = False) -> Plan:
        return Plan(self.starts, trunk, segments, readout, self.dense or dense)

    def first(self, completions: CompletionBatch) -> First:
        """One forward over prompts, START and completions; saved latents are constant input embeddings."""
        prompts = self.prompts
        batch, width = prompts.ids_BP.shape
        number, length = completions.ids_BGN.shape[1:]
        fed = max(length - 1, 1)  # the last token predicts nothing
        ids = completions.ids_BGN[:, :, :fed].reshape(batch, -1)
        start = prompts.ids_BP.new_full((batch, 1), self.start_id)
        embeds = self.root.embed(torch.cat([prompts.ids_BP, start, ids], 1))
        visual = _tail(prompts.visual_BP, embeds.shape[1] - width)
        embeds = _place(embeds, visual, prompts.features.embeds)
        latent = completions.latent_BGN[:, :, :fed].flatten(1)
        latent = torch.cat([latent.new_zeros(batch, width + 1), latent], 1)
        embeds = _place(embeds, latent, completions.latents_Md)
        branch = torch.arange(fed, device=ids.device).repeat(number)
        after = self._positions(torch.cat([branch.new_zeros(1), branch]))
        positions = torch.cat([prompts.positions_3BP, after], 2)
        view = KVView(
            self._plan(
                Segment(1, 1, keep=True, gradient_squares=self.squares[1]),
                Segment(number, fed, gradient_squares=self.squares[0]),
                trunk=width,
            ),
            [()] * self.root.layers,
        )
        extra = self.family.language_inputs(prompts.features, visual)
        states = self.root.run(embeds, positions, view, self.recompute, **extra)
        last = states[:, width - 1, None, None].expand(-1, number, -1, -1)
        rows = states[:, width + 1 :].unflatten(1, (number, fed))[:, :, : length - 1]
        return First(torch.cat([last, rows], 2), states[:, width : width + 1], view.new)

    def recursion(self, first: First, k: int) -> tuple[torch.Tensor, list[tuple[Chunk, Chunk]]]:
        """z_1 … z_K [B, K, d] with gradient through the recursion, and the KV of START, z_1 … z_{K−1} by layer."""
        state, past, latents = first.start_B1d, first.past, [first.start_B1d]
        segment = Segment(1, 1, keep=True, gradient_squares=self.squares[1])
        for t in range(1, k):
            view = KVView(self._plan(segment), past)
            state = self.root.run(state, self._positions(torch.tensor([t], device=state.device)), view)
            past = [(trunk, append(z, new)) for (trunk, z), (new,) in zip(past, view.new, strict=True)]
            latents.append(state)
        return torch.cat(latents, 1), past

    def answers(
        self, answers: AnswerBatch, latents: torch.Tensor, past: list[tuple[Chunk, Chunk]], gradient: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward of the answer branches after `past`: readouts [B, A, K] and the states [B, A, Q, d].

        latents: [B, A or 1, m, d], what each branch feeds before END: z_K alone where `past` holds the other latents,
        all K where it holds START only. The state at q is the one that predicts token q of a branch (its END first).
        Without `gradient` nothing here is differentiable.
        """
        batch, number, width = answers.ids_BAQ.shape
        own = latents.shape[2]
        before = past[0][1][0].shape[2] - 1  # latents in the past
        with nullcontext() if gradient else torch.no_grad():
            past = past if gradient else detached(past)
            embeds = self.root.embed(answers.ids_BAQ)
            embeds = torch.cat([latents.to(embeds.dtype).expand(-1, number, -1, -1), embeds], 2)
            offsets = torch.arange(1 + before, 1 + before + own + width, device=embeds.device).repeat(number)
            rows = torch.cat([answers.content_BAQ.new_zeros(batch, number, own), answers.content_BAQ], 2)
            segment = Segment(number, own + width)
            view = KVView(self._plan(segment, readout=Readout(rows, own), dense=gradient), past)
            states = self.root.run(embeds.flatten(1, 2), self._positions(offsets), view)
            states = states.unflatten(1, (number, own + width))[:, :, own - 1 : -1]
            return view.readout(), states


def _tail(mask: torch.Tensor, more: int) -> torch.Tensor:
    """mask [B, T] with `more` columns of False after it."""
    return torch.cat([mask, mask.new_zeros(mask.shape[0], more)], 1)


def _place(embeds: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """embeds [B, S, d] with `values` [M, d] at the M True places of mask [B, S]."""
    return embeds.masked_scatter(mask[..., None], values.to(embeds.dtype))
