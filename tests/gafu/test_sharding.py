"""A frozen backbone under ZeRO-3: gradients of several losses through one graph, equal to a plain process's."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launch.errors import UserError
from tests.gafu.ranks import on_ranks

STEPS = 3


def _backbone() -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaModel(LlamaConfig(vocab_size=32, **sizes)).requires_grad_(False)


def _adapters(model: nn.Module) -> list[nn.Parameter]:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(1)
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"]), model)
    found = [p for name, p in model.named_parameters() if "lora_" in name]
    for parameter in found:
        parameter.data.normal_(std=0.1)
        parameter.requires_grad_(True)
    return found


def _losses(model: nn.Module, scale: torch.Tensor, rank: int, step: int) -> list[torch.Tensor]:
    """A reference without gradient, then one forward; ranks have lengths of their own."""
    x = torch.randn(2, 5 + rank + step, 64, generator=torch.Generator().manual_seed(10 * step + rank))
    with torch.no_grad():
        reference = model(inputs_embeds=x, use_cache=False).last_hidden_state
    states = model(inputs_embeds=x * scale, use_cache=False).last_hidden_state
    return [states[0].pow(3).mean(), states[1].sin().mean(), (states - reference).square().mean()]


def _gradients(model: nn.Module, trained: list[nn.Parameter], rank: int, graphs: Any) -> list[torch.Tensor]:
    found = []
    for step in range(STEPS):
        with graphs() as graph:
            losses = _losses(model, trained[0], rank, step)
            graph.built()
            for number, loss in enumerate(losses):
                if number:
                    graph.again()
                parts = torch.autograd.grad(loss, trained, retain_graph=number < 2, allow_unused=True)
                found.append(
                    torch.cat(
                        [
                            torch.zeros(p.shape).flatten() if g is None else g.flatten()
                            for p, g in zip(trained, parts, strict=True)
                        ]
                    )
                )
    return found


def _sharded(rank: int, world: int, recompute: bool) -> dict[str, Any]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    from gafu.sharding import FrozenShards
    from launch.config import LearnerSettings
    from launch.engine import init_distributed

    init_distributed(gpu=False)
    model = _backbone()
    settings = LearnerSettings(gpus=0, deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}})
    shards = FrozenShards(model, settings)
    held = sum(p.numel() for p in model.parameters())
    trained = [nn.Parameter(torch.full((64,), 0.5)), *_adapters(model)]
    if recompute:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found = _gradients(model, trained, rank, shards.graph)
    after = sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name)
    return {"gradients": found, "held": held, "after": after}


class _Plain:
    def __enter__(self) -> "_Plain":
        return self

    def __exit__(self, *_: object) -> None: ...

    def built(self) -> None: ...

    again = built


@pytest.mark.parametrize("recompute", [False, True])
def test_three_losses_through_one_graph_on_two_ranks(tmp_path: Path, recompute: bool) -> None:
    results = on_ranks(2, _sharded, tmp_path, recompute)
    model = _backbone()
    trained = [nn.Parameter(torch.full((64,), 0.5)), *_adapters(model)]
    for rank, result in enumerate(results):
        assert result["held"] == 0  # nothing is whole between the calls, before and after
        assert result["after"] == 0
        for ours, plain in zip(result["gradients"], _gradients(model, trained, rank, _Plain), strict=True):
            assert float(plain.abs().max()) > 0
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)


def test_a_trained_backbone_is_refused() -> None:
    from gafu.sharding import FrozenShards
    from launch.config import LearnerSettings

    with pytest.raises(UserError, match=r"weight of the backbone trains.*freeze it"):
        FrozenShards(nn.Linear(2, 2), LearnerSettings(gpus=0))


def test_again_before_built() -> None:
    from gafu.sharding import Graph

    with pytest.raises(RuntimeError, match="built"):
        Graph(nn.Linear(2, 2)).again()


def _stage2_gradient(adapter: Any, trained: list[nn.Parameter], injection: Any, rank: int, graphs: Any) -> torch.Tensor:
    """One stage-2 step on this rank's two images: the gradient of all ranks, weighted and capped."""
    from gafu.config import PreferenceSettings
    from gafu.injection import lora_off
    from gafu.preference import SplitGradients, answer_ce, donors, forward_kl, preference
    from tests.gafu.adapter_suite import ROWS, pictures

    batch = adapter.build_batch([*ROWS[: 2 - rank], *ROWS[:1] * rank])
    pixels = adapter.preprocess(pictures(2))
    u, (targets, sample) = adapter.understanding_tokens(pixels.understanding), batch.targets
    tokens = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad(), lora_off(adapter):
        reference = adapter(batch, u, keep=batch.answers)
    split, counts = SplitGradients(trained), torch.ones(2, dtype=torch.bool)
    with graphs() as graph:
        branches = [tokens, tokens[donors(2)]]
        matched, shuffled = (adapter(batch, u, injection.bind(adapter, batch, g), batch.answers) for g in branches)
        graph.built()
        up, down = (answer_ce(logits, targets, sample, 2) for logits in (matched, shuffled))
        found = preference(up, down, counts, 0.1, 2)
        split.add("plain", 5 * up.mean() + forward_kl(reference, shuffled, counts, sample, len(sample)), again=True)
        graph.again()
        split.add("positive", found.positive, again=True)
        graph.again()
        split.add("negative", found.negative)
    split.finish(PreferenceSettings(cap=0.5))
    return torch.cat([p.grad.flatten() for p in trained])


