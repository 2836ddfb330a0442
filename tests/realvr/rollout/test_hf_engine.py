"""The reference engine's own parts: the grammar rule, drawing a token, text, start-up errors of both engines."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from launch.errors import UserError
from realvr.config import LatentSettings, ModelSettings, RolloutSettings
from realvr.data.examples import Example
from realvr.families.base import TokenIds
from realvr.rollout.completions import completion_seed, completion_text
from realvr.rollout.hf_engine import HfEngine, Rule, draw, next_rule
from realvr.rollout.records import Sampling
from realvr.rollout.vllm_args import engine_args, refuse, sync_backend
from tests.realvr.rollout.world import FREE, ROLLOUT, Replay, model_settings

IDS = TokenIds(start=10, latent=11, end=12, image=13, pad=15, eos=(14,), banned=(13,))
TEXT, AWAIT, SPENT = (13, 11, 12), (13, 11, 10, 14), (13, 11, 12, 10)


@pytest.mark.parametrize(
    ("tokens", "opening", "closing", "rule"),
    [
        ([], "free", "free", Rule(banned=TEXT)),
        ([], "forced", "free", Rule(forced=10)),
        ([1], "free", "free", Rule(banned=TEXT)),
        ([1, 10], "free", "free", Rule(forced=11)),
        ([10, 11], "free", "free", Rule(forced=11)),
        ([10, 11, 11], "free", "free", Rule(banned=AWAIT)),
        ([10, 11, 11], "free", "forced", Rule(forced=12)),
        ([10, 11, 11, 1, 2], "free", "free", Rule(banned=AWAIT)),
        ([10, 11, 11, 1, 12], "free", "free", Rule(banned=SPENT)),
        ([10, 11, 11, 12, 1], "forced", "forced", Rule(banned=SPENT)),
    ],
)
def test_grammar_rule(tokens: list[int], opening: str, closing: str, rule: Rule) -> None:
    found = next_rule(tokens, IDS, LatentSettings(k=2, open=opening, close=closing))
    assert found.forced == rule.forced and set(found.banned) == set(rule.banned)


def test_draw_is_the_distribution_it_reports() -> None:
    logits, sampling = torch.tensor([2.0, 1.0, 0.0, 5.0]), Sampling(temperature=0.5)
    expected = torch.tensor([4.0, 2.0, 0.0]).softmax(-1)
    counts = np.zeros(4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4000):
        token, logprob = draw(logits, [3], [], sampling, generator)
        counts[token] += 1
        assert logprob == pytest.approx(float(expected[token].log()), abs=1e-6)
    assert np.abs(counts[:3] / 4000 - expected.numpy()).max() < 0.03 and counts[3] == 0


def test_draw_greedy_nucleus_and_penalty() -> None:
    logits, generator = torch.tensor([2.0, 1.9, -1.0]), torch.Generator().manual_seed(0)
    assert draw(logits, [], [], Sampling(temperature=0.0), generator)[0] == 0
    penalised = Sampling(temperature=0.0, repetition_penalty=1.5)
    assert draw(logits, [], [0, 2], penalised, generator)[0] == 1
    token, logprob = draw(logits, [], [0, 1], penalised, generator)
    assert token == 0 and logprob == pytest.approx(float(torch.tensor([2 / 1.5, 1.9 / 1.5, -1.0]).log_softmax(-1)[0]))
    narrow = Sampling(temperature=1.0, top_p=0.3)
    assert {draw(logits, [], [], narrow, generator) for _ in range(20)} == {(0, 0.0)}


def test_seeds_do_not_collide_between_neighbours() -> None:
    seeds = {completion_seed(seed, i) for seed in range(50) for i in range(16)}
    assert len(seeds) == 800 and all(0 <= s < 2**63 for s in seeds)


def test_text_keeps_markers_and_drops_eos(tiny_qwen25: Path) -> None:
    from realvr.data.prompts import PromptBuilder

    builder = PromptBuilder(str(tiny_qwen25))
    tokens = builder.tokenizer("<|lvr_start|><|lvr|><|lvr_end|>\n<answer>red</answer> circle")["input_ids"]
    ended = [*tokens, *builder.ids.eos]
    text = completion_text(builder.tokenizer, ended, builder.ids.eos, ())
    assert text == "<|lvr_start|><|lvr|><|lvr_end|>\n<answer>red</answer> circle"
    assert completion_text(builder.tokenizer, tokens, builder.ids.eos, ("</answer>",)).endswith("red</answer>")


def test_reference_replays_exactly(fluent25: Path, asked: list[Example]) -> None:
    """The cached loop against one full forward: the reference is worth comparing with."""
    engine = HfEngine(model_settings(fluent25), FREE, ROLLOUT, seed=0)
    sampling, replay = Sampling(n=3, temperature=1.0, max_new_tokens=24), Replay(fluent25, FREE)
    groups = engine.generate(asked, sampling, range(len(asked)))
    gaps = [replay(g.example, r, 1.0) for g in groups for r in g.rollouts]
    assert max(p for p, _ in gaps) <= 1e-5 and max(z for _, z in gaps) <= 1e-4
    assert any(len(r.latents) for g in groups for r in g.rollouts)
    again = engine.generate(asked[1:2], replace(sampling, n=2), [1])[0]
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(again.rollouts, groups[1].rollouts[:2], strict=True))
    with pytest.raises(UserError, match=r"record e0: .*max_model_len 4096"):
        engine.generate(asked, replace(sampling, max_new_tokens=4096), range(len(asked)))


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_checkpoint_without_latent_tokens_is_refused(tiny_qwen25: Path, tmp_path: Path, engine: str) -> None:
    from realvr.rollout.vllm_engine import VllmEngine

    folder = tmp_path / "plain"
    shutil.copytree(tiny_qwen25, folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / file).read_text()
        (folder / file).write_text(text.replace("<|lvr_end|>", "<|box_end|>"))
    assert json.loads((folder / "tokenizer.json").read_text())
    with pytest.raises(UserError, match=r"lacks <\|lvr_end\|>"):
        (HfEngine if engine == "hf" else VllmEngine)(model_settings(folder), FREE, ROLLOUT, seed=0)


@pytest.mark.parametrize(
    "argument",
    [
        {"pipeline_parallel_size": 2},
        {"speculative_config": {"method": "ngram"}},
        {"worker_cls": "x"},
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"enable_prompt_embeds": True},
    ],
)
def test_engine_arguments_that_would_lose_latents(argument: dict) -> None:
    with pytest.raises(UserError, match=f"rollout.engine_args.{next(iter(argument))}"):
        refuse(argument)


def test_engine_arguments_merge(tiny_qwen25: Path) -> None:
    from realvr.rollout.latent_core import Grammar

    model = ModelSettings(path=str(tiny_qwen25))
    rollout = RolloutSettings(engine_args={"max_num_seqs": 3, "async_scheduling": True})
    args = engine_args(model, rollout, Grammar.of(IDS, FREE), {}, seed=2**40 + 5, on_cpu=True)
    assert args["max_num_seqs"] == 3 and args["max_model_len"] == 4096 and args["seed"] == 5
    assert args["scheduler_cls"].endswith("LatentAsyncScheduler")
    args = engine_args(model, ROLLOUT, Grammar.of(IDS, FREE), {}, seed=0, on_cpu=True)
    assert args["scheduler_cls"].endswith("LatentScheduler")
    assert sync_backend("auto", on_cpu=True) == "shm" and sync_backend("nccl", on_cpu=False) == "nccl"
    with pytest.raises(UserError, match=r"rollout\.sync: nccl"):
        sync_backend("nccl", on_cpu=True)
