"""Interventions on latents in a fixed context: are they used, and does what they carry decide the answer?

Replacement: put something else in the place of the k most important latents and see what the right answer loses.
Transplant: answer image A's prompt with the latents of its edited twin B and see whose answer comes out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cosine_similarity

from launch.errors import UserError
from realvr.config import InterventionSettings
from realvr.data.examples import Example
from realvr.data.twins import Twin
from realvr.evaluate.probe import Context, Primed, Probe
from realvr.rewards.answers import plain


@dataclass(frozen=True)
class Readout:
    """Readout of B contexts for the right answer and, averaged, for the wrong ones: latents [B, K], image [B, P].

    logp: [B], log-probability of the right answer.
    """

    logp: torch.Tensor
    right: torch.Tensor
    wrong: torch.Tensor
    image_right: torch.Tensor
    image_wrong: torch.Tensor


@dataclass(frozen=True)
class Replaced:
    """One example. drops: by (order, replacement, k) the loss of the right answer's probability and log-probability."""

    id: str
    image: str  # examples about one image are one cluster
    logp: float
    cos_roi: float | None
    drops: dict[tuple[str, str, int], tuple[float, float]]


@dataclass(frozen=True)
class Transplanted:
    """One pair A (before), B (after). answers, margins: by number of B's latents k (0: A's own).

    A margin is log p(B's gold) − log p(A's gold); positive: B's answer is the likelier one.
    """

    id: str
    edit: str
    gold: tuple[str, str]
    answers: dict[int, str]
    margins: dict[int, float]

    def whose(self, k: int) -> str:
        """Whose answer came out with k of B's latents: `A`, `B` or `other`."""
        said = plain(self.answers[k])
        return "A" if said == plain(self.gold[0]) else "B" if said == plain(self.gold[1]) else "other"


@dataclass(frozen=True)
class Look:
    """What one example's latents hold and what reads them, for a picture.

    right, wrong: readout per latent [K]. similarity: cosine of the mean latent to each visual token of the first image,
    on its merged grid [rows, columns].
    """

    id: str
    answer: str
    right: np.ndarray
    wrong: np.ndarray
    similarity: np.ndarray


def batches(items: Sequence, size: int) -> Iterator[Sequence]:
    """Consecutive slices of at most `size`."""
    return (items[i : i + size] for i in range(0, len(items), size))


def own_latents(probe: Probe, examples: Sequence[Example], k: int, batch: int) -> torch.Tensor:
    """Free-running latents of every example right after prompt and start: float32 [n, K, d] on the CPU."""
    return torch.cat([probe.latents(probe.context(part), k).cpu() for part in batches(examples, batch)])


def likely_wrong(probe: Probe, primed: Primed, candidates: Sequence[Sequence[str]], n: int) -> list[list[str]]:
    """The n most probable of each example's candidates (strings other than its gold), most probable first."""
    for example, names in zip(primed.context.examples, candidates, strict=True):
        if not names:
            raise UserError(
                f"evaluation: no wrong answer is known for {example.id}; a contrast needs one: give the record "
                f"options, evaluate examples with different answers, or leave `contrast` out of interventions.orders"
            )
    widest = max(len(names) for names in candidates)
    logp = probe.branches(primed, [_padded(names, widest) for names in candidates]).logp
    return [
        [names[i] for i in row[: len(names)].argsort(descending=True)[:n].tolist()]
        for names, row in zip(candidates, logp, strict=True)
    ]


