"""Rollouts on disk: what `debug: rollout-only` writes and `debug: replay` reads. JSON and plain arrays, no pickle."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from launch.errors import UserError
from realvr.data.examples import Box, Example
from realvr.rollout.records import Group, Rollout

ARRAYS = ("tokens", "logprobs", "latents", "latent_positions", "versions")


def save_groups(folder: Path, step: int, groups: Sequence[Group]) -> None:
    """Write the full groups (latents included) of a step: step-000003.json and step-000003.npz."""
    folder.mkdir(parents=True, exist_ok=True)
    records, arrays = [], {}
    for g, group in enumerate(groups):
        texts = [{"text": r.text, "finish": r.finish} for r in group.rollouts]
        records.append({"example": asdict(group.example), "rollouts": texts})
        for i, rollout in enumerate(group.rollouts):
            arrays |= {f"{g}/{i}/{name}": getattr(rollout, name) for name in ARRAYS}
    np.savez_compressed(_file(folder, step, "npz"), **arrays)
    _file(folder, step, "json").write_text(json.dumps(records, indent=1))


def load_groups(folder: Path, step: int) -> list[Group]:
    """What `save_groups` wrote. Raises UserError when the step was not saved."""
    file = _file(folder, step, "json")
    if not file.exists():
        raise UserError(f"{file}: no rollouts of step {step}; write them with debug=rollout-only or lower steps")
    with np.load(_file(folder, step, "npz"), allow_pickle=False) as arrays:
        return [_group(g, record, arrays) for g, record in enumerate(json.loads(file.read_text()))]


class Replay:
    """Stands where the fleet stands, but gives the groups that a former run saved; new weights go nowhere."""

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / "rollouts"

    def stream(self, sampler: Any, start: int, stop: int, ahead: int) -> Iterator[tuple[int, list[Group]]]:
        """(step, groups) of the saved steps start … stop − 1."""
        for step in range(start, stop):
            yield step, load_groups(self.folder, step)

    def load(self, weights: Any, version: int) -> None:
        """Saved rollouts do not change with the weights."""


def _group(index: int, record: dict[str, Any], arrays: Any) -> Group:
    fields = dict(record["example"])
    fields["boxes"] = tuple(Box(tuple(b["coords"]), b["space"], b["image"]) for b in fields["boxes"])
    fields |= {name: tuple(fields[name]) for name in ("images", "options")}
    rollouts = [
        Rollout(**{name: arrays[f"{index}/{i}/{name}"] for name in ARRAYS}, text=r["text"], finish=r["finish"])
        for i, r in enumerate(record["rollouts"])
    ]
    return Group(Example(**fields), tuple(rollouts))


def _file(folder: Path, step: int, suffix: str) -> Path:
    return folder / f"step-{step:06d}.{suffix}"