def _janus(folder: Path, shard: Any) -> tuple[Any, list[nn.Parameter], Any]:
    """Adapter, trained parameters, injection; `shard` comes between loading and adapters."""
    from gafu.backbones import load_backbone
    from gafu.config import BackboneSettings, InjectionSettings, LoraSettings
    from gafu.injection import Injection, add_lora

    adapter = load_backbone(BackboneSettings(path=str(folder), dtype="float32", gradient_checkpointing=True))
    shards = shard(adapter.model)
    torch.manual_seed(1)
    injection = Injection(InjectionSettings(), adapter.geometry, (2, 3))
    trained = [*add_lora(adapter, LoraSettings(r=2, alpha=2)), *injection.parameters()]
    for parameter in trained:
        nn.init.normal_(parameter, std=0.1)
    adapter.train()
    return adapter, trained, (injection, shards)


def _sharded_janus(rank: int, world: int, folder: Path) -> torch.Tensor:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    from gafu.sharding import FrozenShards
    from launch.config import LearnerSettings
    from launch.engine import init_distributed

    init_distributed(gpu=False)
    settings = LearnerSettings(gpus=0, deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}})
    adapter, trained, (injection, shards) = _janus(folder, lambda model: FrozenShards(model, settings))
    return _stage2_gradient(adapter, trained, injection, rank, shards.graph)


def test_a_stage_2_step_of_a_sharded_backbone(tmp_path: Path, tiny_janus: Path) -> None:
    """Reduced over ranks it is the gradient of the sum; weighting and cap see the whole batch's norms."""
    from gafu.config import PreferenceSettings

    one, other = on_ranks(2, _sharded_janus, tmp_path, tiny_janus)
    assert torch.equal(one, other)
    parts: list[torch.Tensor] = []
    for rank in range(2):
        adapter, trained, (injection, _) = _janus(tiny_janus, lambda model: None)
        parts.append(_parts(adapter, trained, injection, rank))
    plain, positive, negative = sum(parts)
    settings = PreferenceSettings(cap=0.5)
    negative = settings.negative * negative
    factor = min(1.0, float(0.5 * positive.norm() / negative.norm()))
    torch.testing.assert_close(one, plain + positive + factor * negative, rtol=1e-3, atol=1e-6)


def _parts(adapter: Any, trained: list[nn.Parameter], injection: Any, rank: int) -> torch.Tensor:
    """The parts [3, P] of one rank's step, before they are put together."""
    from gafu.preference import SplitGradients

    found: dict[str, torch.Tensor] = {}

    class Spy(SplitGradients):
        def finish(self, settings: Any) -> Any:
            found.update(self._flat)
            return super().finish(settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gafu.preference.SplitGradients", Spy)
        _stage2_gradient(adapter, trained, injection, rank, _Plain)
    return torch.stack([found[name] for name in ("plain", "positive", "negative")])
