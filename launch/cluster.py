"""A Ray cluster for one run: started on this machine or joined, with the run's resources placed and checked.

Everything ends with the `with` block: actors, placement, and a local Ray with all its processes, also after an
exception, Ctrl-C, or a SIGKILL of the driver (see `reaper.py`).
"""

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import reaper
from launch.config import ClusterSettings
from launch.errors import UserError
from launch.watchdog import NOTE_EVERY_S

log = logging.getLogger(__name__)

MIB = 2**20
MIN_SHM = 256 * MIB
MAX_OBJECT_STORE = 8 * 2**30
TOKEN_BUNDLE = {"CPU": 0.001}  # stands for a bundle of nothing, which Ray refuses
RAY_GRACE_S = 4.0  # for Ray's own clean-up after its driver
SOCKET_ROOM = 107 - 62  # a Unix socket path has 107 bytes, and Ray's own part below the temporary folder takes 62
# Passed from the driver to workers when set; everything else a worker needs is given explicitly.
WORKER_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "PYTHONHASHSEED", "TORCHDYNAMO_DISABLE"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"),
    *("LAUNCH_STOP_FILE", "LAUNCH_STAGE"),
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "MIOPEN_USER_DB_PATH", "TRITON_INTERPRET"),
)
WORKER_PREFIXES = ("VLLM_", "NCCL_", "RCCL_", "GLOO_", "FI_", "TORCH_NCCL_", "MIOPEN_", "HSA_")
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_ray_token = secrets.token_hex(32)  # one a process: Ray caches the first it reads


@dataclass
class Cluster:
    """A run's hold on Ray: the placement of its bundles and where its workers log.

    Attributes:
        placement: Ray's placement group; bundle i holds the resources of `bundles[i]`.
        log_dir: every worker writes `<name>-<rank>.log` here (a shared file system when there are several nodes).
        env: variables that every worker gets.
        seconds: how long start-up took: `ray` and `placement`.
    """

    placement: Any
    bundles: list[dict[str, float]]
    log_dir: Path
    settings: ClusterSettings
    env: dict[str, str]
    seconds: dict[str, float]
    actors: list[Any] = field(default_factory=list)

    def start_actor(self, cls: type, args: Sequence, bundle: int, cpus: float, gpus: float, env: Mapping) -> Any:
        """A Ray actor of class `cls` in a bundle; it is killed when the cluster closes. Never restarted by Ray."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if not 0 <= bundle < len(self.bundles):
            raise IndexError(f"bundle {bundle} of {len(self.bundles)}")
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": {**self.env, **{key: str(value) for key, value in env.items()}}},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.placement, bundle),
        }
        actor = ray.remote(cls).options(**options).remote(*args)
        self.actors.append(actor)
        return actor

    def kill_actor(self, actor: Any) -> None:
        """End an actor's process at once (and, through Ray, the processes it started)."""
        import ray

        ray.kill(actor, no_restart=True)
        self.actors = [other for other in self.actors if other is not actor]


