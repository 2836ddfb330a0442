"""The second family through the same engine: deepstack and interleaved M-RoPE."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from realvr.data.examples import Example
from realvr.rollout.hf_engine import HfEngine
from realvr.rollout.records import Sampling
from realvr.rollout.vllm_engine import VllmEngine
from realvr.rollout.weights_file import write_weights
from tests.realvr.rollout.world import FORCED, FREE, ROLLOUT, Replay, gap, model_settings, noisy_weights


@pytest.fixture(scope="module")
def engine(fluent3: Path) -> Iterator[VllmEngine]:
    engine = VllmEngine(model_settings(fluent3), FREE, ROLLOUT, seed=0)
    yield engine
    engine.close()


def test_qwen3_greedy_and_groups(engine: VllmEngine, asked: list[Example], fluent3: Path) -> None:
    reference = HfEngine(model_settings(fluent3), FREE, ROLLOUT, seed=0)
    greedy, seeds = Sampling(n=1, temperature=0.0, max_new_tokens=32), range(len(asked))
    for latent in (FORCED, FREE):
        engine.set_latent(latent)
        reference.latent = latent
        found = gap(engine.generate(asked, greedy, seeds), reference.generate(asked, greedy, seeds), engine.grammar.end)
        print(found)
        assert found.tokens and found.latents <= 1e-4 and found.logprobs <= 1e-5
        assert found.latent_count >= 2 * latent.k and found.closed
    sampling, replay = Sampling(n=8, temperature=0.9, max_new_tokens=28), Replay(fluent3, FREE)
    groups = engine.generate(asked, sampling, seeds)
    gaps = [replay(g.example, r, sampling.temperature) for g in groups for r in g.rollouts]
    assert max(p for p, _ in gaps) <= 1e-5 and max(z for _, z in gaps) <= 1e-4


def test_qwen3_takes_new_weights(engine: VllmEngine, asked: list[Example], fluent3: Path, tmp_path: Path) -> None:
    reference = HfEngine(model_settings(fluent3), FREE, ROLLOUT, seed=0)
    engine.set_latent(FREE)
    changed = noisy_weights(fluent3, seed=2)
    checksum = write_weights(tmp_path / "w.safetensors", changed)
    greedy, seeds = Sampling(n=1, temperature=0.0, max_new_tokens=24), range(len(asked))
    before = engine.generate(asked, greedy, seeds)
    for one in (engine, reference):
        one.load_weights(tmp_path / "w.safetensors", 7, checksum)
    ours, theirs = (e.generate(asked, greedy, seeds) for e in (engine, reference))
    found = gap(ours, theirs, engine.grammar.end)
    assert found.tokens and found.latents <= 1e-4 and found.logprobs <= 1e-5
    assert gap(before, ours, engine.grammar.end).logprobs > 1e-3
    held = engine.llm.collective_rpc("weights_held", args=(str(tmp_path / "w.safetensors"),))[0]
    assert held["different"] == held["unseen"] == 0 and held["equal"] + held["probed"] == len(changed)
