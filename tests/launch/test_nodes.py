"""What runs on each node: ports, canary, stale sessions, a real Ray of one node with a token."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import reaper
from launch.errors import UserError
from launch.nodes import (
    ATTEMPT_VARIABLE,
    Node,
    address_of,
    check_canary,
    check_ports,
    clear_stale,
    first_port,
    port_options,
    ray_environment,
    start_options,
    wait_for_nodes,
)


def node(tmp_path, **changes):
    fields = {"attempt": "7.0", "nodes": 1, "index": 0, "interface": "lo", "cpus": 1, "gpus": 0, "deadline_s": 1}
    fields |= {"folder": tmp_path, "scratch": tmp_path / "s", "object_store": 100 << 20, "canary": "x"}
    return Node(**(fields | changes))


def ports(first, head):
    found = {option.partition("=")[0]: int(option.partition("=")[2]) for option in port_options(first, head)}
    workers = range(found.pop("--min-worker-port"), found.pop("--max-worker-port") + 1)
    return list(found.values()), workers


def test_ports_lie_below_the_ephemeral_range_and_do_not_clash():
    blocks = []
    for job in range(4):
        for index in range(4):
            services, workers = ports(first_port(job, index), index == 0)
            assert len(set(services)) == len(services) == (9 if index == 0 else 6)
            assert not set(services) & set(workers)
            assert len(workers) >= 1000
            blocks.append({*services, *workers})
    assert sum(map(len, blocks)) == len(set().union(*blocks))
    assert min(map(min, blocks)) >= 10000
    assert max(map(max, blocks)) < 32768


def test_a_low_ephemeral_range_is_told(tmp_path):
    (tmp_path / "range").write_text("32768\t60999\n")
    assert check_ports(first_port(3, 3), tmp_path / "range") is None
    (tmp_path / "range").write_text("15000 65000\n")
    assert "begins at 15000: may clash" in check_ports(first_port(3, 3), tmp_path / "range")


def test_addresses():
    assert address_of("lo") == "127.0.0.1"
    assert address_of(None).count(".") == 3
    with pytest.raises(UserError, match=r"network device 'hsn9' has no IPv4 address .*devices here: .*lo"):
        address_of("hsn9")


def test_the_canary_goes_both_ways(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    with pytest.raises(UserError, match=r"n7: .*canary is not there: the folder is not shared"):
        check_canary(node(tmp_path))
    (tmp_path / "canary").write_text("of another attempt")
    with pytest.raises(UserError, match="holds 'of another attempt' instead of 'x'"):
        check_canary(node(tmp_path))
    (tmp_path / "canary").write_text("x\n")
    check_canary(node(tmp_path))
    assert (tmp_path / "node-n7").read_text() == "127.0.0.1\n"


def test_amd_devices_go_by_hips_name_and_the_token_by_its_path(tmp_path):
    env = ray_environment(node(tmp_path), {"ROCR_VISIBLE_DEVICES": "0,1,2"})
    assert env["HIP_VISIBLE_DEVICES"] == "0,1,2"
    assert "ROCR_VISIBLE_DEVICES" not in env
    assert env["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "token")
    assert "RAY_AUTH_TOKEN" not in env
    head, worker = start_options(node(tmp_path), "10.0.0.1", None), start_options(node(tmp_path), "a", "10.0.0.1:6")
    assert "--head" in head
    assert "--dashboard-host=127.0.0.1" in head
    assert "--block" not in head
    assert "--address=10.0.0.1:6" in worker


def test_what_earlier_attempts_left_is_cleared_and_what_lives_is_not(tmp_path):
    scratch = tmp_path / "s"
    for name in ("ray-7.0", "ray-7.1", "ray-8.0", "ray-9.0"):
        (scratch / name).mkdir(parents=True)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    stale = subprocess.Popen(sleep, env=os.environ | {ATTEMPT_VARIABLE: "7.0"})
    alive = subprocess.Popen(sleep, env=os.environ | {ATTEMPT_VARIABLE: "8.0"})
    try:
        while not reaper.marked(f"{ATTEMPT_VARIABLE}=8.0"):
            time.sleep(0.05)
        cleared = clear_stale(node(tmp_path, attempt="7.1"))
        assert stale.wait(10) == -signal.SIGKILL
        assert alive.poll() is None
    finally:
        alive.kill()
    assert sorted(path.name for path in scratch.iterdir()) == ["ray-7.1", "ray-8.0"]
    assert "1 processes of attempt 7.0" in cleared


def test_a_long_scratch_path_gives_way(tmp_path):
    assert node(tmp_path, scratch=Path("/short")).session == Path("/short/ray-7.0")
    assert node(tmp_path, scratch=Path("/" + 50 * "x")).session == Path("/tmp/ray-7.0")


def test_a_head_comes_up_is_counted_and_goes(tmp_path, monkeypatch):
    for name in ("RAY_AUTH_TOKEN", "RAY_ADDRESS"):  # of the cluster that other tests of this process have open
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "canary").write_text("x")
    (tmp_path / "token").write_text("ab" * 32)
    attempt = f"{os.getpid()}.0"
    environment = os.environ | {ATTEMPT_VARIABLE: attempt, "SLURMD_NODENAME": "n1"}
    arguments = ["head", "--folder", tmp_path, "--nodes", "2", "--canary", "x", "--cpus", "1", "--gpus", "0"]
    arguments += ["--scratch", tmp_path.parent, "--object-store-mb", "100", "--deadline", "100"]
    command = [sys.executable, "-m", "launch.nodes", *map(str, arguments)]
    head = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    waiter = [sys.executable, "-m", "launch.nodes", "wait", "--folder", str(tmp_path)]
    try:
        one = subprocess.run([*waiter, "--nodes", "1", "--deadline", "100"], capture_output=True, text=True)
        assert one.returncode == 0, one.stderr
        assert one.stdout.strip() == (tmp_path / "head").read_text().strip()
        two = subprocess.run([*waiter, "--nodes", "2", "--deadline", "2"], capture_output=True, text=True)
        assert two.returncode == 1
        assert "error: 1 of 2 nodes have joined Ray within 2 s; these passed the canary: n1" in two.stderr
        (tmp_path / "token").write_text("cd" * 32)
        stranger = subprocess.run([*waiter, "--nodes", "1", "--deadline", "20"], capture_output=True, text=True)
        assert stranger.returncode != 0
    finally:
        (tmp_path / "done").touch()
        _, said = head.communicate(timeout=60)
    assert head.returncode == 0, said
    assert not reaper.marked(f"LAUNCH_CLUSTER={attempt}-n1")
    assert not (tmp_path.parent / f"ray-{attempt}").exists()


def test_the_head_that_never_comes(tmp_path):
    with pytest.raises(UserError, match="the head did not come within 0 s: see"):
        wait_for_nodes(tmp_path, 2, 0)
