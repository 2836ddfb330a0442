"""The vLLM engine against plain transformers, float32."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from launch.errors import UserError
from realvr.config import LatentSettings
from realvr.data.examples import Example
from realvr.rollout.hf_engine import HfEngine
from realvr.rollout.records import Group, Sampling
from realvr.rollout.vllm_engine import VllmEngine
from realvr.rollout.weights_file import file_checksum, write_weights
from tests.realvr.rollout import world
from tests.realvr.rollout.world import FORCED, FREE, ROLLOUT, Replay, gap, model_settings, noisy_weights

GREEDY = Sampling(n=1, temperature=0.0, max_new_tokens=32)
GROUP = Sampling(n=8, temperature=0.9, max_new_tokens=28)


@pytest.fixture(scope="module")
def engine(fluent25: Path) -> Iterator[VllmEngine]:
    engine = VllmEngine(model_settings(fluent25), FREE, ROLLOUT, seed=0)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def free_grammar(engine: VllmEngine) -> None:
    engine.set_latent(FREE)


@pytest.fixture(scope="module")
def reference(fluent25: Path) -> HfEngine:
    return HfEngine(model_settings(fluent25), FREE, ROLLOUT, seed=0)


@pytest.fixture(scope="module")
def groups(engine: VllmEngine, asked: list[Example]) -> list[Group]:
    engine.set_latent(FREE)
    return engine.generate(asked, GROUP, range(len(asked)))


@pytest.mark.parametrize(
    "latent",
    [FREE, FORCED, LatentSettings(open="forced", k=8), LatentSettings(close="forced", k=3)],
    ids=["free", "forced", "open-forced", "close-forced"],
)
def test_greedy_equals_transformers(engine: VllmEngine, reference: HfEngine, asked: list[Example], latent) -> None:
    engine.set_latent(latent)
    reference.latent = latent
    found = gap(
        engine.generate(asked, GREEDY, [0] * len(asked)),
        reference.generate(asked, GREEDY, [0] * len(asked)),
        engine.grammar.end,
    )
    print(found)
    assert found.tokens
    assert found.latents <= 1e-4
    assert found.logprobs <= 1e-5
    assert found.latent_count >= 2 * latent.k  # the comparison was about something
    assert found.closed >= 1


def test_groups_replay_under_teacher_forcing(engine: VllmEngine, groups: list[Group], fluent25: Path) -> None:
    """Each of 4 × 8 sampled completions, against one full forward over prompt and completion."""
    replay = Replay(fluent25, FREE)
    gaps = [replay(group.example, r, GROUP.temperature) for group in groups for r in group.rollouts]
    print(np.max(gaps, axis=0))
    assert max(logprob for logprob, _ in gaps) <= 1e-5
    assert max(drift for _, drift in gaps) <= 1e-4


def test_groups_use_the_whole_grammar(engine: VllmEngine, groups: list[Group]) -> None:
    """Free opening and closing happened, at different places, and placeholders were never sampled."""
    ids = engine.builder.ids
    rollouts = [r for group in groups for r in group.rollouts]
    opened = [r for r in rollouts if ids.start in r.tokens]
    closed = [r for r in opened if ids.end in r.tokens]
    assert len({int(np.flatnonzero(r.tokens == ids.start)[0]) for r in opened}) > 3
    assert 0 < len(closed) < len(opened) < len(rollouts) or len(closed) > 8
    assert any(r.finish == "stop" for r in rollouts)
    for r in rollouts:
        assert not set(r.tokens.tolist()) & set(ids.banned)
        assert np.count_nonzero(r.tokens == ids.start) <= 1
        assert (r.versions == engine.version).all()
        assert r.text.count("<|lvr|>") == len(r.latents) == len(r.latent_positions)
        assert (r.finish == "stop") == (int(r.tokens[-1]) in ids.eos)
        assert not r.text.endswith("<|im_end|>")


def test_siblings_differ_and_seeds_repeat(engine: VllmEngine, groups: list[Group], asked: list[Example]) -> None:
    """A rollout is a function of (seed of its example, its index): other neighbours in the batch change nothing."""
    assert len({tuple(r.tokens) for r in groups[0].rollouts}) == GROUP.n
    alone = engine.generate(asked[1:2], GROUP, [1])[0]
    for mine, other in zip(alone.rollouts, groups[1].rollouts, strict=True):
        assert np.array_equal(mine.tokens, other.tokens)
    other_seed = engine.generate(asked[1:2], GROUP, [77])[0]
    assert not any(np.array_equal(a.tokens, b.tokens) for a, b in zip(alone.rollouts, other_seed.rollouts, strict=True))


def test_evaluation_decode_stops_at_a_string(engine: VllmEngine, reference: HfEngine, asked: list[Example]) -> None:
    """Greedy with repetition penalty and a stop string, kept in the text; equal to the reference's."""
    reference.latent = FREE
    plain = engine.generate(asked[:2], GREEDY, [0, 0])
    sampling = Sampling(n=1, temperature=0.0, max_new_tokens=32, repetition_penalty=1.2)
    penalised = engine.generate(asked[:2], sampling, [0, 0])
    assert not np.array_equal(plain[0].rollouts[0].tokens, penalised[0].rollouts[0].tokens)
    words = [engine.builder.tokenizer.decode(int(t)) for t in penalised[0].rollouts[0].tokens[:-1]]
    word = [w for w in words if w.isascii() and w.isprintable() and not w.startswith("<|")][-1]
    sampling = replace(sampling, stop=(word,))
    ours, theirs = (e.generate(asked[:2], sampling, [0, 0]) for e in (engine, reference))
    assert gap(ours, theirs, engine.grammar.end).logprobs <= 1e-5
    assert any(g.rollouts[0].finish == "stop" and g.rollouts[0].text.endswith(word) for g in ours)


