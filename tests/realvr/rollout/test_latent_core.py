"""The state machine on bare tensors, against the plain-Python grammar of the reference engine."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realvr.config import LatentSettings
from realvr.families.base import TokenIds
from realvr.rollout.hf_engine import next_rule
from realvr.rollout.latent_core import Grammar, LatentCore

IDS = TokenIds(start=10, latent=11, end=12, image=13, pad=15, eos=(14,), banned=(13,))
V, D, PROMPT = 16, 4, 5


def state_at(position: int) -> torch.Tensor:
    """A hidden state that tells which position it came from."""
    return torch.full((D,), float(position))


class Runner:
    """Drives a core as an engine does, one token a request a step; forward(position) → `state_at(position)`."""

    def __init__(self, latent: LatentSettings, slots: int = 2) -> None:
        self.latent = latent
        self.core = LatentCore(Grammar.of(IDS, latent), slots, D, torch.float32, torch.device("cpu"))
        self.tokens: dict[str, list[int]] = {}

    def add(self, name: str) -> None:
        self.tokens[name] = [0] * PROMPT
        self.core.add(name, f"key-{name}", self.tokens[name], PROMPT)

    def step(self, names: list[str], choose, valid: bool = True) -> dict[str, torch.Tensor]:
        """Feed each request's last token, then append `choose(name, allowed ids)`; returns the input embeddings."""
        last = torch.tensor([self.tokens[n][-1] for n in names])
        position = torch.tensor([len(self.tokens[n]) - 1 for n in names])
        slots = self.core.slots(names)
        fed = self.core.overlay(torch.full((len(names), D), -1.0), last, position, slots)
        logits = torch.zeros(len(names), V)
        hidden = torch.stack([state_at(int(p)) for p in position])
        self.core.step(logits, hidden, last, position, slots, torch.full((len(names),), valid))
        if valid:
            for name, row in zip(names, logits, strict=True):
                allowed = torch.nonzero(row > -1).flatten().tolist()
                rule = next_rule(self.tokens[name][PROMPT:], IDS, self.latent)
                banned = [rule.forced] if rule.forced is not None else sorted(set(range(V)) - set(rule.banned))
                assert allowed == banned, (name, self.tokens[name][PROMPT:])
                self.tokens[name].append(choose(name, allowed))
        return dict(zip(names, fed, strict=True))


@settings(deadline=None, max_examples=60)
@given(
    k=st.integers(1, 4),
    opening=st.sampled_from(["free", "forced"]),
    closing=st.sampled_from(["free", "forced"]),
    seed=st.integers(0, 2**16),
)
def test_bans_and_feeds_are_the_grammars(k, opening, closing, seed):
    """Every row allows exactly what the reference grammar allows, and is fed the state of the position before it."""
    rng = np.random.default_rng(seed)
    runner = Runner(LatentSettings(k=k, open=opening, close=closing))
    names = ["a", "b", "c"]  # one more than the slots: they grow
    for name in names:
        runner.add(name)

    def choose(_name: str, allowed: list[int]) -> int:
        liked = [t for t in (IDS.start, IDS.end) if t in allowed]
        return int(rng.choice(liked if liked and rng.random() < 0.4 else allowed))

    for _ in range(20):
        batch = [n for n in names if rng.random() < 0.8] or names[:1]
        before = {n: len(runner.tokens[n]) - 1 for n in batch}
        fed = runner.step(batch, choose)
        for name, position in before.items():
            is_latent = runner.tokens[name][position] == IDS.latent
            expected = state_at(position - 1) if is_latent else torch.full((D,), -1.0)
            assert torch.equal(fed[name], expected)
    taken = runner.core.take([f"key-{n}" for n in names])
    for name in names:
        where = np.flatnonzero(np.array(runner.tokens[name]) == IDS.latent)
        latents, positions = taken[f"key-{name}"]
        assert positions[: len(where)].tolist() == where.tolist()
        assert latents[: len(where), 0].tolist() == (where - 1).tolist()


def span_then_text(_name: str, allowed: list[int]) -> int:
    return IDS.start if IDS.start in allowed else allowed[0]


@pytest.mark.parametrize("cut", range(1, 9))
def test_resumed_request_goes_on_where_its_tokens_say(cut):
    """Preempted after any token, removed (V2) or kept (V1), a request continues as one that never stopped."""
    latent = LatentSettings(k=4, close="forced")
    whole, broken = Runner(latent), Runner(latent)
    for runner in (whole, broken):
        runner.add("a")
        for _ in range(cut):
            runner.step(["a"], span_then_text)
    if cut % 2:
        broken.core.remove("a")
    broken.core.add("a", "key-a", broken.tokens["a"], PROMPT)
    for _ in range(9 - cut):
        left, right = whole.step(["a"], span_then_text), broken.step(["a"], span_then_text)
        assert torch.equal(left["a"], right["a"])
    assert whole.tokens == broken.tokens
    for mine, other in zip(whole.core.take(["key-a"])["key-a"], broken.core.take(["key-a"])["key-a"], strict=True):
        assert torch.equal(mine, other)


