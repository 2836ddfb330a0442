"""`launch preflight`: this machine for real, and what is said of nodes that differ."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.errors import UserError
from launch.preflight import Finding, _speed, judge, show
from launch.probe import Request, nic, readable, shared, visibility_traps
from launch.staging import STAGE_VARIABLE, staged
from tests.launch import toy


def node(host, **changes):
    """A node's answers, all well."""
    good = {
        "host": host,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "gpus": "4 × A100, CUDA 13.0",
        "driver": "NVIDIA 580",
        "traps": [],
        "nic": "hsn0 up",
        "env": {"NCCL_CROSS_NIC": "1", "CACHE": "/tmp/x"},
        "shared": {"same": True, "write": 900.0, "read": 900.0, "answer": host},
        "shm": (100 << 30, 200 << 30),
        "limits": {"open files": 65535, "locked memory": -1, "processes": -1},
        "free": {"run folder": (10**12, 10**13), "scratch": (10**12, 10**13)},
        "inputs": {"model": "ok"},
    }
    return good | changes


def disk(write, answer="n2", same=True):
    return {"same": same, "write": write, "read": 99.0, "answer": answer}


def judged(tmp_path, *nodes, gpus=4):
    for each in nodes:
        (tmp_path / each["host"]).touch()
    env = {"NCCL_CROSS_NIC": "1", "CACHE": "/tmp/$USER"}
    request = Request("/runs/x", "c", "/tmp", "hsn0", env, {"model": "/models/m"})
    return {line.check: line for line in judge(nodes, request, gpus, tmp_path)}


def test_nodes_that_are_well(tmp_path):
    lines = judged(tmp_path, node("n1"), node("n2"))
    assert {line.level for line in lines.values()} == {"ok"}
    assert lines["network"].found == "hsn0 up (all 2 nodes)"


@pytest.mark.parametrize(
    ("check", "level", "changes", "said"),
    [
        ("versions", "FAIL", {"versions": {"python": "3.11.7", "torch": "2.14"}}, r"torch: 2.13.0 \(n1\); 2.14 \(n2\)"),
        ("versions", "FAIL", {"versions": {"python": "3.11.7"}}, r"torch: 2.13.0 \(n1\); absent \(n2\)"),
        ("GPUs", "FAIL", {"gpus": "3 × A100, CUDA 13.0"}, r"^3 × A100, CUDA 13.0"),
        ("GPU driver", "warn", {"driver": "NVIDIA 570"}, r"NVIDIA 570 \(n2\)"),
        ("GPU variables", "FAIL", {"traps": ["ROCR is set"]}, "ROCR is set"),
        ("network", "FAIL", {"nic": "error: no hsn0, there are lo"}, "no hsn0"),
        ("variables", "FAIL", {"env": {"NCCL_CROSS_NIC": None, "CACHE": "/tmp/x"}}, "NCCL_CROSS_NIC=None"),
        ("shared disk", "FAIL", {"shared": {"same": False, "error": "x: No such file"}}, "No such file"),
        ("shared disk", "FAIL", {"shared": disk(9e9, same=False)}, "another folder"),
        ("shared disk", "FAIL", {"shared": disk(9e9, "n3")}, "does not arrive"),
        ("shared disk speed", "warn", {"shared": disk(9.0)}, "slowest 9 MB/s"),
        ("/dev/shm", "FAIL", {"shm": (64 << 20, 64 << 20)}, r"67.1 MB at least \(n2\)"),
        ("/dev/shm", "warn", {"shm": (1 << 30, 1 << 30)}, r"1.1 GB at least \(n2\)"),
        ("open files", "FAIL", {"limits": {"open files": 1024, "locked memory": -1}}, r"1024 at least \(n2\)"),
        ("open files", "warn", {"limits": {"open files": 20000, "locked memory": -1}}, r"20000 at least \(n2\)"),
        ("locked memory", "warn", {"limits": {"open files": 65535, "locked memory": 65536}}, "65.5 kB"),
        ("free: scratch", "FAIL", {"free": {"run folder": (10**12, 1), "scratch": (10**8, 1)}}, "100.0 MB"),
        ("readable: model", "FAIL", {"inputs": {"model": "error: no /models/m"}}, "no /models/m"),
    ],
)  # fmt: skip
def test_a_node_that_is_not(tmp_path, check, level, changes, said):
    lines = judged(tmp_path, node("n1"), node("n2", **changes))
    assert lines[check].level == level
    assert re.search(said, lines[check].found)
    assert lines[check].advice
    others = {line.level for name, line in lines.items() if not name.startswith("shared disk") and name != check}
    assert others == {"ok"}


