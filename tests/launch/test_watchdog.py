"""Waits end with a reason."""

import time

import pytest

from launch.errors import UserError
from launch.watchdog import DeadlineError, Waiter, WorkerDied, log_tail, wait


@pytest.fixture(scope="module")
def remote(cluster):
    import ray

    @ray.remote(num_cpus=0)
    def task(seconds: float, error: Exception | None = None) -> float:
        time.sleep(seconds)
        if error is not None:
            raise error
        return seconds

    return task.remote


def test_results_come_in_the_order_of_the_references(remote):
    assert wait([remote(0.3), remote(0.0), remote(0.1)], 60, "sleepers") == [0.3, 0.0, 0.1]
    assert wait([], 1, "nothing") == []


def test_a_deadline_names_what_and_who_is_missing(remote):
    waiters = [Waiter("learner rank 0", 0), Waiter("learner rank 1", 1)]
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"learner step 7 after 2 s: 1 of 2 missing \(learner rank 1\)"):
        wait([remote(0), remote(30)], 2, "learner step 7", waiters)
    assert time.monotonic() - start < 10


def test_bad_input_explains_other_failures(remote, monkeypatch):
    monkeypatch.setattr("launch.watchdog.GRACE_S", 30.0)
    refs = [
        remote(0, RuntimeError("connection closed by peer")),
        remote(0.5, UserError("a.jsonl record 1: bad; mend it")),
    ]
    with pytest.raises(UserError) as caught:
        wait(refs, 60, "reading")
    assert str(caught.value) == "a.jsonl record 1: bad; mend it"


def test_other_errors_keep_their_type_and_say_where(remote):
    with pytest.raises(KeyError) as caught:
        wait([remote(0, KeyError("gone"))], 60, "look-up", [Waiter("scorer rank 3", 3)])
    assert "scorer rank 3 failed during look-up" in caught.value.__notes__[0]


def test_log_tail_gives_the_last_lines_or_the_stack(tmp_path):
    log = tmp_path / "w.log"
    assert log_tail(log) == log_tail(None) == ""
    log.write_text("\n".join(f"line {i}" for i in range(50)) + "\n")
    assert log_tail(log, lines=2) == "line 48\nline 49"
    assert log_tail(log, stack=True).endswith("line 49")
    log.write_text("before\nTimeout (0:00:01)!\nThread 1 (most recent call first):\n  File x\nafter")
    assert log_tail(log, stack=True).startswith("Timeout") and "before" not in log_tail(log, stack=True)


def test_worker_died_survives_a_trip_between_processes():
    import pickle

    error = pickle.loads(pickle.dumps(WorkerDied("rollout rank 2 died", 2)))
    assert (str(error), error.rank) == ("rollout rank 2 died", 2)
