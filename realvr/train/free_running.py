"""What a stage-1 model does on its own: latents fed back, greedy text; and whether the latents matter.

All forwards go through the policy root under a KV view, in the same number whatever the batch holds, so that sharded
ranks can run it side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from realvr.config import LatentSettings
from realvr.families.base import Family, TokenIds
from realvr.policy.kv import KVView, Plan, Segment, append
from realvr.policy.model import PolicyRoot
from realvr.policy.spans import State
from realvr.policy.tree import AnswerBatch, CompletionBatch, PromptBatch, Tree


@dataclass(frozen=True)
class FreeBatch:
    """Prompts of B validation examples and the right answer's branch of each (one branch: A = 1)."""

    prompts: PromptBatch
    answers: AnswerBatch


@dataclass(frozen=True)
class FreeRun:
    """latents_BKd: the model's own after prompt and start. right_B, swapped_B: probability of the right answer after
    them, and after another example's. tokens_BN: greedy completion, pad after its end.
    """

    latents_BKd: torch.Tensor
    right_B: torch.Tensor
    swapped_B: torch.Tensor
    tokens_BN: torch.Tensor


@torch.no_grad()
def free_run(
    root: PolicyRoot,
    family: Family,
    batch: FreeBatch,
    tokens: TokenIds,
    latent: LatentSettings,
    bans: torch.Tensor,
    max_new_tokens: int,
) -> FreeRun:
    """1 + K forwards for the latents, one for the answers, `max_new_tokens` for the completion."""
    tree = Tree(root, family, batch.prompts, tokens.start)
    rows = len(batch.prompts.lengths)
    empty = torch.zeros(rows, 1, 1, dtype=torch.bool, device=batch.prompts.ids_BP.device)
    width = batch.prompts.features.embeds.shape[-1]
    one = CompletionBatch(
        torch.full_like(empty, tokens.start, dtype=torch.long),
        empty,
        batch.prompts.features.embeds.new_zeros(0, width),
        torch.zeros_like(empty, dtype=torch.long),
        empty,
    )
    first = tree.first(one)
    latents, _ = tree.recursion(first, latent.k)
    both = torch.stack([latents, latents.roll(1, 0)], 1)
    answers = AnswerBatch(*(x.expand(-1, 2, -1) for x in (batch.answers.ids_BAQ, batch.answers.content_BAQ)), None)
    _, states = tree.answers(answers, both, first.past)
    right = _probability(root, answers, states, bans)
    trunk = [(prompt,) for prompt, _ in first.past]
    completion = _greedy(root, tree, first.states_BGNd[:, 0], trunk, tokens, latent, bans, max_new_tokens)
    return FreeRun(latents.float(), right[:, 0], right[:, 1], completion)


def _probability(root: PolicyRoot, answers: AnswerBatch, states: torch.Tensor, bans: torch.Tensor) -> torch.Tensor:
    """Probability [B, A] of each branch's content tokens; states [B, A, Q, d] predict them."""
    chosen = answers.content_BAQ.nonzero(as_tuple=True)
    spent = torch.full_like(answers.ids_BAQ[chosen], int(State.SPENT))
    logprobs, _ = root.lm_head(states[chosen], answers.ids_BAQ[chosen], spent, bans, 1.0)
    total = logprobs.new_zeros(answers.ids_BAQ.shape).index_put(chosen, logprobs)
    return total.sum(-1).exp()


def _greedy(
    root: PolicyRoot,
    tree: Tree,
    state: torch.Tensor,
    trunk: Sequence[tuple],
    tokens: TokenIds,
    latent: LatentSettings,
    bans: torch.Tensor,
    limit: int,
) -> torch.Tensor:
    """Greedy completion [B, limit] under the token grammar. state [B, 1, d] predicts the first token."""
    rows, device = state.shape[0], state.device
    phase = torch.full((rows,), int(State.TEXT), device=device)
    left = torch.zeros(rows, dtype=torch.long, device=device)  # latents still to come
    over = torch.zeros(rows, dtype=torch.bool, device=device)
    eos = torch.tensor(tokens.eos, device=device)
    written, past = [], trunk
    for t in range(limit):
        chosen, _ = root.lm_head(state[:, 0], None, phase, bans, 1.0)
        if t == 0 and latent.open == "forced":
            chosen = torch.full_like(chosen, tokens.start)
        fed_back = left > 0
        if latent.close == "forced":
            chosen = chosen.where((phase != State.AWAIT) | fed_back, tokens.end)
        chosen = chosen.masked_fill(fed_back, tokens.latent).masked_fill(over, tokens.pad)
        written.append(chosen)
        embeds = torch.where((fed_back & ~over)[:, None, None], state, root.embed(chosen)[:, None].to(state.dtype))
        left = torch.where(chosen == tokens.start, latent.k, left - fed_back.long())
        phase = phase.masked_fill(chosen == tokens.start, int(State.AWAIT))
        phase = phase.masked_fill(chosen == tokens.end, int(State.SPENT))
        over = over | torch.isin(chosen, eos)
        view = KVView(Plan(tree.starts, 0, (Segment(1, 1, keep=True),)), past)
        positions = (tree.prompts.next_B[None, :, None] + t).expand(3, -1, -1)
        state = root.run(embeds, positions, view)
        past = [
            (chunks[0], append(chunks[1], new) if len(chunks) > 1 else new)
            for chunks, (new,) in zip(past, view.new, strict=True)
        ]
    return torch.stack(written, 1)
