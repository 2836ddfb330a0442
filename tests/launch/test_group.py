"""Worker groups: lockstep calls, errors, deaths, hangs, restarts."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launch.errors import UserError
from launch.group import WorkerGroup
from launch.watchdog import DeadlineError, WorkerDied
from tests.launch.workers import Speaker


@pytest.fixture(scope="module")
def speakers(cluster):
    group = WorkerGroup(
        cluster,
        Speaker,
        2,
        {"word": "hello"},
        cpus=0.45,
        env={"HF_HUB_OFFLINE": "1"},
        deadline_s=60,
        name="speaker",
    )
    yield group
    group.kill()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_within(seconds: float, *pids: int) -> bool:
    end = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(alive(pid) for pid in pids)


def test_calls_go_to_every_rank_and_come_back_in_order(speakers):
    assert speakers.call("say", "you", what="greeting") == ["hello 0 you", "hello 1 you"]
    assert speakers.call("say", "all", per_rank=["a", "b"]) == ["hello 0 a all", "hello 1 b all"]
    assert speakers.submit("say", ranks=[1]).wait() == ["hello 1"]
    with pytest.raises(ValueError, match="per_rank has 3 entries for 2 ranks"):
        speakers.call("say", per_rank=["a", "b", "c"])


def test_large_arguments_may_be_object_references(speakers):
    import ray

    assert speakers.call("say", ray.put("shared")) == ["hello 0 shared", "hello 1 shared"]


def test_a_rank_that_is_warned_asks_for_the_whole_run(cluster, tmp_path):
    file = tmp_path / "STOP"
    env = {"LAUNCH_STOP_FILE": str(file)}
    group = WorkerGroup(cluster, Speaker, 1, cpus=0, env=env, deadline_s=60, name="warned", distributed=False)
    pid = group.call("pid")[0]
    os.kill(pid, signal.SIGUSR1)
    assert group.call("pid") == [pid]
    group.kill()
    reason, then = file.read_text().splitlines()
    assert reason.startswith(f"SIGUSR1 at process {pid} on ")
    assert then == "again"


def test_ranks_have_the_environment_of_torch_distributed(speakers):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
    first, second = speakers.call("environment", *names)
    assert first[:3] == ["0", "2", "0"] and second[:3] == ["1", "2", "0"]
    assert first[3:6] == second[3:6] and first[5] == "1"
    assert int(first[4]) > 1023


def test_secrets_of_the_driver_stay_there(speakers):
    """The driver's own Ray reads them from its environment; workers' runtime environment must not carry them."""
    from launch.cluster import worker_environment

    environ = {"WANDB_API_KEY": "x", "HF_TOKEN": "x", "VLLM_API_KEY": "x", "VLLM_USE_V2": "1", "HOME": "/h"}
    assert worker_environment(environ) == {"VLLM_USE_V2": "1"}


def test_output_goes_to_a_file_of_the_rank(speakers):
    speakers.call("say", "into the log")
    assert "saying hello into the log" in speakers.log_file(1).read_text()


def test_bad_input_in_a_worker_is_one_line_here(speakers):
    with pytest.raises(UserError) as caught:
        speakers.call("complain", 1)
    assert str(caught.value) == "train.jsonl record 7: no question; add one"
    assert speakers.call("say")[0] == "hello 0"  # nobody hangs: the group can go on


def test_bad_input_in_a_constructor_too(cluster):
    with pytest.raises(UserError, match="rank 1 of the test is bad"):
        WorkerGroup(cluster, Speaker, 2, {"bad_rank": 1}, cpus=0, bundle_offset=2, deadline_s=60, name="bad")


def test_a_failure_while_others_hang_breaks_the_group(speakers, monkeypatch):
    monkeypatch.setattr("launch.watchdog.GRACE_S", 1.0)
    with pytest.raises(ZeroDivisionError):
        speakers.call("fail", 0)
    with pytest.raises(RuntimeError, match="is broken"):
        speakers.call("say")
    speakers.restart()
    assert speakers.call("say") == ["hello 0", "hello 1"]


def test_a_death_is_told_quickly_with_the_last_words(speakers, monkeypatch):
    monkeypatch.setattr("launch.watchdog.GRACE_S", 1.0)
    pids = speakers.call("pid")
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=r"speaker rank 1 died during learner step 3: (.|\n)*last words") as caught:
        speakers.call("die", 1, what="learner step 3")
    assert time.monotonic() - start < 10
    assert caught.value.rank == 1
    speakers.restart()
    assert gone_within(10, *pids)
    assert speakers.call("say") == ["hello 0", "hello 1"]


def test_a_hang_is_told_with_the_stack(speakers):
    with pytest.raises(DeadlineError, match=r"1 of 2 missing \(speaker rank 0\)") as caught:
        speakers.call("hang_here", 0, seconds=2)
    assert "hang_here" in str(caught.value) and "workers.py" in str(caught.value)
    speakers.restart()


def test_independent_workers_restart_one_by_one(cluster):
    group = WorkerGroup(
        cluster,
        Speaker,
        2,
        {"word": "engine"},
        cpus=0,
        bundle_offset=2,
        deadline_s=60,
        name="engine",
        distributed=False,
    )
    pids = group.call("pid")
    assert group.call("environment", "RANK") == [[None], [None]]
    child = group.call("start_child", ranks=[0])[0]
    assert alive(child)
    with pytest.raises(WorkerDied):
        group.call("die", -1, ranks=[0])
    group.restart([0])
    assert group.call("pid", ranks=[1]) == [pids[1]]
    assert group.call("pid", ranks=[0]) != [pids[0]]
    assert gone_within(10, child)  # what an engine started dies with it
    child = group.call("start_child", ranks=[1])[0]
    group.kill()
    assert gone_within(10, child)


def test_exit_codes_of_children_are_seen(speakers):
    """Some of Ray's clean-up switches make a process ignore SIGCHLD, and every child then seems to end with 0."""
    assert speakers.call("exit_code_of_a_child", 3) == [3, 3]
    assert subprocess.run(["sh", "-c", "exit 4"], check=False).returncode == 4