def test_token_sampled_ahead_and_dropped_is_forgotten():
    """The core stored a latent for a token that the scheduler then dropped: the token ids win."""
    runner = Runner(LatentSettings(k=4))
    runner.add("a")
    for _ in range(3):
        runner.step(["a"], span_then_text)
    del runner.tokens["a"][-1]
    runner.core.add("a", "key-a", runner.tokens["a"], PROMPT)
    for _ in range(5):
        runner.step(["a"], span_then_text)
    _, positions = runner.core.take(["key-a"])["key-a"]
    assert positions.tolist() == [PROMPT + 1 + j for j in range(4)]


def test_discarded_rows_change_nothing():
    """Rows of an unfinished prefill are computed but not sampled."""
    runner = Runner(LatentSettings(k=2, open="forced"))
    runner.add("a")
    before = runner.core.state.clone()
    runner.step(["a"], span_then_text, valid=False)
    live = runner.core.slot_of["a"]
    assert torch.equal(before[live], runner.core.state[live])
    assert (runner.core.position == -1).all()


def test_start_in_the_prompt_opens_nothing():
    runner = Runner(LatentSettings(k=2))
    runner.tokens["a"] = [0, 0, 0, 0, IDS.start]
    runner.core.add("a", "key-a", runner.tokens["a"], PROMPT)
    runner.step(["a"], lambda _n, allowed: allowed[0])
    assert runner.tokens["a"][-1] != IDS.latent


def test_padding_rows_keep_their_logits():
    core = LatentCore(Grammar.of(IDS, LatentSettings()), 2, D, torch.float32, torch.device("cpu"))
    logits = torch.randn(1, V)
    kept = logits.clone()
    slots = core.slots(["warm-up"])
    core.step(logits, torch.zeros(1, D), torch.tensor([IDS.start]), torch.tensor([9]), slots, torch.tensor([True]))
    assert torch.equal(logits, kept)


def test_latents_are_taken_once_and_slots_are_reused():
    runner = Runner(LatentSettings(k=2, open="forced"), slots=1)
    for name in ("a", "b"):
        runner.add(name)
        for _ in range(4):
            runner.step([name], span_then_text)
        runner.core.remove(name)
    assert set(runner.core.take(["key-a", "key-b", "key-never"])) == {"key-a", "key-b"}
    assert runner.core.take(["key-a"]) == {}
    assert not runner.core.slot_of and not runner.core.key_of and not runner.core.done


def test_taken_while_live_is_dropped_on_removal():
    runner = Runner(LatentSettings(k=2, open="forced"))
    runner.add("a")
    runner.step(["a"], span_then_text)
    assert "key-a" in runner.core.take(["key-a"])
    runner.core.remove("a")
    assert not runner.core.done and not runner.core.taken


def test_two_requests_cannot_share_a_key():
    runner = Runner(LatentSettings())
    runner.add("a")
    with pytest.raises(ValueError, match="in use"):
        runner.core.add("b", "key-a", [0] * PROMPT, PROMPT)


def test_second_span_when_the_budget_allows():
    grammar = dataclasses.replace(Grammar.of(IDS, LatentSettings(k=2, close="forced")), max_spans=2)
    runner = Runner(LatentSettings(k=2, close="forced"))
    runner.core = LatentCore(grammar, 2, D, torch.float32, torch.device("cpu"))
    tokens = [0] * PROMPT
    runner.core.add("a", "key-a", tokens, PROMPT)
    for _ in range(9):
        logits = torch.zeros(1, V)
        last, position = torch.tensor(tokens[-1:]), torch.tensor([len(tokens) - 1])
        hidden = state_at(int(position))[None]
        runner.core.step(logits, hidden, last, position, runner.core.slots(["a"]), torch.tensor([True]))
        tokens.append(span_then_text("a", torch.nonzero(logits[0] > -1).flatten().tolist()))
    span = [IDS.start, IDS.latent, IDS.latent, IDS.end]
    assert tokens[PROMPT:] == [*span, *span, 0]
    assert grammar.replay(tokens[PROMPT : PROMPT + 7]) == (2, 2, 4)


def test_grammar_survives_the_trip_to_a_worker():
    grammar = Grammar.of(IDS, LatentSettings(k=3, open="forced"))
    assert Grammar.from_dict(grammar.to_dict()) == grammar
