"""One micro-batch of the learner against a plain, slow reference, in float64: loss and every gradient."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from realvr.config import (
    DataSettings,
    EvidenceSettings,
    GrpoSettings,
    LoraSettings,
    ModelSettings,
    RLSettings,
    SourceSettings,
)
from realvr.learner.batching import filler
from realvr.learner.statistics import combine, values
from realvr.learner.step import LearnerModule, StepSettings
from tests.realvr.learner.samples import EVIDENCE, K, World, gradients, worst

CLOSE = 1e-6


def agrees(world: World, split=None, negatives: int = 3, **changes) -> None:
    groups = world.groups(changes.get("evidence", EVIDENCE))
    if split is not None:
        split = [[groups[i] for i in part] for part in split]
    loss, slope = world.compare(groups, split, negatives, **changes)
    assert loss < CLOSE and slope < CLOSE, (loss, slope)


@pytest.mark.parametrize("attention", ["merged", "dense"])
@pytest.mark.parametrize("recompute", [False, True])
def test_ragged_batch_equals_reference(world: World, attention: str, recompute: bool) -> None:
    agrees(world, attention=attention, recompute=recompute)


@pytest.mark.parametrize(
    "grpo",
    [
        GrpoSettings(normalisation="bnpo"),
        GrpoSettings(normalisation="dr_grpo"),
        GrpoSettings(old="rollout", tis_cap=1.5),
    ],
    ids=lambda s: f"{s.normalisation}-{s.old}",
)
def test_grpo_choices_equal_reference(qwen25: World, grpo: GrpoSettings) -> None:
    agrees(qwen25, grpo=grpo)


ABLATIONS = {
    "raw": {"routing": "raw"},
    "uniform": {"routing": "uniform"},
    "pure": {"floor": 0.0},
    "causal": {"routing": "causal"},
    "saved": {"trajectory": "saved"},
    "saved-causal": {"trajectory": "saved", "routing": "causal"},
    "per-slot": {"prototype": "per_slot"},
    "attached": {"detach_weights": False},
    "attached-causal": {"detach_weights": False, "routing": "causal"},
    "attached-saved": {"detach_weights": False, "trajectory": "saved"},
    "mass-matched": {"mass_matched": True},
    "normalised": {"normalise_gamma": True},
    "off": {"weight": 0.0},
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_equal_reference(qwen25: World, name: str) -> None:
    agrees(qwen25, evidence=EVIDENCE.model_copy(update=ABLATIONS[name]))


def test_deepstack_ablations_equal_reference(qwen3: World) -> None:
    agrees(qwen3, evidence=EVIDENCE.model_copy(update={"trajectory": "saved", "prototype": "per_slot"}), recompute=True)


def test_without_negatives_the_gap_is_the_cosine_alone(qwen25: World) -> None:
    agrees(qwen25, negatives=0, evidence=EVIDENCE.model_copy(update={"negatives": 0}))


def test_loss_does_not_depend_on_the_split(qwen25: World) -> None:
    agrees(qwen25, split=[[2], [0, 3], [1]])


def test_reference_kl_by_a_second_root(qwen25: World) -> None:
    """k3 of a policy to itself is 0 and pulls nowhere; to another one it is not."""
    settings = qwen25.settings(grpo=GrpoSettings(beta=0.5), recompute=False)
    batch = qwen25.micro_batch(qwen25.groups())
    other = deepcopy(qwen25.policy.root)
    learner = LearnerModule(qwen25.policy, settings, qwen25.tokens, reference=other)
    _, same = learner(batch)
    with torch.no_grad():
        other.language_model.layers[0].self_attn.v_proj.weight.mul_(1.5)
    loss, moved = learner(batch)
    assert values(same)["kl"] == pytest.approx(0, abs=1e-12)
    assert values(moved)["kl"] > 1e-4
    loss.backward()
    assert all(p.grad is None for p in other.parameters())


@pytest.mark.parametrize("shift", [1, -1])
def test_control_shifted_positions_are_seen(qwen25: World, shift: int) -> None:
    """The comparison would notice positions that are off by one."""
    groups = qwen25.groups()
    theirs = qwen25.reference(groups)
    slopes = gradients(qwen25.policy.root, theirs)
    moved = [replace(g, prompt=replace(g.prompt, next_position=g.prompt.next_position + shift)) for g in groups]
    loss, _ = qwen25.learner()(qwen25.micro_batch(moved))
    ours = gradients(qwen25.policy.root, loss)
    assert worst(ours, slopes) > 1e-2


def test_filler_gives_zero_and_keeps_the_graph(world: World) -> None:
    batch = world.micro_batch([filler(world.tokens, world.width)], world.groups())
    loss, statistics = world.learner(recompute=True)(batch)
    world.policy.root.zero_grad(set_to_none=True)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in world.policy.root.parameters())
    assert values(statistics)["loss_tokens_sum"] == 0


def test_filler_beside_groups_changes_nothing(qwen25: World) -> None:
    agrees_with = qwen25.groups()
    extra = [*agrees_with, filler(qwen25.tokens, qwen25.width)]
    loss, slope = qwen25.compare(agrees_with, [extra])
    assert loss < CLOSE and slope < CLOSE


@pytest.mark.parametrize("routing", ["contrast", "uniform", "causal"])
def test_module_calls_do_not_depend_on_the_groups(qwen25: World, routing: str) -> None:
    """ZeRO-3 would deadlock otherwise: the same modules in the same order, K + 1 forwards of the language model."""
    evidence = EVIDENCE.model_copy(update={"routing": routing})
    groups = qwen25.groups(evidence)
    parts = [[groups[0]], [groups[1], groups[2]], [groups[3]], [filler(qwen25.tokens, qwen25.width)]]
    learner = qwen25.learner(evidence=evidence)
    calls: list[str] = []
    names = {m: n for n, m in learner.named_modules()}
    hooks = [m.register_forward_pre_hook(lambda m, _: calls.append(names[m])) for m in learner.modules()]
    seen = []
    for part in parts:
        calls.clear()
        loss, _ = learner(qwen25.micro_batch(part, groups))
        loss.backward()
        seen.append(list(calls))
    for hook in hooks:
        hook.remove()
    assert all(s == seen[0] for s in seen)
    wanted = {"contrast": K + 1, "uniform": K, "causal": K + 1}[routing]
    assert seen[0].count("root.language_model") == wanted


def test_saved_latents_reach_the_loss_under_checkpointing(qwen25: World) -> None:
    """Known fault: checkpointing that drops the cache switched the latent path off without a word."""
    groups = qwen25.groups()
    batch = qwen25.micro_batch(groups)
    learner = qwen25.learner(recompute=True)

    def look() -> tuple[float, dict[str, torch.Tensor]]:
        loss, statistics = learner(batch)
        return values(statistics)["entropy"], gradients(qwen25.policy.root, loss)

    (before, slopes), _ = look(), batch.completions.latents_Md.mul_(-1)
    after, other = look()
    assert abs(after - before) > 1e-3 and worst(other, slopes) > 1e-2


def test_statistics_add_up_over_micro_batches(qwen25: World) -> None:
    groups = qwen25.groups()
    learner = qwen25.learner()
    whole = values(learner(qwen25.micro_batch(groups))[1])
    parts = values(combine(learner(qwen25.micro_batch([g], groups))[1] for g in groups))
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        assert parts[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert whole["loss_tokens_sum"] == sum(g.loss_tokens for g in groups)
    assert whole["groups_with_wrong"] == 0.75
    assert 0 < whole["entropy"] < 6 and whole["clip_fraction"] == 0


def test_drift_is_zero_for_the_learner_s_own_latents(qwen25: World) -> None:
    """A rollout whose latents are the learner's own states shows no drift, and the recursion gives them again."""
    groups = qwen25.groups()[:1]
    batch = qwen25.micro_batch(groups)
    learner = qwen25.learner()
    closed = batch.completions.latent_BGN
    for _ in range(K):  # each pass mends one more latent of every span
        tree = learner._tree(learner.root, batch)
        first = tree.first(batch.completions)
        object.__setattr__(batch.completions, "latents_Md", first.states_BGNd.detach()[closed])
    statistics = values(learner(batch)[1])
    assert statistics["latent_drift"] < 1e-12 and statistics["latent_drift_abs_max"] < 1e-9
    z, _ = tree.recursion(first, K)
    torch.testing.assert_close(z[0], batch.completions.latents_Md[:K], rtol=0, atol=1e-9)


