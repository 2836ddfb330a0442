"""What runs on each node of a batch job: check the shared disk, clear stale sessions, start Ray, watch it.

A batch script (`launch slurm` writes it) starts `python -m launch.nodes head` on the first node and `… worker` on the
others, each as a watched step: when Ray's processes on a node are gone, the step ends with an error. The folder of the
attempt, on the shared disk, is all they have in common:

<folder>/canary      written by the batch shell; every node must read the same text
         token       Ray's authentication token
         node-<host>  written by every node: its address
         head        address of the head, written when it is ready
         done        written at the end: what goes now was meant to go
"""

import argparse
import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch import reaper
from launch.cluster import SOCKET_ROOM, object_store_bytes, translate_rocm_visibility
from launch.errors import UserError
from launch.files import write_atomic

log = logging.getLogger(__name__)

ATTEMPT_VARIABLE = "LAUNCH_ATTEMPT"  # <job>.<restart>: all processes of one attempt carry it
NODE_RESOURCE = "launch_node"  # one a node: counts the nodes that have joined
PORTS_A_NODE = 1250
FIRST_WORKER_PORT = 20  # above a node's first port; Ray's own services lie below
OPEN_FILES = 65535
LOOK_S = 2.0
RETRY_S = 5.0
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Node:
    """One node's part in an attempt."""

    folder: Path
    """The attempt's folder on the shared disk."""
    attempt: str
    """`<job>.<restart>`."""
    nodes: int
    """Nodes that the job has."""
    index: int
    """0 for the head."""
    scratch: Path
    """Node-local folder for Ray's session."""
    interface: str | None
    """Network device whose address Ray uses; None takes the host's own."""
    cpus: int | None
    """CPUs that Ray may use; None means all that this process may use."""
    gpus: int | None
    """GPUs that Ray may use; None lets Ray look."""
    object_store: int | None
    """Bytes of the object store; None means 30 % of memory."""
    deadline_s: float
    """Seconds to wait for the canary, the head, all nodes."""
    canary: str
    """What the canary file holds."""

    @property
    def host(self) -> str:
        """The node's name for SLURM, which differs from the host's where several nodes share one."""
        return os.environ.get("SLURMD_NODENAME") or socket.gethostname()

    @property
    def mark(self) -> str:
        """Environment mark of Ray's processes on this node."""
        return f"{reaper.CLUSTER_MARK}={self.attempt}-{self.host}"

    @property
    def session(self) -> Path:
        """Ray's temporary folder; in /tmp if the path would be too long for its sockets."""
        path = self.scratch / f"ray-{self.attempt}"
        return path if len(str(path).encode()) <= SOCKET_ROOM else Path("/tmp") / path.name

    @property
    def done(self) -> bool:
        """Whether the attempt has ended."""
        return (self.folder / "done").exists()


def first_port(job: int, node: int) -> int:
    """First of a node's 1,250 ports: below the ephemeral range, apart for jobs and nodes that share a host."""
    return 12000 + job % 4 * 5000 + node % 4 * PORTS_A_NODE


def port_options(first: int, head: bool) -> list[str]:
    """Options of `ray start` that pin every port: services from `first` on, workers from `first + 20` on."""
    names = ["node-manager", "object-manager", "runtime-env-agent", "dashboard-agent-grpc"]
    options = [f"--{name}-port={first + 1 + place}" for place, name in enumerate(names)]
    options += [f"--dashboard-agent-listen-port={first + 5}", f"--metrics-export-port={first + 6}"]
    if head:
        options += [f"--port={first}", f"--dashboard-port={first + 7}", f"--ray-client-server-port={first + 8}"]
    last = first + PORTS_A_NODE - 1
    return [*options, f"--min-worker-port={first + FIRST_WORKER_PORT}", f"--max-worker-port={last}"]


def check_ports(first: int, ephemeral: Path = EPHEMERAL) -> str | None:
    """A warning when the ports reach into the range from which the system gives out its own; None if all is well."""
    low = int(ephemeral.read_text().split()[0]) if ephemeral.is_file() else 32768
    if first + PORTS_A_NODE <= low:
        return None
    return f"ports {first}-{first + PORTS_A_NODE - 1} reach into the ephemeral range, which begins at {low}: may clash"


def address_of(interface: str | None) -> str:
    """IPv4 address of a network device, or of this host.

    Raises:
        UserError: there is no such device, or it has no address.
    """
    if interface is None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # of no packet: the system only picks the device that it would use
            return probe.getsockname()[0]
        return "127.0.0.1"
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe.fileno(), 0x8915, interface.encode().ljust(256, b"\0"))  # SIOCGIFADDR
        except OSError as error:
            known = ", ".join(sorted(name for _, name in socket.if_nameindex()))
            raise UserError(
                f"{socket.gethostname()}: network device '{interface}' has no IPv4 address ({error.strerror}); devices "
                f"here: {known}; correct interface in the profile"
            ) from error
    return socket.inet_ntoa(packed[20:24])


