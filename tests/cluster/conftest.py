"""A real SLURM on this machine: slurmctld and two slurmd (virtual nodes), with munge, from Debian's packages."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.counting import host

CONFIG = """
ClusterName=tiny
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPort=11016
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
JobRequeue=1
MpiDefault=none
KillWait=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port=11017 CPUs=1 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port=11018 CPUs=1 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Install SLURM and munge when they are not there; the reason why that is impossible, or None."""
    programs = ("slurmctld", "slurmd", "sbatch", "munged", "mungekey")
    if all(shutil.which(program) for program in programs):
        return None
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        return "SLURM and munge are not installed, and only root on a Debian machine can install them here"
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "slurm-wlm", "munge"]):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"slurm-wlm and munge cannot be installed: {done.stderr.strip()[-300:]}"
    return None


def start_munge() -> bool:
    """Start munged unless it runs; whether this call did."""
    if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0:
        return False
    if not Path("/etc/munge/munge.key").exists():
        subprocess.run(["mungekey", "-c"], check=True)
    Path("/run/munge").mkdir(exist_ok=True)
    subprocess.run(
        ["chown", "-R", "munge:munge", "/etc/munge", "/run/munge", "/var/lib/munge", "/var/log/munge"], check=True
    )
    Path("/etc/munge/munge.key").chmod(0o400)
    Path("/run/munge").chmod(0o755)
    subprocess.run(["su", "-s", "/bin/bash", "munge", "-c", "/usr/sbin/munged"], check=True)
    return True


def end(pid_file: Path) -> None:
    """End a daemon by the file that holds its process id."""
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
        for _ in range(100):
            os.kill(pid, 0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
    except (OSError, ValueError):  # gone already
        return


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of a SLURM with two nodes of one CPU each."""
    if os.getuid() != 0:
        pytest.skip("slurmctld and slurmd want root here")
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=host(), folder=folder))
    environment = os.environ | {"SLURM_CONF": str(config)}
    munged = start_munge()
    try:
        subprocess.run(["slurmctld", "-f", str(config)], env=environment, check=True)
        for node in ("n1", "n2"):
            subprocess.run(["slurmd", "-f", str(config), "-N", node], env=environment, check=True)
        command, deadline = ["sinfo", "--noheader", "--format=%t %D"], time.monotonic() + 60
        while "idle 2" not in (said := subprocess.run(command, env=environment, capture_output=True, text=True).stdout):
            assert time.monotonic() < deadline, f"the nodes do not become idle: {said}"
            time.sleep(1)
        yield environment
    finally:
        subprocess.run(["scancel", "--user=root"], env=environment, check=False)
        time.sleep(2)
        for name in ("slurmd.n1", "slurmd.n2", "slurmctld"):
            end(folder / f"{name}.pid")
        if munged:
            end(Path("/run/munge/munged.pid"))
