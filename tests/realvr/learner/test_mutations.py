"""Mutations: each breaks the product on purpose, and the comparison with the reference must notice."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from realvr.families.base import VisualFeatures
from realvr.learner import batching
from realvr.learner.batching import LearnerGroup
from realvr.objectives import evidence, prototypes, routing
from realvr.policy import kv, tree
from realvr.policy.spans import Parsed, parse
from tests.realvr.learner.samples import EVIDENCE, World

Patch = Callable[[pytest.MonkeyPatch], None]
SEEN = 1e-4  # a hundred times what the parity tests allow


def differences(world: World, groups: list[LearnerGroup] | None = None) -> float:
    return max(world.compare(groups or world.groups()))


def spans_in_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmasked(ids, tokens, latent) -> Parsed:
        parsed = parse(ids, tokens, latent)
        loss = parsed.loss.copy()
        for span in parsed.spans:
            loss[span.start] = True
        return replace(parsed, loss=loss)

    monkeypatch.setattr(batching, "parse", unmasked)


def unclosed_span_masks_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(ids, tokens, latent) -> Parsed:
        parsed = parse(ids, tokens, latent)
        loss = parsed.loss.copy()
        for span in parsed.spans:
            loss[span.start : span.end] = False
        return replace(parsed, loss=loss)

    monkeypatch.setattr(batching, "parse", greedy)


def no_bans(monkeypatch: pytest.MonkeyPatch) -> None:
    from realvr.learner import step

    monkeypatch.setattr(step, "ban_table", lambda tokens, size: torch.zeros(3, size, dtype=torch.bool))


def max_over_wrong_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def hardest(credit, like):
        present = credit.wrong_mask[..., None]
        top = credit.wrong.masked_fill(~present, 0.0).amax(1)
        return torch.relu(credit.right - top).masked_fill(~present.any(1), 0.0)

    monkeypatch.setitem(routing.ROUTINGS, "contrast", hardest)


def latents_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tree.Tree.recursion

    def late(self, first, k):
        z, past = whole(self, first, k + 1)
        return z[:, 1:], [(trunk, (z_k[0][:, :, :-1], z_k[1][:, :, :-1])) for trunk, z_k in past]

    monkeypatch.setattr(tree.Tree, "recursion", late)


def replay_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = batching._completions

    def late(groups, tokens, width):
        built = whole(groups, tokens, width)
        flat = torch.roll(built.latent_BGN.flatten(1), 1, 1)
        return replace(built, latent_BGN=flat.view(built.latent_BGN.shape))

    monkeypatch.setattr(batching, "_completions", late)


def prototypes_with_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def attached(features, boxes):
        return features[torch.tensor(prototypes.union(boxes, len(features)))].double().mean(0)

    def gaps(z, positive, negatives, mask):
        others = F.cosine_similarity(z[:, :, None], negatives[:, None].to(z.dtype), dim=-1)
        nearest = others.masked_fill(~mask[:, None], -2.0).amax(-1)
        return F.cosine_similarity(z, positive.to(z.dtype), dim=-1) - nearest

    monkeypatch.setattr(prototypes, "positive", attached)
    monkeypatch.setattr(evidence, "gaps", gaps)


def recursion_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tree.Tree.recursion

    def cut(self, first, k):
        return whole(self, replace(first, start_B1d=first.start_B1d.detach()), k)

    monkeypatch.setattr(tree.Tree, "recursion", cut)


def prefix_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tree.Tree.first
    monkeypatch.setattr(
        tree.Tree, "first", lambda self, c: (f := whole(self, c)) and replace(f, past=kv.detached(f.past))
    )


def padding_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv.Plan, "runs", property(lambda self: ((0, len(self.starts), 0),)))


MUTATIONS: list[Patch] = [
    spans_in_the_loss,
    unclosed_span_masks_the_rest,
    no_bans,
    max_over_wrong_answers,
    latents_one_late,
    replay_one_late,
    recursion_without_gradient,
    prefix_without_gradient,
    padding_seen,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_mutation_is_seen(qwen25: World, monkeypatch: pytest.MonkeyPatch, mutation: Patch) -> None:
    mutation(monkeypatch)
    assert differences(qwen25) > SEEN


def feature_gradient(world: World, theirs: bool) -> torch.Tensor:
    """Gradient of the loss with respect to the visual tokens of the first group."""
    groups = world.groups()[:1]
    pixels = VisualFeatures(groups[0].features.embeds.clone().requires_grad_())
    boxes = [box.tolist() for box in groups[0].prompt.roi]
    groups = [replace(groups[0], features=pixels, positive=prototypes.positive(pixels.embeds, boxes))]
    loss = world.reference(groups) if theirs else world.learner()(world.micro_batch(groups))[0]
    (gradient,) = torch.autograd.grad(loss, pixels.embeds)
    return gradient


def test_no_gradient_enters_prototypes(qwen25: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Visual tokens get gradient through the prompt alone; a prototype that carries it is seen."""
    plain = feature_gradient(qwen25, theirs=True)
    assert (feature_gradient(qwen25, theirs=False) - plain).norm() < 1e-6 * plain.norm()
    prototypes_with_gradient(monkeypatch)
    assert (feature_gradient(qwen25, theirs=False) - plain).norm() > SEEN * plain.norm()


def test_stale_prefix_is_seen(qwen25: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of the prompt that an earlier policy computed."""
    groups = qwen25.groups()
    batch = qwen25.micro_batch(groups)
    learner = qwen25.learner()
    whole = tree.Tree.first
    stale = whole(learner._tree(learner.root, batch), batch.completions).past
    projection = qwen25.policy.root.language_model.layers[1].self_attn.v_proj.weight
    before = projection.detach().clone()
    with torch.no_grad():
        projection.mul_(1.01)
    try:
        assert differences(qwen25, groups) < 1e-6
        monkeypatch.setattr(tree.Tree, "first", lambda self, c: replace(whole(self, c), past=kv.detached(stale)))
        assert differences(qwen25, groups) > SEEN
    finally:
        with torch.no_grad():
            projection.copy_(before)


def test_unmutated_is_equal(qwen25: World) -> None:
    assert EVIDENCE.routing == "contrast"
    assert differences(qwen25) < 1e-6