def raise_open_files() -> int:
    """Raise the limit of open files to 65,535 or as far as the system allows; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return soft


def check_canary(node: Node) -> None:
    """Wait until this node reads the text that the batch shell wrote, and answer with a file of its own.

    Raises:
        UserError: the folder is not the same on this node, or cannot be written.
    """
    file, end = node.folder / "canary", time.monotonic() + min(node.deadline_s, 60)
    while (found := file.read_text().strip() if file.is_file() else None) != node.canary:
        if time.monotonic() > end:
            what = "is not there" if found is None else f"holds {found!r} instead of {node.canary!r}"
            raise UserError(
                f"{node.host}: {file} {what}: the folder is not shared between the nodes; put runs_dir on a file "
                "system that all nodes see (and bind it into the container)"
            )
        time.sleep(0.5)
    try:
        write_atomic(node.folder / f"node-{node.host}", address_of(node.interface) + "\n")
    except OSError as error:
        raise UserError(f"{node.host}: cannot write into {node.folder} ({error.strerror})") from error


def clear_stale(node: Node) -> list[str]:
    """End what an earlier attempt of this job left on the node, and remove sessions that no process uses."""
    job, _, restart = node.attempt.rpartition(".")
    cleared = []
    for attempt in (f"{job}.{number}" for number in range(int(restart))):
        mark = f"{ATTEMPT_VARIABLE}={attempt}"
        if pids := reaper.marked(mark):
            cleared.append(f"{len(pids)} processes of attempt {attempt}")
            reaper.reap(mark, grace_s=0)
    for folder in {node.session.parent, node.scratch}:
        for session in folder.glob("ray-*.*"):
            attempt = session.name.removeprefix("ray-")
            if attempt != node.attempt and not reaper.marked(f"{ATTEMPT_VARIABLE}={attempt}") and _ours(session):
                shutil.rmtree(session, ignore_errors=True)
                cleared.append(str(session))
    return cleared


def start_options(node: Node, own: str, head: str | None) -> list[str]:
    """Arguments of `ray start`; `head` is the head's `ip:port`, None on the head itself."""
    job = int("".join(filter(str.isdigit, node.attempt.partition(".")[0])) or 0)
    first = first_port(job, node.index)
    if warning := check_ports(first):
        log.warning("%s: %s", node.host, warning)
    store = node.object_store
    if store is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        store = object_store_bytes(shutil.disk_usage("/dev/shm").free, memory)
    options = ["--head", "--include-dashboard=false", "--dashboard-host=127.0.0.1"] if head is None else []
    options += [f"--address={head}"] if head is not None else []
    options += [f"--node-ip-address={own}", f"--temp-dir={node.session}", f"--object-store-memory={store}"]
    options += [f"--num-cpus={node.cpus if node.cpus is not None else len(os.sched_getaffinity(0))}"]
    options += [f"--num-gpus={node.gpus}"] if node.gpus is not None else []
    options += ["--resources", json.dumps({NODE_RESOURCE: 1}), "--disable-usage-stats"]
    return options + port_options(first, head is None)


