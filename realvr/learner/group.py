"""The learners as the driver sees them: one call a step, weights for the fleet, save and load."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from launch.cluster import Cluster
from launch.group import WorkerGroup
from realvr.config import RLSettings
from realvr.learner.worker import LearnerWorker
from realvr.rollout.fleet import split
from realvr.rollout.records import ScoredGroup, Weights


class Learners:
    """ZeRO-3 ranks in Ray actors. sync_folder: where weights for the fleet are written; every worker must see it."""

    def __init__(self, cluster: Cluster, settings: RLSettings, sync_folder: Path, bundle_offset: int = 0) -> None:
        self.settings, self.sync_file = settings, sync_folder / f"realvr-weights-{uuid4().hex[:8]}.safetensors"
        self.deadline_s = settings.cluster.step_deadline_s
        learner = settings.learner
        self.group = WorkerGroup(
            cluster,
            LearnerWorker,
            learner.ranks,
            {"settings": settings},
            cpus=learner.cpus,
            gpus=learner.gpus,
            bundle_offset=bundle_offset,
            deadline_s=settings.cluster.deadline_s,
            name="learner",
        )

    def step(self, step: int, scored: Sequence[ScoredGroup], samples: bool = False) -> tuple[dict[str, float], list]:
        """One optimizer step on a global batch: metrics `grpo/… evidence/… learner/…`, and sample rows when asked."""
        parts = split(scored, self.group.ranks)
        results = self._call("step", samples, per_rank=parts, what=f"learner step {step}")
        return results[0][0], [row for _, rows in results for row in rows]

    def weights(self) -> Weights:
        """Gather the whole model (adapters merged) into a file for the fleet, or offer to send it natively."""
        if self.settings.rollout.sync in ("nccl", "ipc"):
            return Weights(send=self._send)
        checksum = self._call("write_weights", str(self.sync_file), what="gathering the weights")[0]
        return Weights(str(self.sync_file), checksum)

    def _send(self, actors: Sequence[Any], version: int) -> None:
        self._call("send_weights", list(actors), version, what=f"sending weights {version}")

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the state of every rank below `folder`; returns what the checkpoint's state.json should say."""
        self._call("save", str(folder), what=f"saving {folder.name}")
        return {"model": self.settings.model.path, "ranks": self.group.ranks}

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        self._call("load", str(folder), what=f"loading {folder.name}")

    def close(self) -> None:
        """Remove the weights file; the cluster ends the processes."""
        self.sync_file.unlink(missing_ok=True)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self.group.call(method, *args, seconds=self.deadline_s, **kwargs)