def read(probe: Probe, primed: Primed, right: Sequence[str], wrong: Sequence[Sequence[str]]) -> Readout:
    """Readout of the right answers and its mean over each example's wrong answers (zeros where there are none)."""
    widest = max(len(names) for names in wrong)
    rows = [[y, *_padded(names or [y], widest)] for y, names in zip(right, wrong, strict=True)]
    got = probe.branches(primed, rows, readout=True)
    real = torch.tensor([[i < len(names) for i in range(widest)] for names in wrong], device=got.logp.device)
    share = real / real.sum(1, keepdim=True).clamp(min=1)
    assert got.latents is not None and got.image is not None
    mean = [torch.einsum("bnk,bn->bk", part[:, 1:], share) for part in (got.latents, got.image)]
    return Readout(got.logp[:, 0], got.latents[:, 0], mean[0], got.image[:, 0], mean[1])


def ranking(readout: Readout, order: str, seeds: Sequence[int]) -> torch.Tensor:
    """Latents in the order in which they are replaced, int [B, K] (ties by position). Random rows are seeded each."""
    if order == "random":
        k = readout.right.shape[1]
        rows = [np.random.default_rng(seed).permutation(k) for seed in seeds]
        return torch.tensor(np.stack(rows), device=readout.right.device)
    score = readout.right - readout.wrong if order == "contrast" else readout.right
    return score.argsort(dim=1, descending=True, stable=True)


def replace_top(own: torch.Tensor, other: torch.Tensor, ranks: torch.Tensor, k: int) -> torch.Tensor:
    """`own` [B, K, d] with the first k latents of `ranks` taken from `other` (same slots)."""
    chosen = torch.zeros(own.shape[:2], dtype=torch.bool, device=own.device).scatter_(
        1, ranks[:, :k].to(own.device), True
    )
    return torch.where(chosen[..., None], other.to(own), own)


def donors(examples: Sequence[Example], seed: int) -> list[int]:
    """For each example another one of a different gold answer where there is one, never itself."""
    rng = np.random.default_rng(seed)
    golds = np.array([e.answer.casefold() for e in examples])
    chosen = []
    for i, gold in enumerate(golds):
        others = np.flatnonzero(golds != gold)
        if not len(others):
            others = np.delete(np.arange(len(golds)), i)
        if not len(others):
            raise UserError("evaluation: a donor's latents need at least two examples; raise interventions.n")
        chosen.append(int(rng.choice(others)))
    return chosen


def replacement(
    probe: Probe,
    examples: Sequence[Example],
    candidates: Sequence[Sequence[str]],
    k: int,
    cfg: InterventionSettings,
    seed: int,
) -> list[Replaced]:
    """Replace the top latents of every example in each order by each kind of stand-in.

    candidates: wrong answers of each example (needed by order `contrast`). k: latents in a span.
    """
    own = own_latents(probe, examples, k, cfg.batch)
    others = {"zero": torch.zeros_like(own), "mean": own.mean(0, keepdim=True).expand_as(own)}
    if "donor" in cfg.replacements:
        others["donor"] = own[donors(examples, seed)]
    found: list[Replaced] = []
    for part in batches(range(len(examples)), cfg.batch):
        context = probe.context([examples[i] for i in part])
        found += _replace_batch(probe, context, own[part.start : part.stop], others, candidates, part, cfg, seed)
    return found


def _replace_batch(
    probe: Probe,
    context: Context,
    own: torch.Tensor,
    others: dict[str, torch.Tensor],
    candidates: Sequence[Sequence[str]],
    part: range,
    cfg: InterventionSettings,
    seed: int,
) -> list[Replaced]:
    golds = [e.answer for e in context.examples]
    primed = probe.prime(context, own)
    wrong: list[list[str]] = [[] for _ in part]
    if "contrast" in cfg.orders:
        wrong = likely_wrong(probe, primed, [candidates[i] for i in part], cfg.wrong_answers)
    readout = read(probe, primed, golds, wrong)
    k_all = own.shape[1]
    drops: list[dict[tuple[str, str, int], tuple[float, float]]] = [{} for _ in part]
    for order in cfg.orders:
        ranks = ranking(readout, order, [seed + i for i in part])
        for name in cfg.replacements:
            other = others[name][part.start : part.stop]
            for k in (k for k in cfg.top if k <= k_all):
                changed = probe.prime(context, replace_top(own, other, ranks, k))
                logp = probe.branches(changed, [[y] for y in golds]).logp[:, 0]
                lost_p, lost = readout.logp.exp() - logp.exp(), readout.logp - logp
                for row, a, b in zip(drops, lost_p.tolist(), lost.tolist(), strict=True):
                    row[order, name, k] = (a, b)
    return [
        Replaced(e.id, e.images[0] if e.images else e.id, logp, cos_roi, row)
        for e, logp, cos_roi, row in zip(
            context.examples, readout.logp.tolist(), evidence_cosine(context, own), drops, strict=True
        )
    ]


