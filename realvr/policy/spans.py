"""The token grammar of a completion: which row may sample what, where latents stand, what the loss sees.

A span is `<|lvr_start|>`, K forced `<|lvr|>`, free or forced `<|lvr_end|>`. Only the first start opens one, an end can
only close one, EOS cannot end one, `<|lvr|>` is never sampled. The rollout engines sample under these rules and the
learner computes its log-probabilities under the same bans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from realvr.config import LatentSettings
from realvr.families.base import TokenIds


class State(IntEnum):
    """What a row may sample. FORCED rows sample nothing: their log-probability is 0."""

    TEXT = 0  # before the span
    AWAIT = 1  # the latents are written, `<|lvr_end|>` is awaited
    SPENT = 2  # after the last span
    FORCED = 3


@dataclass(frozen=True)
class Span:
    """start, end: indices of `<|lvr_start|>` and `<|lvr_end|>` (None: never closed); latents: indices between them."""

    start: int
    latents: tuple[int, ...]
    end: int | None


@dataclass(frozen=True)
class Parsed:
    """A completion of N tokens under the grammar.

    states: int64 [N], the State in which each token was chosen. loss: bool [N], True where GRPO's loss stands: it drops
    a closed span from start to end inclusive, of an unclosed one the start and the latents; EOS is in it.
    """

    states: np.ndarray
    loss: np.ndarray
    spans: tuple[Span, ...]

    @property
    def closed(self) -> bool:
        """Whether there is a span and every span was closed."""
        return bool(self.spans) and all(s.end is not None for s in self.spans)

    @property
    def latent_positions(self) -> np.ndarray:
        """Indices of all latents, int64 [n]."""
        return np.array([i for s in self.spans for i in s.latents], dtype=np.int64)


def banned_ids(state: State, tokens: TokenIds) -> tuple[int, ...]:
    """Ids that `state` may never sample (vision placeholders and `<|lvr|>` always)."""
    always = (*tokens.banned, tokens.latent)
    if state is State.TEXT:
        return (*always, tokens.end)
    if state is State.AWAIT:
        return (*always, tokens.start, *tokens.eos)
    return (*always, tokens.end, tokens.start)


def ban_table(tokens: TokenIds, vocabulary: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """bool [3, V], True where the State of the row's number may not sample. FORCED has no row."""
    table = torch.zeros(3, vocabulary, dtype=torch.bool)
    for state in (State.TEXT, State.AWAIT, State.SPENT):
        table[state, list(banned_ids(state, tokens))] = True
    return table.to(device)


class _Reader:
    """Follows the grammar a token at a time."""

    def __init__(self, tokens: TokenIds, latent: LatentSettings, max_spans: int):
        self.tokens, self.latent, self.max_spans = tokens, latent, max_spans
        self.resting = State.TEXT
        self.left = 0  # latents still to come
        self.start: int | None = None
        self.spans: list[Span] = []
        self.latents: list[int] = []

    def read(self, i: int, token: int) -> State:
        """Take token i and return the State it was chosen in; ValueError if the grammar forbids it."""
        if self.left:
            self._expect(i, token, self.tokens.latent)
            self.latents.append(i)
            self.left -= 1
            if not self.left:
                self.resting = State.AWAIT
            return State.FORCED
        if self.resting is State.AWAIT and self.latent.close == "forced":
            self._expect(i, token, self.tokens.end)
            self._close(i)
            return State.FORCED
        state = State.FORCED if i == 0 and self.latent.open == "forced" else self.resting
        if state is State.FORCED:
            self._expect(i, token, self.tokens.start)
        elif token in banned_ids(state, self.tokens):
            raise ValueError(f"token {i} is {token}, which state {state.name} may not sample")
        if token == self.tokens.start:
            self.start, self.left, self.latents = i, self.latent.k, []
        elif token == self.tokens.end:
            self._close(i)
        return state

    def _expect(self, i: int, token: int, wanted: int) -> None:
        if token != wanted:
            raise ValueError(f"token {i} is {token} where the grammar forces {wanted}")

    def _close(self, end: int) -> None:
        self.spans.append(Span(self.start, tuple(self.latents), end))
        self.start = None
        self.resting = State.TEXT if len(self.spans) < self.max_spans else State.SPENT

    def finish(self) -> tuple[Span, ...]:
        if self.start is not None:
            self.spans.append(Span(self.start, tuple(self.latents), None))
        return tuple(self.spans)


def parse(ids: Sequence[int], tokens: TokenIds, latent: LatentSettings, max_spans: int = 1) -> Parsed:
    """Read a completion's ids [N]. Text before the span, no span, an unclosed or a cut-off span are all fine.

    ValueError names the first token that the grammar forbids: such a completion was not sampled under the same rules.
    """
    reader = _Reader(tokens, latent, max_spans)
    states = np.array([reader.read(i, int(t)) for i, t in enumerate(ids)], dtype=np.int64)
    spans = reader.finish()
    loss = np.ones(len(states), dtype=bool)
    for span in spans:
        if span.end is not None:
            loss[span.start : span.end + 1] = False
        else:
            loss[[span.start, *span.latents]] = False
    return Parsed(states, loss, spans)
