"""Interventions: nothing changed loses nothing, and orders, donors and replacements by hand."""

from dataclasses import replace

import pytest
import torch

from launch.errors import UserError
from realvr.config import InterventionSettings, SourceSettings
from realvr.data.examples import Example
from realvr.data.sources import open_source, open_twins
from realvr.evaluate import latents as lat
from realvr.evaluate.latents import Readout, Transplanted
from realvr.evaluate.probe import Probe

K = 4


@pytest.fixture(scope="module")
def probe(tiny_demo):
    return Probe(str(tiny_demo), "float32", 4, 64)


@pytest.fixture(scope="module")
def examples():
    return open_source(SourceSettings(kind="shapes", size=64, seed=3))[:10]


def candidates(examples):
    golds = sorted({e.answer for e in examples})
    return [[g for g in golds if g != e.answer] for e in examples]


def test_replacing_latents_by_themselves_loses_nothing(probe, examples, monkeypatch):
    monkeypatch.setattr(lat, "donors", lambda items, seed: list(range(len(items))))
    cfg = InterventionSettings(replacements=("donor",), batch=4)
    for item in lat.replacement(probe, examples, candidates(examples), K, cfg, 0):
        assert len(item.drops) == 3 * 3  # orders × (1, 2, 4); 8 exceeds K
        for lost_p, lost_logp in item.drops.values():
            assert abs(lost_p) < 1e-6 and abs(lost_logp) < 1e-5


def test_replacement_equals_a_context_with_the_other_latents(probe, examples):
    cfg = InterventionSettings(orders=("raw",), replacements=("zero", "mean"), top=(2, 4), batch=3)
    items = lat.replacement(probe, examples, [[]] * len(examples), K, cfg, 0)
    context = probe.context(examples)
    own = probe.latents(context, K)
    golds = [[e.answer] for e in examples]
    p = probe.branches(probe.prime(context, own), golds).logp[:, 0].exp()
    for name, other in (("zero", torch.zeros_like(own)), ("mean", own.mean(0, keepdim=True).expand_as(own))):
        q = probe.branches(probe.prime(context, other), golds).logp[:, 0].exp()
        got = torch.tensor([i.drops["raw", name, 4][0] for i in items])
        assert torch.allclose(got, (p - q).cpu(), atol=1e-6) and got.abs().max() > 1e-5
    assert items[0].drops["raw", "zero", 2] != items[0].drops["raw", "zero", 4]


def test_batches_do_not_matter(probe, examples):
    runs = [
        lat.replacement(probe, examples, candidates(examples), K, InterventionSettings(batch=b), 7) for b in (3, 64)
    ]
    for a, b in zip(*runs, strict=True):
        assert a.id == b.id and a.logp == pytest.approx(b.logp, abs=1e-4)
        assert (a.cos_roi is None) == (b.cos_roi is None)
        assert a.cos_roi is None or a.cos_roi == pytest.approx(b.cos_roi, abs=1e-5)
        for key, (lost_p, _) in a.drops.items():
            assert lost_p == pytest.approx(b.drops[key][0], abs=1e-6)


def test_a_transplant_of_its_own_latents_changes_nothing(probe):
    twins = [t for t in open_twins(SourceSettings(kind="shapes", seed=4), 16) if t.relevant]
    same = [replace(t, after=replace(t.after, images=t.before.images)) for t in twins]
    for item in lat.transplant(probe, same, K, InterventionSettings(batch=5)):
        assert set(item.answers) == {0, 1, 2, 4} and len(set(item.answers.values())) == 1
        assert item.margins[4] == pytest.approx(item.margins[0], abs=1e-5)
    moved = lat.transplant(probe, twins, K, InterventionSettings(batch=5))
    assert max(abs(i.margins[4] - i.margins[0]) for i in moved) > 1e-3


def test_orders_by_hand():
    right = torch.tensor([[0.4, 0.3, 0.1, 0.2]])
    wrong = torch.tensor([[0.4, 0.1, 0.0, 0.3]])
    readout = Readout(torch.zeros(1), right, wrong, right, wrong)
    assert lat.ranking(readout, "raw", [0]).tolist() == [[0, 1, 3, 2]]
    assert lat.ranking(readout, "contrast", [0]).tolist() == [[1, 2, 0, 3]]
    assert sorted(lat.ranking(readout, "random", [5]).tolist()[0]) == [0, 1, 2, 3]
    own, other = torch.zeros(1, 4, 2), torch.ones(1, 4, 2)
    changed = lat.replace_top(own, other, torch.tensor([[1, 2, 0, 3]]), 2)
    assert changed[0, :, 0].tolist() == [0, 1, 1, 0]
    assert lat.replace_top(own, other, torch.tensor([[1, 2, 0, 3]]), 0).sum() == 0


def test_the_wrong_readout_is_a_mean_over_the_wrong_answers(probe, examples):
    context = probe.context(examples[:2])
    primed = probe.prime(context, probe.latents(context, K))
    wrong = [["red", "left"], ["none"]]
    got = lat.read(probe, primed, ["blue", "circle"], wrong)
    red = lat.read(probe, primed, ["red", "none"], [[], []])
    left = lat.read(probe, primed, ["left", "none"], [[], []])
    assert torch.allclose(got.wrong[0], (red.right[0] + left.right[0]) / 2, atol=1e-6)
    assert torch.allclose(got.wrong[1], red.right[1], atol=1e-6)
    assert red.wrong.abs().sum() == 0


def test_likely_wrong_answers_come_in_order_of_probability(probe, examples):
    context = probe.context(examples[:2])
    primed = probe.prime(context, probe.latents(context, K))
    names = ["red", "green", "left", "none", "cross"]
    found = lat.likely_wrong(probe, primed, [names, names[:2]], 3)
    scores = probe.branches(primed, [names, names]).logp
    assert found[0] == [names[i] for i in scores[0].argsort(descending=True)[:3]]
    assert sorted(found[1]) == ["green", "red"]
    with pytest.raises(UserError, match=f"no wrong answer is known for {examples[0].id}"):
        lat.likely_wrong(probe, primed, [[], names], 3)


def test_donors_differ_in_their_answer():
    golds = ["red", "Red", "blue", "blue", "left"]
    items = [Example(str(i), (), "?", gold) for i, gold in enumerate(golds)]
    for seed in range(20):
        for i, j in enumerate(lat.donors(items, seed)):
            assert golds[i].casefold() != golds[j].casefold()
    assert lat.donors(items[:2], 0) == [1, 0]  # one answer only: the other example
    with pytest.raises(UserError, match="at least two examples"):
        lat.donors(items[:1], 0)


def test_whose_answer():
    item = Transplanted("i", "swap", ("left", "right"), {0: "Left.", 2: "right", 4: "red"}, {})
    assert [item.whose(k) for k in (0, 2, 4)] == ["A", "B", "other"]


def test_similarity_maps_lie_on_the_grid(probe):
    twins = open_twins(SourceSettings(kind="shapes", seed=4), 3)
    found = lat.looks(probe, [t.before for t in twins], [["none"]] * 3, K, 2)
    assert len(found) == 3
    for look in found:
        assert look.similarity.shape == (4, 4) and look.right.shape == look.wrong.shape == (K,)
        assert abs(look.similarity).max() <= 1.0001 and 0 < look.right.sum() < 1
