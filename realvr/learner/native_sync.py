"""Weights from ZeRO-3 ranks to vLLM through vLLM's own trainer back ends (`nccl` between GPUs, `ipc` on shared ones).

vLLM's trainer engine drives the exchange from rank 0: it calls the rollout actors' control methods while every rank
iterates over the policy's parameters, a bucket gathered at a time. Imports vLLM.
"""

import socket
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    WeightSource,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

from launch.engine import TrainEngine, shape_of
from realvr.policy.model import Policy


class PolicySource(WeightSource):
    """The policy's tensors under checkpoint names, adapters merged, in one fixed order on every rank.

    Iteration is collective. Tensors are copies: a back end may keep several until its buffer is full, and a gathered
    bucket is released when the next is asked for.
    """

    def __init__(self, policy: Policy, engine: TrainEngine) -> None:
        self.policy, self.engine = policy, engine

    def metadata(self) -> list[ParamMeta]:
        """Name, type and whole shape of everything that iteration yields; gathers nothing."""
        named = (
            (name, torch.empty(shape_of(p), dtype=p.dtype, device="meta"))
            for name, p in _policy_parameters(self.engine.module.named_parameters())
        )
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.policy.checkpoint_tensors(named)]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        buckets = self.engine.iter_full_parameters()
        named = ((n, t.clone()) for bucket in buckets for n, t in _policy_parameters(bucket))
        return self.policy.checkpoint_tensors(named)

    # vLLM 0.33 asks for the same by other names; every rank holds everything.
    iter_full = iter_local = __iter__

    def owned_names(self) -> None:
        """All of them."""
        return None


class ActorClient:
    """vLLM's weight-sync control calls, sent to rollout actors (`launch.group` hosts) under a deadline."""

    def __init__(self, actors: Sequence[Any], seconds: float) -> None:
        self.actors, self.seconds = list(actors), seconds

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("init_weight_transfer_engine", WeightTransferInitRequest(init_info=init_info))

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", WeightTransferUpdateRequest(update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update")
        if weight_version is not None:
            self.update_version(int(weight_version))

    def update_version(self, version: int) -> None:
        """Name what the workers hold now."""
        self._all("update_weight_version", str(version))

    def shutdown_weight_transfer_engine(self) -> None:
        """The actors end with the run."""

    def _all(self, method: str, *args: Any) -> None:
        refs = [actor.run.remote(self.seconds, "engine_call", method, *args) for actor in self.actors]
        ray.get(refs, timeout=self.seconds)


def open_trainer(backend: str, rank: int, client: ActorClient, source: PolicySource, tensor_parallel: int) -> Any:
    """vLLM's trainer side of `backend` (nccl or ipc), connected to every rollout worker; called on every rank."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    if backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        receivers = len(client.actors) * tensor_parallel
        address, port = _rendezvous() if rank == 0 else ("", 0)
        info = NCCLTrainerInitInfo(address, port, world_size=1 + receivers, rank=rank)
    else:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info = IPCTrainerInitInfo(packed=True, rank=rank)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def _rendezvous() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def _policy_parameters(named: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the policy root (a reference root stays here), without the root's prefix."""
    for name, tensor in named:
        if name.startswith("root."):
            yield name.removeprefix("root."), tensor
