"""Stage-2 losses against loops in float64; weighting and cap against autograd on separate losses, 1 and 2 ranks."""

import math

import pytest
import torch
from torch import nn

from gafu.config import PreferenceSettings
from gafu.preference import (
    SplitGradients,
    answer_ce,
    at_knots,
    donor_differs,
    donors,
    draw_mask,
    forward_kl,
    mask_probability,
    mask_understanding,
    preference,
)
from launch.errors import UserError
from tests.gafu.ranks import on_ranks

PAPER = PreferenceSettings()


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _same(ours: torch.Tensor, theirs: torch.Tensor, *inputs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs))


def test_donors():
    assert donors(2).tolist() == [1, 0] and donors(3).tolist() == [1, 2, 0]
    assert donors(5).tolist() == [2, 3, 4, 0, 1] and donors(6).tolist() == [3, 4, 5, 0, 1, 2]
    assert donor_differs(["a", "b", "a", "c"], donors(4)).tolist() == [False, True, False, True]
    for n in (0, 1):
        with pytest.raises(UserError, match=f"{n} sample.* at least 2; raise the batch size"):
            donors(n)


def test_schedules_at_their_knots():
    weights = [at_knots(step, PAPER.kl_knots) for step in (0, 1250, 2500, 3125, 3750, 4999)]
    assert weights == [1.0, 0.625, 0.25, 0.125, 0.0, 0.0] and at_knots(7, ()) == 0
    found = [mask_probability(step, PAPER) for step in (0, 1249, 1250, 2499, 2500, 3749, 3750, 4999, 9999)]
    assert found == [0.8, 0.8, 0.5, 0.5, 0.2, 0.2, 0, 0, 0]
    with pytest.raises(ValueError, match="should rise"):
        PreferenceSettings(kl_knots=((5, 1.0), (5, 0.0)))


def test_masks_are_drawn_by_sample_not_by_rank():
    whole = draw_mask(3, 7, range(400), 0.8)
    assert torch.equal(whole, torch.cat([draw_mask(3, 7, range(150), 0.8), draw_mask(3, 7, range(150, 400), 0.8)]))
    assert 0.72 < whole.double().mean() < 0.88 and not torch.equal(whole, draw_mask(3, 8, range(400), 0.8))
    assert not draw_mask(3, 7, range(9), 0.0).any() and draw_mask(3, 7, range(9), 1.0).all()
    null, u = _random(4, seed=1).requires_grad_(), _random(2, 3, 4)
    mixed = mask_understanding(u, torch.tensor([True, False]), null)
    assert torch.equal(mixed[0], null.expand(3, 4)) and torch.equal(mixed[1], u[1])
    assert torch.autograd.grad(mixed.sum(), null)[0].tolist() == [3.0] * 4


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_answer_ce(n: int, reduction: str):
    logits, targets = _random(2 * n + 1, 5).requires_grad_(), torch.arange(2 * n + 1) % 5
    sample = torch.tensor([0] + [i for i in range(n) for _ in range(2)])
    ours = answer_ce(logits, targets, sample, n, reduction)
    wanted = []
    for i in range(n):
        rows = [a for a in range(len(sample)) if sample[a] == i]
        losses = [logits[a].exp().sum().log() - logits[a, targets[a]] for a in rows]
        wanted.append(sum(losses) / (len(rows) if reduction == "mean" else 1))
    weight = _random(n, seed=4)
    _same((ours * weight).sum(), (torch.stack(wanted) * weight).sum(), logits)


def test_a_sample_without_an_answer_is_named():
    with pytest.raises(UserError, match="sample 1 of the batch has no answer token"):
        answer_ce(_random(2, 5), torch.tensor([0, 1]), torch.tensor([0, 2]), 3)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_preference(n: int):
    matched, shuffled = (10 * _random(n, seed=s) for s in (0, 1))
    matched.requires_grad_(), shuffled.requires_grad_()
    counts = torch.tensor([True, False, True])[:n]
    found = preference(matched, shuffled, counts, 0.1, int(counts.sum()))
    wanted = 0
    for i in range(n):
        if counts[i]:
            wanted = wanted + torch.log(1 + torch.exp(-0.1 * (shuffled[i] - matched[i]))) / int(counts.sum())
    torch.testing.assert_close(found.value, wanted.detach())
    up, down = torch.autograd.grad(wanted, (matched, shuffled))
    torch.testing.assert_close(torch.autograd.grad(found.positive, matched)[0], up)
    torch.testing.assert_close(torch.autograd.grad(found.negative, shuffled)[0], down)
    assert (up >= 0).all() and (down <= 0).all()  # lower the matched loss, raise the shuffled one