def test_top_p_logprobs_are_of_the_nucleus(engine: VllmEngine, asked: list[Example]) -> None:
    groups = engine.generate(asked[:1], Sampling(n=8, temperature=1.0, top_p=0.5, max_new_tokens=12), [3])
    narrow = np.concatenate([r.logprobs for r in groups[0].rollouts])
    assert narrow.min() > np.log(1e-3) and (narrow <= 1e-6).all()


def test_new_weights_are_proved_and_used(
    engine: VllmEngine, reference: HfEngine, asked: list[Example], fluent25: Path, tmp_path: Path
) -> None:
    """After a sync greedy rollouts are those of transformers with the new weights; stale caches would show here."""
    before = engine.generate(asked, GREEDY, [0] * len(asked))
    changed = noisy_weights(fluent25, seed=1)
    version = engine.version + 1
    checksum = write_weights(tmp_path / "w.safetensors", changed)
    for one in (engine, reference):
        one.latent = FREE
        one.load_weights(tmp_path / "w.safetensors", version, checksum)
        assert one.version == version
    ours, theirs = (e.generate(asked, GREEDY, [0] * len(asked)) for e in (engine, reference))
    found = gap(ours, theirs, engine.grammar.end)
    assert found.tokens and found.latents <= 1e-4 and found.logprobs <= 1e-5
    assert gap(before, ours, engine.grammar.end).logprobs > 1e-2
    assert all((r.versions == version).all() for g in ours for r in g.rollouts)
    assert engine.llm.get_weight_version() == str(version)
    held = engine.llm.collective_rpc("weights_held", args=(str(tmp_path / "w.safetensors"),))[0]
    assert held["different"] == held["unseen"] == 0 and held["equal"] + held["probed"] == len(changed)
    # Without the frozen tower, back to the first weights; and the proof sees a file that was not loaded.
    restored = {n: t for n, t in load_file(fluent25 / "model.safetensors").items() if not n.startswith("visual.")}
    checksum = write_weights(tmp_path / "r.safetensors", restored)
    for one in (engine, reference):
        one.load_weights(tmp_path / "r.safetensors", version + 1, checksum)
    held = engine.llm.collective_rpc("weights_held", args=(str(tmp_path / "w.safetensors"),))[0]
    assert held["different"] == len(restored)
    for one in (engine, reference):
        one.load_weights(fluent25 / "model.safetensors", version + 2, file_checksum(fluent25 / "model.safetensors"))
    assert gap(before, engine.generate(asked, GREEDY, [0] * len(asked)), engine.grammar.end).logprobs == 0