def ray_environment(node: Node, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of `ray start`: mark, token, workers at normal priority, AMD's device list under HIP's name."""
    env = dict(environ)
    translate_rocm_visibility(env)
    name, _, value = node.mark.partition("=")
    return env | {
        name: value,
        ATTEMPT_VARIABLE: node.attempt,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(node.folder / "token"),
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
    }


def start_ray(node: Node, stop: threading.Event) -> None:
    """Start Ray on this node; a worker waits for the head and tries again until the deadline.

    Raises:
        UserError: the head did not come, or `ray start` fails (with its last words).
    """
    end, own, marker = time.monotonic() + node.deadline_s, address_of(node.interface), node.folder / "head"
    while True:
        head = None
        if node.index > 0:
            what = f"{node.host}: the head did not come within {node.deadline_s:g} s: see {node.folder / 'head.log'}"
            _wait_for(lambda: marker.is_file() or stop.is_set() or node.done, end, what)
            if not marker.is_file():
                return
            head = marker.read_text().strip()
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *start_options(node, own, head)]
        done = subprocess.run(
            command, env=ray_environment(node, os.environ), capture_output=True, text=True, check=False
        )
        if done.returncode == 0 or stop.is_set():
            break
        words = " ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-3:])
        if node.done:
            return
        if node.index == 0 or time.monotonic() + RETRY_S > end:
            raise UserError(f"{node.host}: ray start failed with status {done.returncode}: {words}")
        log.warning("%s: ray start failed (%s); once more in %g s", node.host, words, RETRY_S)
        reaper.reap(node.mark, grace_s=0)
        stop.wait(RETRY_S)
    if node.index == 0 and not stop.is_set():
        port = next(option.partition("=")[2] for option in command if option.startswith("--port="))
        write_atomic(marker, f"{own}:{port}\n")


def watch(node: Node, stop: threading.Event) -> None:
    """Return when the attempt is done or somebody asks; fail when a Ray process of this node is gone.

    Raises:
        UserError: names the process that is gone and where its log is.
    """
    names = {"raylet", "gcs_server"} if node.index == 0 else {"raylet"}
    while not stop.wait(LOOK_S) and not node.done:
        alive = {_name(pid) for pid in reaper.marked(node.mark)}
        if gone := names - alive:
            if node.done:
                return
            logs = node.session / "session_latest" / "logs"
            raise UserError(
                f"{node.host}: Ray's {' and '.join(sorted(gone))} is gone; its logs: {_kept_logs(node, logs)}"
            )


def serve(node: Node) -> None:
    """All that a node does, until the attempt is done."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the batch shell and the driver heed it
    limit = raise_open_files()
    check_canary(node)
    for what in clear_stale(node):
        log.warning("%s: cleared %s", node.host, what)
    watcher = reaper.start(node.mark, grace_s=5, folder=node.session)
    try:
        start_ray(node, stop)
        log.info("%s: Ray is up, %d open files allowed, session in %s", node.host, limit, node.session)
        watch(node, stop)
    finally:
        reaper.finish(watcher)


def wait_for_nodes(folder: Path, nodes: int, deadline_s: float) -> str:
    """Wait for the head, then for exactly `nodes` nodes in Ray; returns the head's address.

    Raises:
        UserError: fewer by the deadline; names the nodes that are missing.
    """
    import ray

    end, marker = time.monotonic() + deadline_s, folder / "head"
    _wait_for(marker.is_file, end, f"the head did not come within {deadline_s:g} s: see {folder / 'head.log'}")
    address, begun = marker.read_text().strip(), time.monotonic()
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        while (there := int(ray.cluster_resources().get(NODE_RESOURCE, 0))) < nodes:
            if time.monotonic() > end:
                written = sorted(path.name.removeprefix("node-") for path in folder.glob("node-*"))
                raise UserError(
                    f"{there} of {nodes} nodes have joined Ray within {deadline_s:g} s; these passed the canary: "
                    f"{', '.join(written)}; see {folder}/worker-*.log for the others"
                )
            time.sleep(1)
        log.info("%d of %d nodes after %.0f s", there, nodes, time.monotonic() - begun)
    finally:
        ray.shutdown()
    return address


def _wait_for(ready: Callable[[], bool], end: float, what: str) -> None:
    while not ready():
        if time.monotonic() > end:
            raise UserError(what)
        time.sleep(0.5)


def _kept_logs(node: Node, logs: Path) -> Path:
    """Copy the logs of Ray's services to the shared disk: the node-local folder goes with the attempt."""
    kept = node.folder / f"ray-logs-{node.host}"
    kept.mkdir(exist_ok=True)
    for pattern in ("gcs_server*", "raylet*"):
        for file in logs.glob(pattern):
            shutil.copyfile(file, kept / file.name)
    return kept


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # ended meanwhile
        return ""


def _ours(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


def main(arguments: list[str] | None = None) -> None:
    """`python -m launch.nodes head|worker|wait …`, started by the batch script."""
    parser = argparse.ArgumentParser(prog="launch.nodes", description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=["head", "worker", "wait"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--deadline", type=float, default=600)
    parser.add_argument("--canary", default="")
    parser.add_argument("--interface")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"))
    parser.add_argument("--cpus", type=int)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--object-store-mb", type=int)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        if given.role == "wait":
            print(wait_for_nodes(given.folder, given.nodes, given.deadline), flush=True)
            return
        place = int(os.environ.get("SLURM_NODEID", 0)) + 1 if given.role == "worker" else 0
        store = given.object_store_mb * 2**20 if given.object_store_mb is not None else None
        attempt = os.environ.get(ATTEMPT_VARIABLE, "0.0")
        where = (given.folder, attempt, given.nodes, place, given.scratch, given.interface)
        serve(Node(*where, given.cpus, given.gpus, store, given.deadline, given.canary))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
