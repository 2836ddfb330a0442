"""An engine with hardly any KV memory and tiny batches: chunked prefill, preemption, resumption."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from realvr.config import RolloutSettings
from realvr.data.examples import Example
from realvr.rollout.hf_engine import HfEngine
from realvr.rollout.records import Group, Sampling
from realvr.rollout.scheduler import _KeepOwnLatents
from realvr.rollout.vllm_engine import VllmEngine
from tests.realvr.rollout.world import FREE, ROLLOUT, Replay, gap, model_settings

BLOCK = 32
SCARCE = {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 24, "max_num_seqs": 16, "max_model_len": 256}
LONG = Sampling(n=8, temperature=1.0, max_new_tokens=100)


@pytest.fixture(scope="module")
def engine(fluent25: Path) -> Iterator[VllmEngine]:
    settings = RolloutSettings(gpus=0, engine_args=SCARCE)
    engine = VllmEngine(model_settings(fluent25), FREE, settings, seed=0)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def replay(fluent25: Path) -> Replay:
    return Replay(fluent25, FREE)


def resumed(engine: VllmEngine) -> int:
    return engine.llm.collective_rpc("latent_stats")[0]["resumed"]


def worst(replay: Replay, groups: list[Group]) -> tuple[float, float]:
    gaps = [replay(g.example, r, LONG.temperature) for g in groups for r in g.rollouts]
    return max(p for p, _ in gaps), max(z for _, z in gaps)


def test_chunked_prefill_equals_transformers(engine: VllmEngine, asked: list[Example], fluent25: Path) -> None:
    """Prompts in chunks of at most 24 tokens, mixed with rows that decode."""
    reference = HfEngine(model_settings(fluent25), FREE, ROLLOUT, seed=0)
    assert max(engine.builder.length(e) for e in asked) > SCARCE["max_num_batched_tokens"]
    greedy, seeds = Sampling(n=1, temperature=0.0, max_new_tokens=32), [0] * len(asked)
    found = gap(engine.generate(asked, greedy, seeds), reference.generate(asked, greedy, seeds), engine.grammar.end)
    assert found.tokens and found.latents <= 1e-4 and found.logprobs <= 1e-5 and found.latent_count >= 16


def test_preempted_requests_come_back_right(engine: VllmEngine, asked: list[Example], replay: Replay) -> None:
    before = resumed(engine)
    groups = engine.generate(asked, LONG, range(len(asked)))
    logprobs, drift = worst(replay, groups)
    print("resumed", resumed(engine) - before, "replay", logprobs, drift)
    assert resumed(engine) - before >= 5
    assert logprobs <= 1e-5 and drift <= 1e-4


def test_scarcity_does_not_change_what_a_seed_draws(engine: VllmEngine, asked: list[Example]) -> None:
    """Crowded out and resumed, or alone with room: the stream of a completion is its own."""
    before = resumed(engine)
    crowded = engine.generate(asked, LONG, [5, 6, 7, 8])
    assert resumed(engine) > before
    before = resumed(engine)
    for example, seed, group in zip(asked[:2], (5, 6), crowded, strict=False):
        for i in (0, 7):
            alone = engine.generate([example], Sampling(i + 1, 1.0, 1.0, 100 if i == 0 else 30), [seed])[0].rollouts[i]
            n = len(alone.tokens)
            assert np.array_equal(alone.tokens, group.rollouts[i].tokens[:n])


@pytest.fixture
def aligned(engine: VllmEngine, asked: list[Example]) -> Example:
    """A prompt that START, K latents and END fill up to whole blocks: their block can be shared by content."""
    for extra in range(BLOCK):
        example = Example("aligned", asked[0].images, asked[0].question + " a" * extra, "red")
        if (engine.builder.length(example) + FREE.k + 2) % BLOCK == 0:
            return example
    raise AssertionError("no length fits")


@pytest.mark.parametrize("scheduler", ["ours", "vllm's own"])
def test_siblings_latents_never_leak_through_the_prefix_cache(
    engine: VllmEngine, aligned: Example, replay: Replay, monkeypatch: pytest.MonkeyPatch, scheduler: str
) -> None:
    """Latents that differ between siblings of equal token ids (here: noise) must stay their own after a preemption.

    vLLM's own scheduler is the control: there the same batch is corrupted, so this test can see it.
    """
    if scheduler != "ours":
        monkeypatch.delattr(_KeepOwnLatents, "_preempt_request")
    engine.set_latent(FREE.model_copy(update={"open": "forced", "close": "forced"}))
    core = engine.llm.llm_engine.model_executor.driver_worker.worker.latent_core()
    step = core.step

    def noisy(logits: torch.Tensor, hidden: torch.Tensor, *rest: torch.Tensor) -> None:
        step(logits, hidden + 0.5 * torch.randn_like(hidden), *rest)

    torch.manual_seed(0)
    monkeypatch.setattr(core, "step", noisy)
    monkeypatch.setattr(replay, "latent", engine.latent)
    before = resumed(engine)
    groups = engine.generate([aligned], replace(LONG, n=16), [3])
    logprobs, _ = worst(replay, groups)
    print(scheduler, "resumed", resumed(engine) - before, "replay", logprobs)
    assert resumed(engine) > before
    if scheduler == "ours":
        assert logprobs <= 1e-5
    else:
        assert logprobs > 1e-2
    assert engine.llm.reset_prefix_cache()
    engine.set_latent(FREE)