def test_bandwidth_is_compared_with_the_profile():
    assert _speed("x", 90, 100, 8, "cuda").level == "ok"
    assert _speed("x", 70, 100, 8, "cuda").level == "warn"
    assert _speed("x", 40, 100, 8, "cuda").level == "FAIL"
    assert _speed("x", 40, None, 8, "cpu").found == "40.00 GB/s bus bandwidth, 8 ranks (gloo)"


def test_the_exit_status_and_what_to_do(capsys):
    ok, warn = Finding("a", "ok", "fine"), Finding("b", "warn", "low", "raise it")
    assert show([ok, warn]) == 0
    assert "warn: b: low. raise it" in capsys.readouterr().out
    assert show([ok, warn, Finding("c", "FAIL", "gone [x]", "bring it back")]) == 1
    said = capsys.readouterr().out
    assert "FAIL: c: gone [x]. bring it back" in said
    assert "not ready" in said


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ROCR_VISIBLE_DEVICES": "0,1"}, "without HIP_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1"}, "both set"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "hides all GPUs"),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, "disagree"),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}, ""),
        ({}, ""),
    ],
)
def test_traps_of_visibility(variables, said):
    found = visibility_traps(variables, 2)
    assert said in "; ".join(found)
    assert bool(found) == bool(said)
    assert not visibility_traps({"CUDA_VISIBLE_DEVICES": ""}, 0)  # Ray hides GPUs from those who asked for none


def test_what_a_node_can_read(tmp_path, monkeypatch):
    assert readable(str(tmp_path)) == "ok"
    assert readable(str(tmp_path / "none")).startswith("error: no ")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert readable("Qwen/Qwen2.5-VL-7B") == "hub id: not here yet"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert readable("Qwen/Qwen2.5-VL-7B").startswith("error: no ")
    assert nic("lo") == "lo up"
    assert nic("hsn9").startswith("error: no hsn9, there are ")
    (tmp_path / ".preflight").mkdir()
    (tmp_path / ".preflight" / "canary").write_text("c")
    answer = shared(tmp_path, "c")
    assert answer["same"]
    assert answer["write"] > 0
    assert (tmp_path / ".preflight" / answer["answer"]).read_text() == "c"
    assert not shared(tmp_path, "d")["same"]
    assert "No such file" in shared(tmp_path / "none", "c")["error"]


def test_weights_are_copied_once_a_node(tmp_path, monkeypatch):
    source = tmp_path / "model"
    (source / "sub").mkdir(parents=True)
    (source / "w.safetensors").write_bytes(os.urandom(1 << 20))
    (source / "sub" / "a.json").write_text("{}")
    monkeypatch.delenv(STAGE_VARIABLE, raising=False)
    assert staged(str(source)) == str(source)
    code = "import sys; from launch.staging import staged; print(staged(sys.argv[1]))"
    environment = os.environ | {STAGE_VARIABLE: str(tmp_path / "local")}
    ask = [sys.executable, "-c", code, str(source)]
    asked = [subprocess.Popen(ask, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = {process.communicate(timeout=60)[0].strip() for process in asked}
    assert len(told) == 1
    copy = Path(told.pop())
    assert sorted((tmp_path / "local").iterdir()) == [copy, copy.with_suffix(".lock")]
    assert (copy / "w.safetensors").read_bytes() == (source / "w.safetensors").read_bytes()
    monkeypatch.setenv(STAGE_VARIABLE, str(tmp_path / "local"))
    first = copy.stat().st_ctime_ns
    assert staged(str(source)) == str(copy)
    assert copy.stat().st_ctime_ns == first
    assert staged("Qwen/hub-id") == "Qwen/hub-id"
    time.sleep(0.01)
    (source / "sub" / "a.json").write_text("{1}")  # another checkpoint under the same name
    assert staged(str(source)) != str(copy)
    monkeypatch.setattr("launch.staging.free_bytes", lambda folder: 1000)
    (source / "more").write_text("x")
    with pytest.raises(UserError, match=r"1\.0 kB are free, .* takes 1\.0 MB; set stage: false"):
        staged(str(source))


def test_this_machine(tmp_path):
    (tmp_path / "t.yaml").write_text("job: toy.train\nname: toy\ncluster: {num_cpus: 2}\n")
    (tmp_path / "p.yaml").write_text("env: {NCCL_DEBUG: WARN}\ninterface: lo\n")
    environment = toy.environment(tmp_path, NCCL_DEBUG="WARN", COLUMNS="200")
    command = toy.command("preflight", "t.yaml", "--profile", "p.yaml")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"all-reduce within a node +ok +\d+\.\d+ GB/s bus bandwidth, 2 ranks \(gloo\)", done.stdout)
    assert re.search(r"versions +ok +.*torch 2", done.stdout)
    assert re.search(r"variables +ok +1 as in the profile", done.stdout)
    assert done.stdout.splitlines()[-1] == "ready"