@contextlib.contextmanager
def open_cluster(settings: ClusterSettings, bundles: Sequence[Mapping[str, float]], log_dir: Path) -> Iterator[Cluster]:
    """Start or join Ray and reserve `bundles` (for example `[{"CPU": 1, "GPU": 1}] * 4`), each on one node.

    Raises:
        UserError: too little /dev/shm, no cluster at the address, or resources that do not come within
            `settings.deadline_s` (at once on a local cluster, which cannot grow).
    """
    import ray

    if ray.is_initialized():
        raise RuntimeError("Ray is already initialised in this process: one cluster at a time")
    bundles = [{name: float(amount) for name, amount in bundle.items() if amount} or TOKEN_BUNDLE for bundle in bundles]
    log_dir = Path(log_dir).absolute()
    log_dir.mkdir(parents=True, exist_ok=True)
    _quiet_ray()
    start = time.monotonic()
    with _local_ray(settings) if settings.address == "local" else _joined_ray(settings):
        ray_s = time.monotonic() - start
        placement = _place(bundles, settings)
        seconds = {"ray": ray_s, "placement": time.monotonic() - start - ray_s}
        cluster = Cluster(placement, bundles, log_dir, settings, worker_environment(os.environ), seconds)
        try:
            yield cluster
        finally:
            for actor in list(cluster.actors):
                cluster.kill_actor(actor)
            ray.util.remove_placement_group(placement)


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the driver that workers get: thread counts, caches, offline switches, vLLM and NIC settings."""
    return {
        key: value
        for key, value in environ.items()
        if (key in WORKER_VARIABLES or key.startswith(WORKER_PREFIXES))
        and not any(word in key.split("_") for word in SECRET_WORDS)
    }


def translate_rocm_visibility(environ: MutableMapping[str, str]) -> None:
    """Ray refuses ROCR_VISIBLE_DEVICES without HIP_VISIBLE_DEVICES: move the list over before Ray starts."""
    if rocr := environ.pop("ROCR_VISIBLE_DEVICES", None):
        environ.setdefault("HIP_VISIBLE_DEVICES", rocr)


def shortage(
    bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]], limit: str = ""
) -> str | None:
    """What is missing to place `bundles` on `nodes` (resources each), as one line; None when they fit.

    Bundles are placed largest first, each on the first node with room, as a packing scheduler would.
    """
    room = [dict(node) for node in nodes]
    unplaced: list[Mapping[str, float]] = []
    for bundle in sorted(bundles, key=lambda b: (b.get("GPU", 0), b.get("CPU", 0)), reverse=True):
        free = next((n for n in room if all(n.get(k, 0) + 1e-9 >= v for k, v in bundle.items())), None)
        if free is None:
            unplaced.append(bundle)
            continue
        for name, amount in bundle.items():
            free[name] -= amount
    if not unplaced:
        return None
    names = sorted({name for bundle in bundles for name in bundle}, reverse=True)
    wanted = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in names}
    offered = {name: sum(node.get(name, 0) for node in nodes) for name in names}
    short = [name for name in names if wanted[name] > offered[name] + 1e-9]
    where = f"{len(nodes)} node" + ("s" if len(nodes) != 1 else "")
    if short:
        missing = ", ".join(f"{_number(wanted[n])} {n}s wanted but {_number(offered[n])} there" for n in short)
    else:
        missing = f"enough in total, but no node has room for a bundle of {_amounts(unplaced[0])}"
        short = sorted(unplaced[0], reverse=True)
    return (
        f"too few {' and '.join(f'{name}s' for name in short)}: {missing} ({where}{limit}; the run reserves "
        f"{_bundles(bundles)}); lower learner.ranks, learner.cpus/gpus or the number of engines, or give it more"
    )


def object_store_bytes(shm_free: int, memory: int) -> int:
    """Size of a local object store: 30 % of memory, at most half of the free /dev/shm and 8 GiB.

    Raises:
        UserError: less than 256 MiB of /dev/shm is free (Docker's default is 64 MiB).
    """
    if shm_free < MIN_SHM:
        raise UserError(
            f"/dev/shm: {shm_free // MIB} MiB free, at least {MIN_SHM // MIB} MiB needed for images, latents and "
            "weights between processes; start the container with --shm-size=8g (or --ipc=host), or delete what fills it"
        )
    return max(min(int(0.3 * memory), shm_free // 2, MAX_OBJECT_STORE), 100 * MIB)


def _number(value: float) -> str:
    return f"{value:g}"


def _amounts(bundle: Mapping[str, float]) -> str:
    return " + ".join(f"{_number(amount)} {name}" for name, amount in sorted(bundle.items(), reverse=True))


def _bundles(bundles: Sequence[Mapping[str, float]]) -> str:
    kinds: dict[str, int] = {}
    for bundle in bundles:
        kinds[_amounts(bundle)] = kinds.get(_amounts(bundle), 0) + 1
    return ", ".join(f"{count} × ({kind})" for kind, count in kinds.items())


def _alive_nodes() -> list[dict[str, float]]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _place(bundles: list[dict[str, float]], settings: ClusterSettings) -> Any:
    """A ready placement group, or a UserError that says what is missing."""
    import ray

    local = settings.address == "local"
    limit = f", cluster.num_cpus={_number(settings.num_cpus)}" if local and settings.num_cpus is not None else ""
    if local and (text := shortage(bundles, _alive_nodes(), limit)):
        raise UserError(text)
    placement = ray.util.placement_group(bundles, strategy="PACK")
    start = noted = time.monotonic()
    while time.monotonic() - start < settings.deadline_s:
        if placement.wait(1):
            return placement
        if time.monotonic() - noted > NOTE_EVERY_S:
            noted = time.monotonic()
            log.warning("waiting for resources since %.0f s: %s", noted - start, _missing(bundles))
    text = _missing(bundles)
    ray.util.remove_placement_group(placement)
    raise UserError(f"{text} (waited cluster.deadline_s={settings.deadline_s:g} s)")


def _missing(bundles: list[dict[str, float]]) -> str:
    import ray

    if text := shortage(bundles, _alive_nodes()):
        return text
    free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
    return (
        f"too few free CPUs or GPUs: the run reserves {_bundles(bundles)}, free now are {_amounts(free) or 'none'}; "
        "other jobs hold the rest: end them or wait longer (cluster.deadline_s)"
    )


@contextlib.contextmanager
def _local_ray(settings: ClusterSettings) -> Iterator[None]:
    """Ray on this machine, loopback only, in a short temporary folder of its own."""
    import ray
    from ray._private import ray_constants

    shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else MIN_SHM * 8
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    store = object_store_bytes(shm, memory)
    translate_rocm_visibility(os.environ)
    folder = _short_folder()
    mark = secrets.token_hex(8)
    switches = {
        "RAY_worker_niceness": "0",  # Ray's default of 15 starves learners on a busy machine
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name: listen on 127.0.0.1 only
        "RAY_prestart_worker_first_driver": "0",  # every worker has variables of its own: idle ones would be waste
        "RAY_enable_worker_prestart": "0",
    }
    if os.environ.get("RAY_AUTH_MODE", "token") == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        # Ray turns the token on for a cluster of its own; ours lives in memory instead of ~/.ray.
        switches["RAY_AUTH_TOKEN"] = os.environ.get("RAY_AUTH_TOKEN", _ray_token)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, ray_constants, "ENABLE_RAY_CLUSTER", ray_constants.ENABLE_RAY_CLUSTER)
        ray_constants.ENABLE_RAY_CLUSTER = False  # as the variable says, which this process has read already
        watcher = reaper.start(f"{reaper.CLUSTER_MARK}={mark}", RAY_GRACE_S, folder)
        stack.callback(reaper.finish, watcher)
        stack.enter_context(_variables(switches, ("RAY_AUTH_MODE",)))
        stack.callback(ray.shutdown)
        # The mark is for Ray's processes only, not for what the driver starts later.
        with _variables({reaper.CLUSTER_MARK: mark}), _sigterm_kept():
            ray.init(
                address="local",
                num_cpus=settings.num_cpus,
                include_dashboard=False,
                object_store_memory=store,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder),
                _node_ip_address="127.0.0.1",
            )
        yield


@contextlib.contextmanager
def _joined_ray(settings: ClusterSettings) -> Iterator[None]:
    """Connect to a running cluster as one job of its own; leaving ends the job's actors, not the cluster."""
    import ray

    address = settings.address
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address != "auto":
        if not host or not port.isdigit():
            raise UserError(f"cluster.address: got {address!r}, want local, auto or host:port")
        try:
            socket.create_connection((host, int(port)), timeout=min(settings.deadline_s, 30)).close()
        except OSError as error:
            raise UserError(
                f"cluster.address: nothing answers at {address} ({error}); start Ray there (`ray start --head "
                "--port=…`), correct the address, or use cluster.address=local"
            ) from None
    try:
        with _sigterm_kept():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ray.exceptions.RayError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"cluster.address: cannot join {address} ({reason}); start Ray first, set RAY_AUTH_MODE and its token as "
            "the cluster has them, or use cluster.address=local"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _variables(values: Mapping[str, str], also_restore: Sequence[str] = ()) -> Iterator[None]:
    """Environment variables inside the block; they and `also_restore` are put back afterwards."""
    before = {key: os.environ.get(key) for key in (*values, *also_restore)}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _quiet_ray() -> None:
    """Ray's warnings and its notes about dead workers go to our log at level debug: our own errors tell the same."""
    from ray._private import worker

    logging.getLogger("ray").setLevel(logging.ERROR)
    worker.print_to_stdstream = lambda data, *_, **__: log.debug("ray: %s", " ".join(data["lines"]))


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray replaces the driver's SIGTERM handler; one that the run has set (stop at the next step) stays."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _short_folder() -> Path:
    """A fresh temporary folder whose path leaves room for Ray's sockets: TMPDIR if short enough, else /tmp."""
    parent = tempfile.gettempdir()
    if len(parent.encode()) + len("/ray-12345678") > SOCKET_ROOM:
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="ray-", dir=parent))
