"""A call that hangs, crashes or raises costs itself; the pool goes on and leaves no process behind."""

import os
import time

import pytest

from realvr.rewards.workers import Call, WorkerPool

HERE = "tests.realvr.rewards.bad_rewards."


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2) as pool:
        yield pool


def test_outcomes_keep_their_order(pool):
    calls = [
        Call(HERE + "slow_on_wait", {"completions": ["fine"]}),
        Call(HERE + "slow_on_wait", {"completions": ["wait"]}, limit_s=0.5),
        Call(HERE + "dies_on_crash", {"completions": ["crash"]}),
        Call(HERE + "raises", {"completions": ["x"]}),
        Call(HERE + "dies_on_crash", {"completions": ["fine", "fine"]}),
    ]
    begun = time.monotonic()
    outcomes = pool.run(calls)
    assert [o.status for o in outcomes] == ["ok", "timeout", "crashed", "raised", "ok"]
    assert outcomes[0].value == [1.0] and outcomes[4].value == [1.0, 1.0]
    assert "KeyError" in outcomes[3].reason and "0.5 s" in outcomes[1].reason
    assert time.monotonic() - begun < 50, "the sleeping call was waited for"


def test_close_leaves_no_process():
    pool = WorkerPool(1)
    (outcome,) = pool.run([Call("os.getpid", {})])
    assert alive(outcome.value)
    pool.close()
    assert not alive(outcome.value)
    (again,) = pool.run([Call("os.getpid", {})])
    assert again.ok and again.value != outcome.value
    pool.close()
