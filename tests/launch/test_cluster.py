"""The cluster: what is missing is said in one line, and nothing outlives the driver."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from launch import reaper
from launch.cluster import object_store_bytes, open_cluster, shortage, translate_rocm_visibility
from launch.config import ClusterSettings
from launch.errors import UserError

# A driver of its own process: a cluster, a worker with a child in another session, then an end of some kind.
DRIVER = """
import os, sys, time
from pathlib import Path
from launch.cluster import open_cluster
from launch.config import ClusterSettings
from launch.errors import UserError
from launch.group import WorkerGroup
from tests.launch.workers import Speaker

settings = ClusterSettings(num_cpus=1, deadline_s=60)
with open_cluster(settings, [{"CPU": 1}], Path(sys.argv[2])) as cluster:
    group = WorkerGroup(cluster, Speaker, 1, deadline_s=60)
    group.call("start_child")
    mark = group.call("environment", "LAUNCH_CLUSTER")[0][0]
    print(mark, os.environ.get("LAUNCH_CLUSTER"), flush=True)
    if sys.argv[1] == "exception":
        raise UserError("stopped on purpose")
    time.sleep(120)
"""

JOIN = """
import sys
from pathlib import Path
from launch.cluster import open_cluster
from launch.config import ClusterSettings
from launch.errors import UserError
from launch.group import WorkerGroup
from tests.launch.workers import Speaker

settings = ClusterSettings(address=sys.argv[1], deadline_s=60)
with open_cluster(settings, [{}, {"CPU": 0.1}], Path(sys.argv[2])) as cluster:
    print(WorkerGroup(cluster, Speaker, 1, {"word": "joined"}, cpus=0.1, bundle_offset=1, deadline_s=60).call("say"))
for bundles in ([{"CPU": 64}], [{"CPU": 1.9}]):
    try:
        with open_cluster(settings.model_copy(update={"deadline_s": 2}), bundles, Path(sys.argv[2])):
            print("should not fit")
    except UserError as error:
        print(error)
"""


def start(code: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )


def test_nothing_is_left_behind(tmp_path):
    ends = {"exception": None, "interrupt": signal.SIGINT, "kill": signal.SIGKILL}
    scratch = {end: Path(tempfile.mkdtemp(prefix="lc", dir="/tmp")) for end in ends}  # short: sockets live there
    drivers = {end: start(DRIVER, end, str(tmp_path / end), env={"TMPDIR": str(scratch[end])}) for end in ends}
    marks = {}
    for end, process in drivers.items():
        line = process.stdout.readline()
        assert line, process.stderr.read()
        mark, driver_mark = line.split()
        marks[end] = f"{reaper.CLUSTER_MARK}={mark}"
        assert driver_mark == "None"  # what the driver starts later is not Ray's
        if ends[end] is not None:
            assert reaper.marked(marks[end])
            process.send_signal(ends[end])
    for end, process in drivers.items():
        _, errors = process.communicate(timeout=60)
        assert process.returncode != 0
        assert "stopped on purpose" in errors or end != "exception"
        until = time.monotonic() + (20 if end == "kill" else 0)
        while (reaper.marked(marks[end]) or any(scratch[end].iterdir())) and time.monotonic() < until:
            time.sleep(0.2)
        assert reaper.marked(marks[end]) == []
        assert list(scratch[end].iterdir()) == []
        scratch[end].rmdir()


def test_joining_a_running_cluster(cluster, tmp_path):
    import ray

    address = ray.get_runtime_context().gcs_address
    process = start(JOIN, address, str(tmp_path))
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    joined, never, busy = output.splitlines()
    assert joined == "['joined 0']"
    assert never.startswith("too few CPUs: 64 CPUs wanted but 2 there (1 node") and "cluster.deadline_s=2 s" in never
    assert busy.startswith("too few free CPUs or GPUs: the run reserves 1 × (1.9 CPU), free now are")
    assert ray.is_initialized() and cluster.placement.wait(5)  # the cluster outlives who joined it


def test_an_address_where_nothing_answers(tmp_path):
    script = "from tests.launch.test_cluster import refused; refused()"
    process = start(script)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    closed, malformed = output.splitlines()
    assert "cluster.address: nothing answers at 127.0.0.1:9" in closed
    assert "want local, auto or host:port" in malformed


def refused() -> None:
    """Runs in a process without a cluster."""
    for address in ("127.0.0.1:9", "nonsense"):
        try:
            with open_cluster(ClusterSettings(address=address, deadline_s=5), [{"CPU": 1}], Path("/tmp")):
                print("should not be open")
        except UserError as error:
            print(error)


def test_a_local_cluster_that_is_too_small_says_so_at_once(tmp_path):
    code = """
import sys, time
from pathlib import Path
from launch.cluster import open_cluster
from launch.config import ClusterSettings
with open_cluster(ClusterSettings(num_cpus=2), [{"CPU": 1, "GPU": 1}] * 3, Path(sys.argv[1])):
    pass
"""
    process = start(code, str(tmp_path), env={"CUDA_VISIBLE_DEVICES": ""})
    _, errors = process.communicate(timeout=60)
    last = errors.strip().splitlines()[-1]
    assert "too few GPUs and CPUs: 3 GPUs wanted but 0 there, 3 CPUs wanted but 2 there" in last
    assert "cluster.num_cpus=2" in last and "3 × (1 GPU + 1 CPU)" in last


def test_shortage_on_many_nodes():
    node = {"CPU": 8.0, "GPU": 2.0}
    assert shortage([{"CPU": 1, "GPU": 1}] * 4, [node, node]) is None
    assert shortage([{"CPU": 0.5}] * 32, [node, node]) is None
    assert "5 GPUs wanted but 4 there (2 nodes" in shortage([{"CPU": 1, "GPU": 1}] * 5, [node, node])
    split = shortage([{"GPU": 4}], [node, node])
    assert "enough in total, but no node has room for a bundle of 4 GPU" in split


def test_shared_memory_is_checked_before_ray_starts():
    assert object_store_bytes(2**30, 2**40) == 2**29
    assert object_store_bytes(2**40, 2**40) == 8 * 2**30
    with pytest.raises(UserError, match=r"/dev/shm: 64 MiB free.*--shm-size"):
        object_store_bytes(64 * 2**20, 2**36)


def test_rocm_visibility_is_translated():
    environ = {"ROCR_VISIBLE_DEVICES": "2,3"}
    translate_rocm_visibility(environ)
    assert environ == {"HIP_VISIBLE_DEVICES": "2,3"}
    environ = {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}
    translate_rocm_visibility(environ)
    assert environ == {"HIP_VISIBLE_DEVICES": "1"}


def test_one_cluster_at_a_time(cluster, tmp_path):
    with (
        pytest.raises(RuntimeError, match="one cluster at a time"),
        open_cluster(ClusterSettings(), [{"CPU": 1}], tmp_path),
    ):
        pass