def test_without_a_pair_that_counts_there_is_a_zero_with_a_graph():
    matched, shuffled = _random(2).requires_grad_(), _random(2, seed=1).requires_grad_()
    found = preference(matched, shuffled, torch.tensor([False, False]), 0.1, 0)
    assert found.value == 0 and torch.autograd.grad(found.positive, matched)[0].tolist() == [0, 0]
    logits = _random(2, 3).requires_grad_()
    kl = forward_kl(_random(2, 3, seed=1), logits, torch.tensor([False]), torch.tensor([0, 0]), 0)
    assert kl == 0 and torch.autograd.grad(kl, logits)[0].abs().sum() == 0


@pytest.mark.parametrize("n", [1, 2, 3])
def test_forward_kl(n: int):
    reference, shuffled = _random(2 * n, 5).requires_grad_(), _random(2 * n, 5, seed=1).requires_grad_()
    sample, counts = torch.arange(2 * n) // 2, torch.tensor([True, False, True])[:n]
    tokens = 2 * int(counts.sum())
    wanted = 0
    for a in range(2 * n):
        if counts[sample[a]]:
            p, q = (torch.softmax(t[a], -1) for t in (reference.detach(), shuffled))
            wanted = wanted + sum(p[v] * (p[v].log() - q[v].log()) for v in range(5)) / tokens
    ours = forward_kl(reference, shuffled, counts, sample, tokens)
    _same(ours, wanted, shuffled)
    assert torch.autograd.grad(ours, reference, allow_unused=True)[0] is None
    backwards = forward_kl(shuffled, reference, counts, sample, tokens)
    assert abs(float(ours - backwards)) > 1e-3  # the direction matters


def _losses(weights: list[nn.Parameter], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per-sample plain, matched and shuffled losses of a small model."""
    hidden = torch.tanh(x @ weights[0])
    return hidden.square().sum(1), (hidden @ weights[1]).square().sum(1), torch.cos(3 * hidden @ weights[1]).sum(1)


def _weights() -> list[nn.Parameter]:
    return [nn.Parameter(_random(4, 4)), nn.Parameter(_random(4, 2, seed=1)), nn.Parameter(_random(3, seed=2))]


def _step(rank: int, world: int, settings: PreferenceSettings, micro: int) -> dict:
    weights, x = _weights(), _random(8, 4, seed=3)
    split = SplitGradients(weights)
    mine = x[rank * 8 // world : (rank + 1) * 8 // world]
    for piece in mine.chunk(micro):
        plain, up, down = _losses(weights, piece)
        found = preference(up, down, torch.ones(len(piece), dtype=torch.bool), 0.5, 8)
        split.add("plain", plain.sum() / 8, again=True)
        split.add("positive", found.positive, again=True)
        split.add("negative", found.negative)
    return {"stats": split.finish(settings), "grads": [w.grad for w in weights]}


@pytest.mark.parametrize("cap", [None, 0.01, 1e6])
@pytest.mark.parametrize("world", [1, 2])
def test_weighting_and_cap(cap: float | None, world: int, tmp_path):
    settings = PreferenceSettings(cap=cap)
    results = [_step(0, 1, settings, 3)] if world == 1 else on_ranks(2, _step, tmp_path, settings, 2)
    weights = _weights()
    plain, up, down = _losses(weights, _random(8, 4, seed=3))
    slope = lambda a, b: torch.nn.functional.softplus(-0.5 * (b - a)).mean()  # noqa: E731
    parts = [
        torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        for loss in (plain.mean(), slope(up, down.detach()), slope(up.detach(), down))
    ]
    flat = [torch.cat([torch.zeros(w.numel()) if g is None else g.flatten() for w, g in zip(weights, p, strict=True)])
            for p in parts]  # fmt: skip
    negative = 0.25 * flat[2]
    limit = math.inf if cap is None else cap * flat[1].norm()
    factor = min(1.0, float(limit / negative.norm()))
    assert (factor < 1) == (cap == 0.01)
    wanted = flat[0] + flat[1] + factor * negative
    for result in results:
        torch.testing.assert_close(torch.cat([g.flatten() for g in result["grads"]]), wanted)
        stats = result["stats"]
        norms = (float(flat[0].norm()), float(flat[1].norm()), float(negative.norm()), factor, float(wanted.norm()))
        assert (stats.plain, stats.positive, stats.negative, stats.factor, stats.total) == pytest.approx(norms)


def test_the_cap_is_the_papers_quarter_and_spares_the_rest():
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    split = SplitGradients([weight])
    split.add("plain", 100 * weight[0], again=True)
    split.add("positive", 4 * weight[1])
    split.add("negative", -80 * weight[1])
    stats = split.finish(PAPER)
    assert weight.grad.tolist() == [100.0, 3.0] and stats.factor == 0.05  # 4 − ¼·80 would be −16; the cap leaves 4 − 1
    with pytest.raises(RuntimeError):
        split.finish(PAPER)
    with pytest.raises(UserError, match="nothing trains"):
        SplitGradients([])