@pytest.mark.parametrize("attention", ["merged", "dense"])
def test_gradient_squares_tell_the_losses_apart(qwen25: World, attention: str) -> None:
    """What GRPO alone sends into the prompt's keys and values is the first number; λ scales the second."""
    groups = qwen25.groups()
    batch = qwen25.micro_batch(groups)

    def measure(weight: float, recompute: bool) -> torch.Tensor:
        evidence = EVIDENCE.model_copy(update={"weight": weight})
        learner = qwen25.learner(evidence=evidence, recompute=recompute, attention=attention)
        learner(batch)[0].backward()
        return learner.take_gradient_squares()

    alone, both, double = measure(0.0, False), measure(0.7, True), measure(1.4, False)
    assert alone[1] == 0 and alone[0] > 0 and both[1] > 0
    torch.testing.assert_close(both[0], alone[0])
    torch.testing.assert_close(double[1], 4 * both[1])


def test_bfloat16_runs_and_stays_near(tiny_qwen25, tmp_path) -> None:
    single = World(tiny_qwen25, tmp_path, double=False)
    groups = single.groups()
    expected, _ = single.learner()(single.micro_batch(groups))
    half = World(tiny_qwen25, tmp_path, double=False)
    half.policy.root.language_model.layers.bfloat16()
    half.policy.root.language_model.norm.bfloat16()
    half.policy.root.language_model.embed_tokens.bfloat16()
    half.policy.root.lm_head.bfloat16()
    for attention in ("merged", "dense"):
        loss, _ = half.learner(attention=attention, recompute=True)(half.micro_batch(groups))
        half.policy.root.zero_grad()
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), abs=0.05)
        assert all(torch.isfinite(p.grad).all() for p in half.policy.root.parameters())


def test_settings_follow_the_job_s() -> None:
    config = RLSettings(model=ModelSettings(path="x"), data=DataSettings(train=SourceSettings(kind="shapes")))
    settings = StepSettings.of(config)
    assert (settings.k, settings.temperature, settings.recompute) == (8, 0.6, True)
    assert settings.evidence == EvidenceSettings()


def test_adapters_equal_reference_and_their_absence_is_the_start(tiny_qwen25, tmp_path) -> None:
    """LoRA: gradients of the adapters alone; the reference policy of the KL is the root without them."""
    world = World(tiny_qwen25, tmp_path, lora=LoraSettings(r=2, alpha=3))
    batch = world.micro_batch(world.groups())
    learner = world.learner(grpo=GrpoSettings(beta=0.1), recompute=True)
    assert values(learner(batch)[1])["kl"] == pytest.approx(0, abs=1e-12)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in world.policy.root.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    assert values(learner(batch)[1])["kl"] > 1e-4
    loss, slope = world.compare(world.groups(), recompute=True)
    assert loss < CLOSE and slope < CLOSE
