"""vLLM's trainer interface without GPUs: the source that ZeRO-3 ranks offer, and the control calls to real engines.

Everything of `rollout.sync: nccl` but NCCL itself: the tensors go through a file to the engine's `shm` back end.
"""

import numpy as np
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from launch.cluster import open_cluster
from launch.config import ClusterSettings
from launch.group import WorkerGroup
from realvr.data.sources import open_source
from realvr.learner.worker import LearnerWorker
from realvr.rollout.fleet import Fleet
from tests.realvr.learner.test_zero3 import settings_of


class Sender(LearnerWorker):
    """A learner rank that offers its source as the native back ends take it."""

    def source_agrees(self) -> bool:
        from realvr.learner.native_sync import PolicySource

        source = PolicySource(self.policy, self.engine)
        told = [(m.name, m.dtype, tuple(m.shape)) for m in source.metadata()]
        return told == [(name, t.dtype, tuple(t.shape)) for name, t in source]

    def deliver(self, actors: list, version: int, path: str) -> None:
        from realvr.learner.native_sync import ActorClient, PolicySource

        tensors = dict(PolicySource(self.policy, self.engine))
        if dist.get_rank() == 0:
            save_file({name: t.contiguous() for name, t in tensors.items()}, path)
            client = ActorClient(actors, 120)
            client.init_weight_transfer_engine({})
            client.start_weight_update()
            client.update_weights({"path": path})
            client.finish_weight_update(str(version))


def test_source_and_control_calls(tiny_demo, tmp_path):
    settings = settings_of(
        tiny_demo,
        model={"path": str(tiny_demo), "dtype": "float32", "lora": {"r": 2, "alpha": 4}},
        rollout={
            "group_size": 2,
            "max_new_tokens": 8,
            "gpus": 0,
            "cpus": 0.5,
            "engine_args": {"max_model_len": 128, "max_num_seqs": 16},
        },
    )
    source = open_source(settings.data.train)
    with open_cluster(ClusterSettings(num_cpus=2), [{"CPU": 0.5}] * 3, tmp_path / "logs") as cluster:
        learners = WorkerGroup(cluster, Sender, 2, {"settings": settings}, cpus=0.5, name="learner")
        fleet = Fleet(cluster, settings, source, bundle_offset=2)
        assert learners.call("source_agrees") == [True, True]
        before = fleet.evaluate([source[0]])[0].rollouts[0]
        path = str(tmp_path / "weights.safetensors")
        learners.call("deliver", fleet.workers.actors, 7, path)
        assert fleet.workers.call("version") == [7]
        after = fleet.evaluate([source[0]])[0].rollouts[0]
    # The adapters start at zero, so the same weights went round: the same answer comes back.
    assert load_file(path)
    np.testing.assert_array_equal(before.tokens, after.tokens)
    np.testing.assert_allclose(before.logprobs, after.logprobs, atol=1e-6)
