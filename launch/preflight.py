"""`launch preflight`: every node looked at in parallel before a run, one table, and what to do about what is wrong."""

import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.cluster import MIN_SHM, open_cluster, worker_environment
from launch.config import JobSettings
from launch.errors import UserError
from launch.files import human
from launch.jobs import get_job
from launch.nodes import OPEN_FILES, check_ports, first_port
from launch.probe import BandwidthRank, NodeProbe, Request
from launch.slurm import Profile
from launch.watchdog import DeadlineError, Waiter, WorkerDied, wait

log = logging.getLogger(__name__)

Level = str  # ok, warn, FAIL
DEADLINE_S = 180.0
SLOW_MB_S = 50
FEW_FILES = 4096
SKEW_WARN_S, SKEW_FAIL_S = 2.0, 60.0
LOW_DISK = 20e9
GPU_BYTES, CPU_BYTES = 256 << 20, 8 << 20
CPU_RANKS = 2  # a node without GPUs has so many ranks in the all-reduce


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    check: str
    level: Level
    found: str
    advice: str = ""


def preflight(settings: JobSettings, profile: Profile | None) -> list[Finding]:
    """Look at all nodes of the cluster that the settings name (a local one: this machine).

    Args:
        profile: what to compare with; None compares nodes with each other only.

    Raises:
        UserError: the cluster cannot be joined, or a node does not answer; Ray is not installed here.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UserError("preflight needs Ray: on a login node use `launch slurm CONFIG --preflight`") from error

    job = get_job(settings.job)
    folder = (Path(settings.runs_dir) / settings.name).absolute()
    canary = secrets.token_hex(8)
    place = folder / ".preflight"
    place.mkdir(parents=True, exist_ok=True)
    (place / "canary").write_text(canary)
    findings: list[Finding] = []
    with open_cluster(settings.cluster, [{}], place / "logs"):
        nodes = [node for node in ray.nodes() if node["Alive"]]
        request = Request(
            folder=str(folder),
            canary=canary,
            scratch=profile.scratch if profile else "/tmp",
            interface=profile.interface if profile else None,
            env=profile.env if profile else {},
            inputs=job.inputs(settings),
        )
        probes = [_actor(NodeProbe, node, gpus=node["Resources"].get("GPU", 0)) for node in nodes]
        names = [Waiter(f"node {node['NodeManagerAddress']}") for node in nodes]
        try:
            seen = _look(probes, nodes, request, names)
            gpus = profile.gpus_per_node if profile else max(int(node["Resources"].get("GPU", 0)) for node in nodes)
            findings += judge(seen, request, gpus, place)
            findings += [_clocks(probes, [node["host"] for node in seen], names)]
            findings += _stage(probes, job.inputs(settings), profile, names)
        except (DeadlineError, WorkerDied) as error:
            raise UserError(f"preflight: {str(error).splitlines()[0]}; look at that node, or leave it out") from error
        for probe in probes:
            ray.kill(probe)
        findings += bandwidth(nodes, profile)
    return findings


def judge(seen: Sequence[Mapping[str, Any]], request: Request, gpus: int, place: Path) -> list[Finding]:
    """What the nodes told, judged; a line a check. `gpus`: how many a node should have."""
    lines = [_versions(seen), _gpus(seen, gpus)]
    lines.append(_same("GPU driver", seen, lambda node: node["driver"], "warn", "ask for nodes of one kind"))
    traps = {node["host"]: "; ".join(node["traps"]) or "none" for node in seen}
    lines.append(_each("GPU variables", traps, lambda text: text == "none", "FAIL", "mend them in the profile's setup"))
    nics = {node["host"]: node["nic"] for node in seen}
    lines.append(_each("network", nics, lambda text: "error" not in text, "FAIL", "correct interface in the profile"))
    lines.append(_environment(seen, request.env))
    lines += _shared(seen, place)
    shm = {node["host"]: node["shm"][0] for node in seen}
    wanted = 8 << 30 if gpus else MIN_SHM
    advice = f"at least {human(wanted)} wanted: start the container with --shm-size=16g or --ipc=host"
    lines.append(_least("/dev/shm", shm, wanted, MIN_SHM, advice))
    files = {node["host"]: _endless(node["limits"]["open files"]) for node in seen}
    advice = f"raise the hard limit of open files to {OPEN_FILES} (ulimit -n)"
    lines.append(_least("open files", files, OPEN_FILES if gpus else FEW_FILES, FEW_FILES, advice, str))
    if gpus:
        locked = {node["host"]: _endless(node["limits"]["locked memory"]) for node in seen}
        advice = "the network card wants locked memory: ask the site for `ulimit -l unlimited`"
        lines.append(_least("locked memory", locked, 1 << 40, 0, advice))
    for what in ("run folder", "scratch"):
        free = {node["host"]: node["free"][what][0] for node in seen}
        lines.append(_least(f"free: {what}", free, LOW_DISK, 1e9, "free space, or choose another place"))
    for name in request.inputs:
        answers = {node["host"]: node["inputs"][name] for node in seen}
        advice = f"put {request.inputs[name]} where every node sees it, and bind it into the container"
        lines.append(_each(f"readable: {name}", answers, lambda text: "error" not in text, "FAIL", advice))
    ports = check_ports(first_port(3, 3))
    lines.append(Finding("ports", "warn" if ports else "ok", ports or "pinned ones lie below the ephemeral range"))
    return lines


def bandwidth(nodes: Sequence[Mapping[str, Any]], profile: Profile | None) -> list[Finding]:
    """All-reduce within each node and across all, against the profile: nccl where there are GPUs, else gloo."""
    import ray

    ranks: list[Any] = []
    on_gpu = all(node["Resources"].get("GPU", 0) >= 1 for node in nodes)
    for index, node in enumerate(nodes):
        ranks += [index] * (int(node["Resources"]["GPU"]) if on_gpu else CPU_RANKS)
    if len(ranks) < 2:
        return [Finding("all-reduce", "ok", "one GPU: nothing to measure")]
    address, port = nodes[0]["NodeManagerAddress"], first_port(0, 0) - 1
    device, size = ("cuda", GPU_BYTES) if on_gpu else ("cpu", CPU_BYTES)
    actors = [
        _actor(BandwidthRank, nodes[index], (rank, len(ranks), address, port, device), gpus=float(on_gpu))
        for rank, index in enumerate(ranks)
    ]
    names = [Waiter(f"rank {rank} on {nodes[index]['NodeManagerAddress']}") for rank, index in enumerate(ranks)]
    inner = [[rank for rank, at in enumerate(ranks) if at == index] for index in range(len(nodes))]
    lines = []
    try:
        for what, groups, expected in (
            ("within a node", inner, profile.bandwidth_within_gb_s if profile else None),
            ("across nodes", [list(range(len(ranks)))], profile.bandwidth_across_gb_s if profile else None),
        ):
            if what == "across nodes" and len(nodes) == 1:
                continue
            refs = [actor.measure.remote(groups, size) for actor in actors]
            found = [speed for speed in wait(refs, DEADLINE_S, f"an all-reduce {what}", names) if speed is not None]
            if found:
                lines.append(_speed(f"all-reduce {what}", min(found), expected, len(ranks), device))
    except Exception as error:  # whatever NCCL says is the finding
        reason = str(getattr(error, "cause", error)).strip().splitlines()[0]
        advice = "run with NCCL_DEBUG=INFO; a missing libfabric plug-in and a wrong interface are the usual reasons"
        lines.append(Finding("all-reduce", "FAIL", reason[:160], advice))
    for actor in actors:
        ray.kill(actor)
    return lines


def show(findings: Sequence[Finding]) -> int:
    """Print the table and what to do; returns the exit status: 1 if something fails."""
    from rich.console import Console
    from rich.table import Table

    console, table = Console(), Table("check", "", "found", box=None, pad_edge=False)
    colours = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}
    for line in findings:
        table.add_row(line.check, f"[{colours[line.level]}]{line.level}[/]", line.found)
    console.print(table)
    wrong = [line for line in findings if line.level != "ok"]
    for line in wrong:
        console.print(f"{line.level}: {line.check}: {line.found}. {line.advice}", markup=False, soft_wrap=True)
    failed = any(line.level == "FAIL" for line in wrong)
    console.print("not ready: mend what FAILs above" if failed else "ready")
    return int(failed)


def _actor(cls: type, node: Mapping[str, Any], arguments: Sequence[Any] = (), gpus: float = 0) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = {
        "num_cpus": 0,
        "num_gpus": gpus,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        "runtime_env": {"env_vars": worker_environment(os.environ)},
    }
    return ray.remote(cls).options(**options).remote(*arguments)


def _look(probes: Sequence[Any], nodes: Sequence[Any], request: Request, names: Sequence[Waiter]) -> list[dict]:
    requests = [replace(request, gpus=int(node["Resources"].get("GPU", 0))) for node in nodes]
    refs = [probe.look.remote(each) for probe, each in zip(probes, requests, strict=True)]
    return wait(refs, DEADLINE_S, "the nodes' answers", names)


def _clocks(probes: Sequence[Any], hosts: Sequence[str], names: Sequence[Waiter]) -> Finding:
    """Each node's clock against this one's, less half of the way there and back."""
    apart = {}
    for probe, host, name in zip(probes, hosts, names, strict=True):
        sent = time.time()
        there = wait([probe.clock.remote()], DEADLINE_S, "a node's clock", [name])[0]
        apart[host] = there - (sent + time.time()) / 2
    worst = max(apart, key=lambda host: abs(apart[host]))
    off = abs(apart[worst])
    level = "FAIL" if off > SKEW_FAIL_S else "warn" if off > SKEW_WARN_S else "ok"
    return Finding("clocks", level, f"at most {off:.2f} s apart" + (f" ({worst})" if level != "ok" else ""), "mend NTP")


def _stage(probes: Sequence[Any], inputs: Mapping[str, str], profile: Profile | None, names: Any) -> list[Finding]:
    if profile is None or not profile.stage or "model" not in inputs:
        return []
    refs = [probe.stage.remote(inputs["model"]) for probe in probes]
    try:
        seconds = wait(refs, 10 * DEADLINE_S, "the model to be copied to the nodes", names)
    except UserError as error:
        return [Finding("staging", "FAIL", str(error), "")]
    return [Finding("staging", "ok", f"model copied once a node, slowest in {max(seconds):.1f} s")]


def _versions(seen: Sequence[Mapping[str, Any]]) -> Finding:
    names = sorted({name for node in seen for name in node["versions"]})
    differing = [
        f"{name}: {_grouped({node['host']: node['versions'].get(name, 'absent') for node in seen})}"
        for name in names
        if len({node["versions"].get(name) for node in seen}) > 1
    ]
    if differing:
        return Finding("versions", "FAIL", "; ".join(differing), "use one image or one environment on all nodes")
    return Finding("versions", "ok", ", ".join(f"{name} {seen[0]['versions'][name]}" for name in names))


def _gpus(seen: Sequence[Mapping[str, Any]], expected: int) -> Finding:
    answers = {node["host"]: node["gpus"] for node in seen}
    advice = "ask SLURM for GPUs, start the container with --nv or --rocm, look at the driver"
    return _each("GPUs", answers, lambda text: not expected or text.startswith(f"{expected} ×"), "FAIL", advice)


def _environment(seen: Sequence[Mapping[str, Any]], wanted: Mapping[str, str]) -> Finding:
    literal = {key: value for key, value in wanted.items() if "$" not in value}
    wrong = {
        node["host"]: ", ".join(f"{key}={node['env'][key]!r}" for key in literal if node["env"][key] != literal[key])
        for node in seen
    }
    shown = {host: text or f"{len(wanted)} as in the profile" for host, text in wrong.items()}
    advice = "the profile's variables do not reach the nodes: start Ray with them (launch slurm does)"
    return _each("variables", shown, lambda text: text.endswith("as in the profile"), "FAIL", advice)


def _shared(seen: Sequence[Mapping[str, Any]], place: Path) -> list[Finding]:
    def state(node: Mapping[str, Any]) -> str:
        if "error" in node["shared"]:
            return f"error: {node['shared']['error']}"
        if not node["shared"]["same"]:
            return "error: another folder of that name"
        return "seen both ways" if (place / node["shared"]["answer"]).is_file() else "error: its answer does not arrive"

    answers = {node["host"]: state(node) for node in seen}
    advice = "put runs_dir on a file system that all nodes share, and bind it into the container"
    lines = [_each("shared disk", answers, lambda text: "error" not in text, "FAIL", advice)]
    if all("write" in node["shared"] for node in seen):
        slow = min(min(node["shared"]["write"], node["shared"]["read"]) for node in seen)
        total = sum(node["shared"]["write"] for node in seen)
        text = f"slowest {slow:.0f} MB/s, all nodes writing together {total:.0f} MB/s"
        advice = "checkpoints will be slow: choose a parallel file system, stripe the folder, save less often"
        lines.append(Finding("shared disk speed", "warn" if slow < SLOW_MB_S else "ok", text, advice))
    return lines


def _speed(check: str, found: float, expected: float | None, ranks: int, device: str) -> Finding:
    text = f"{found:.2f} GB/s bus bandwidth, {ranks} ranks ({'nccl' if device == 'cuda' else 'gloo'})"
    if expected is None:
        return Finding(check, "ok", text)
    level = "FAIL" if found < 0.5 * expected else "warn" if found < 0.8 * expected else "ok"
    advice = "is the libfabric or InfiniBand plug-in loaded (NCCL_DEBUG=INFO says)? Is another job on the network?"
    return Finding(check, level, f"{text}; the profile expects {expected:g}", advice)


def _each(check: str, answers: Mapping[str, str], good: Callable[[str], bool], level: Level, advice: str) -> Finding:
    bad = {host: text for host, text in answers.items() if not good(text)}
    return Finding(check, level if bad else "ok", _grouped(bad or answers), advice if bad else "")


def _same(
    check: str, seen: Sequence[Mapping[str, Any]], value: Callable[[Any], str], level: Level, advice: str
) -> Finding:
    answers = {node["host"]: value(node) for node in seen}
    return Finding(check, level if len(set(answers.values())) > 1 else "ok", _grouped(answers), advice)


def _least(
    check: str,
    amounts: Mapping[str, float],
    wanted: float,
    needed: float,
    advice: str,
    show: Callable[[float], str] = human,
) -> Finding:
    host = min(amounts, key=lambda name: amounts[name])
    least = amounts[host]
    level = "FAIL" if least < needed else "warn" if least < wanted else "ok"
    text = "unlimited" if least == float("inf") else show(least)
    return Finding(check, level, f"{text} at least" + (f" ({host})" if level != "ok" else ""), advice)


def _endless(limit: int) -> float:
    return float("inf") if limit < 0 else limit


def _grouped(answers: Mapping[str, str]) -> str:
    """`a (n1, n2); b (n3)`; without hosts where all say the same."""
    by_text: dict[str, list[str]] = defaultdict(list)
    for host, text in answers.items():
        by_text[text].append(host)
    if len(by_text) == 1:
        count = len(answers)
        return next(iter(by_text)) + (f" (all {count} nodes)" if count > 1 else "")
    return "; ".join(f"{text} ({_few(hosts)})" for text, hosts in by_text.items())


def _few(hosts: Iterable[str]) -> str:
    hosts = list(hosts)
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
