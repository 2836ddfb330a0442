"""The learner's end of vLLM's native weight transfer between GPUs (`rollout.sync: nccl | ipc`). Imports vLLM.

With `shm` nothing of this is used: the learner writes a file (`weights_file`) and each engine loads it. The native back
ends stream tensors: `nccl` between any GPUs, `ipc` between processes that share one. Every learner rank builds the
sender and calls `send_weights()`; rank 0 talks to the engines, through the methods that VllmEngine has for it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerWeightTransferEngine, WeightSource

from launch.errors import UserError

Tensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class TensorSource(WeightSource):
    """Checkpoint tensors of a learner for the native back ends, anew for each sync.

    tensors: a function that yields (checkpoint name, whole tensor) in the order of `metadata`; under ZeRO-3 it gathers,
    so all ranks walk through it together. vLLM 0.32 asks for `__iter__` and `held_names`, 0.33 for `iter_full`,
    `iter_local` and `owned_names`: here every rank holds all of it, so they are the same.
    """

    def __init__(self, metadata: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], tensors: Tensors) -> None:
        self._metadata = [ParamMeta(name, dtype, shape) for name, dtype, shape in metadata]
        self._tensors = tensors

    def metadata(self) -> list[ParamMeta]:
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta, (name, tensor) in zip(self._metadata, self._tensors(), strict=True):
            if name != meta.name or tuple(tensor.shape) != meta.shape:
                raise RuntimeError(f"weight source yields {name} {tuple(tensor.shape)}, announced {meta}")
            yield name, tensor.to(meta.dtype)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self)

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self)

    def held_names(self) -> None:
        return None

    def owned_names(self) -> None:
        return None


def native_sender(
    sync: str, client: Any, source: WeightSource, rank: int, address: str, port: int, engine_gpus: int
) -> TrainerWeightTransferEngine:
    """The sender of one learner rank; its `send_weights()` is one sync and returns when the engines hold the weights.

    client: vLLM's RayVLLMWeightSyncClient over actors with VllmEngine's methods. address, port: where rank 0 listens
    (nccl). engine_gpus: GPUs of all engines together; they and rank 0 form the NCCL group. vLLM sets no time-out here:
    call it under a watchdog. UserError for a back end that is not native.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    if sync == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info: Any = NCCLTrainerInitInfo(address, port, 1 + engine_gpus, rank=rank)
    elif sync == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info = IPCTrainerInitInfo(packed=True, rank=rank)
    else:
        raise UserError(f"rollout.sync: {sync} has no native sender; it is nccl or ipc")
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
