"""The token grammar: states, bans, loss mask."""

import numpy as np
import pytest

from realvr.config import LatentSettings
from realvr.families.base import TokenIds
from realvr.policy.spans import State, ban_table, parse

S, L, E, EOS = 10, 11, 12, 2
TOKENS = TokenIds(start=S, latent=L, end=E, image=13, pad=0, eos=(EOS, 3), banned=(13, 14))
FREE = LatentSettings(k=2)
T, A, P, F = State.TEXT, State.AWAIT, State.SPENT, State.FORCED


@pytest.mark.parametrize(
    ("ids", "states", "loss", "closed"),
    [
        ([S, L, L, E, 5, EOS], [T, F, F, A, P, P], [0, 0, 0, 0, 1, 1], True),
        ([5, 6, S, L, L, E, 7], [T, T, T, F, F, A, P], [1, 1, 0, 0, 0, 0, 1], True),
        ([5, EOS], [T, T], [1, 1], False),
        ([S, L, L, 5, 6], [T, F, F, A, A], [0, 0, 0, 1, 1], False),
        ([S, L, L, 5, E, 6], [T, F, F, A, A, P], [0, 0, 0, 0, 0, 1], True),
        ([5, S, L], [T, T, F], [1, 0, 0], False),
        ([S], [T], [0], False),
        ([], [], [], False),
    ],
    ids=["closed", "text-first", "no-span", "unclosed", "text-in-span", "cut-in-latents", "start-only", "empty"],
)
def test_states_and_loss(ids, states, loss, closed) -> None:
    parsed = parse(ids, TOKENS, FREE)
    assert parsed.states.tolist() == states
    assert parsed.loss.tolist() == [bool(x) for x in loss]
    assert parsed.closed is closed
    assert parsed.latent_positions.tolist() == [i for i, t in enumerate(ids) if t == L]


def test_forced_open_and_close() -> None:
    forced = LatentSettings(k=2, open="forced", close="forced")
    assert parse([S, L, L, E, 5], TOKENS, forced).states.tolist() == [F, F, F, F, P]
    with pytest.raises(ValueError, match="token 0 is 5"):
        parse([5, S], TOKENS, forced)
    with pytest.raises(ValueError, match="token 3 is 5"):
        parse([S, L, L, 5], TOKENS, forced)


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        ([5, L], "state TEXT"),
        ([E], "state TEXT"),
        ([13], "state TEXT"),
        ([S, L, 5], "token 2 is 5 where the grammar forces 11"),
        ([S, L, L, EOS], "state AWAIT"),
        ([S, L, L, 3], "state AWAIT"),
        ([S, L, L, S], "state AWAIT"),
        ([S, L, L, L], "state AWAIT"),
        ([S, L, L, E, S], "state SPENT"),
        ([S, L, L, E, E], "state SPENT"),
    ],
)
def test_what_the_grammar_forbids(ids, what) -> None:
    with pytest.raises(ValueError, match=what):
        parse(ids, TOKENS, FREE)


def test_several_spans() -> None:
    parsed = parse([S, L, L, E, 5, S, L, L, 6], TOKENS, FREE, max_spans=2)
    assert parsed.states.tolist() == [T, F, F, A, T, T, F, F, A]
    assert [s.latents for s in parsed.spans] == [(1, 2), (6, 7)]
    assert not parsed.closed
    assert parsed.loss.tolist() == [False] * 4 + [True, False, False, False, True]


def test_ban_table_is_what_parse_enforces() -> None:
    """Every id is either sampled by some state without complaint, or banned in the table."""
    table = ban_table(TOKENS, 16)
    before = {State.TEXT: [], State.AWAIT: [S, L, L], State.SPENT: [S, L, L, E]}
    for state, ids in before.items():
        for token in range(16):
            try:
                parse([*ids, token], TOKENS, FREE)
                allowed = True
            except ValueError:
                allowed = False
            assert allowed != bool(table[state, token]), (state, token)
    assert table.sum(1).tolist() == [4, 6, 5]
    assert np.array_equal(table[:, L].numpy(), [True] * 3)