def test_bad_weights_leave_the_engine_alone(
    engine: VllmEngine, asked: list[Example], fluent25: Path, tmp_path: Path
) -> None:
    path, version = tmp_path / "w.safetensors", engine.version
    before = engine.generate(asked[:1], GREEDY, [0])
    tensors = load_file(fluent25 / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    checksum = write_weights(path, tensors)
    with pytest.raises(UserError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"):
        engine.load_weights(path, version + 1, checksum)
    with pytest.raises(UserError, match="checksum"):
        engine.load_weights(path, version + 1, "0" * 64)
    assert engine.version == version
    assert gap(before, engine.generate(asked[:1], GREEDY, [0]), engine.grammar.end).logprobs == 0


def test_requests_that_cannot_run_are_refused(engine: VllmEngine, asked: list[Example]) -> None:
    with pytest.raises(UserError, match=r"record e0: .*max_model_len"):
        engine.generate(asked[:1], Sampling(n=2, max_new_tokens=5000), [0])
    crowd = Example("many", asked[0].images * 9, "Which?", "a")
    with pytest.raises(UserError, match="record many: 9 images"):
        engine.generate([crowd], GREEDY, [0])
    assert engine.generate([], GREEDY, []) == []


def test_interrupted_generation_leaves_nothing_behind(
    engine: VllmEngine, asked: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = iter(range(5)), engine.llm.llm_engine.step

    def breaking() -> list:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine.llm.llm_engine, "step", breaking)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(asked, GROUP, range(len(asked)))
    monkeypatch.undo()
    after = engine.generate(asked[1:2], GROUP, [1])
    assert len(after[0].rollouts) == GROUP.n
    stats = engine.llm.collective_rpc("latent_stats")[0]
    assert stats["waiting"] == 0 and stats["live"] <= GROUP.n


def test_siblings_compute_their_prompt_once(
    engine: VllmEngine, asked: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a step encodes one picture only: vLLM would admit siblings early and compute each prompt G times."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    pictures, block = asked[:3], 32
    monkeypatch.setattr(scheduler, "max_num_encoder_input_tokens", 20)
    scheduled, schedule = [], scheduler.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        out = schedule(*args, **kwargs)
        scheduled.append(out.total_num_scheduled_tokens)
        return out

    monkeypatch.setattr(scheduler, "schedule", counting)
    engine.reset_caches()
    groups = engine.generate(pictures, GROUP, range(3))
    lengths = [engine.builder.length(e) for e in pictures]
    prompts = sum(n + (GROUP.n - 1) * (n - (n - 1) // block * block) for n in lengths)
    decoded = sum(len(r.tokens) - 1 for g in groups for r in g.rollouts)
    assert min(lengths) > block
    assert sum(scheduled) == prompts + decoded


def test_several_images_in_one_prompt(engine: VllmEngine, reference: HfEngine, asked: list[Example]) -> None:
    both = [Example("two", (asked[0].images[0], asked[1].images[0]), "Which one is red?", "first")]
    reference.latent = FREE
    found = gap(engine.generate(both, GREEDY, [0]), reference.generate(both, GREEDY, [0]), engine.grammar.end)
    assert found.tokens and found.logprobs <= 1e-5


def test_world_pictures_have_different_lengths(engine: VllmEngine, asked: list[Example]) -> None:
    assert len({engine.builder.length(e) for e in asked}) == len(asked) == len(world.QUESTIONS)