def evidence_cosine(context: Context, latents: torch.Tensor) -> list[float | None]:
    """Mean cosine of an example's latents [K, d] to the mean visual token of its boxes; None without a box."""
    out: list[float | None] = []
    for prompt, example, features, z in zip(context.prompts, context.examples, context.features, latents, strict=True):
        if not example.boxes:
            out.append(None)
            continue
        evidence = features.float().cpu()[torch.cat(prompt.roi).unique()].mean(0)
        out.append(float(cosine_similarity(z, evidence[None], dim=-1).mean()))
    return out


def transplant(probe: Probe, twins: Sequence[Twin], k: int, cfg: InterventionSettings) -> list[Transplanted]:
    """Answer every `before` with the top latents of its `after` (order: contrast of the two golds), k by k."""
    steps = sorted({*(t for t in cfg.top if t < k), k})
    found: list[Transplanted] = []
    for part in batches(twins, cfg.batch):
        context = probe.context([t.before for t in part])
        own = probe.latents(context, k)
        theirs = probe.latents(probe.context([t.after for t in part]), k)
        golds = [[t.before.answer, t.after.answer] for t in part]
        primed = probe.prime(context, own)
        ranks = ranking(read(probe, primed, [a for a, _ in golds], [[b] for _, b in golds]), "contrast", ())
        answers: list[dict[int, str]] = [{} for _ in part]
        margins: list[dict[int, float]] = [{} for _ in part]
        for step in (0, *steps):
            changed = probe.prime(context, replace_top(own, theirs, ranks, step))
            logp = probe.branches(changed, golds).logp
            for i, text in enumerate(probe.answer(changed)):
                answers[i][step], margins[i][step] = text, float(logp[i, 1] - logp[i, 0])
        found += [
            Transplanted(t.before.id, t.edit, (t.before.answer, t.after.answer), a, m)
            for t, a, m in zip(part, answers, margins, strict=True)
        ]
    return found


def looks(probe: Probe, examples: Sequence[Example], wrong: Sequence[Sequence[str]], k: int, batch: int) -> list[Look]:
    """Readout and similarity maps of examples with an image; `wrong` holds each one's wrong answers."""
    found: list[Look] = []
    for part in batches(range(len(examples)), batch):
        context = probe.context([examples[i] for i in part])
        own = probe.latents(context, k)
        primed = probe.prime(context, own)
        readout = read(probe, primed, [examples[i].answer for i in part], [wrong[i] for i in part])
        for row, (i, said) in enumerate(zip(part, probe.answer(primed), strict=True)):
            grid = tuple(int(v) for v in context.prompts[row].grid_thw[0])
            h, w, m = probe.family.merged_grid(probe.model.config, grid)
            tokens = context.features[row][: (h // m) * (w // m)].float()
            similarity = cosine_similarity(own[row].mean(0)[None], tokens, dim=-1).view(h // m, w // m)
            right, other = readout.right[row].cpu().numpy(), readout.wrong[row].cpu().numpy()
            found.append(Look(examples[i].id, said, right, other, similarity.cpu().numpy()))
    return found


def _padded(names: Sequence[str], n: int) -> list[str]:
    return [names[i % len(names)] for i in range(n)]
