"""Weight sync inside vLLM workers: the back end `shm`, and what a sync proves. Imports vLLM.

`shm` reads a safetensors file that the learner wrote on the same host (usually in /dev/shm).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

PROBE_ROWS = 8  # input features at which a repacked matrix is read back


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """Path of the safetensors file, readable on the worker's host."""

    path: str


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads checkpoint names layer by layer, so that weights which a platform repacks are repacked again."""

    init_info_cls, update_info_cls = ShmInitInfo, ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """There is no connection to open."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        self.model.load_weights(_tensors(update_info.path))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """There is no connection to close."""


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
            yield name, file.get_tensor(name)


def weights_held(model: nn.Module, path: str) -> dict[str, int]:
    """Compare a weights file with what the model computes with; counts of tensors by outcome.

    `equal`: the parameter, or its slice of a fused one, equals the file's tensor bit for bit. `probed`: the platform
    keeps a repacked copy, so the layer itself was asked: columns read back through it by one-hot inputs are equal.
    `unseen`: the worker holds a shard or a quantised form that cannot be compared. `different`: the sync failed.
    """
    counts = {"equal": 0, "probed": 0, "unseen": 0, "different": 0}
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    fused = {part: whole for whole, parts in model.packed_modules_mapping.items() for part in parts if part != whole}
    order = {part: i for parts in model.packed_modules_mapping.values() for i, part in enumerate(parts)}
    groups: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, tensor in model.hf_to_vllm_mapper.apply(_tensors(path)):
        module, _, leaf = name.rpartition(".")
        parent, _, part = module.rpartition(".")
        whole = f"{parent}.{fused[part]}.{leaf}" if part in fused else name
        groups.setdefault(whole, []).append((order.get(part, 0), tensor))
    for name, parts in groups.items():
        tensor = torch.cat([t for _, t in sorted(parts, key=lambda p: p[0])])
        outcome = _held(modules.get(name.rpartition(".")[0]), parameters.get(name), name, tensor)
        counts[outcome] += len(parts)
    return counts


def _held(module: nn.Module | None, parameter: torch.Tensor | None, name: str, tensor: torch.Tensor) -> str:
    probe = getattr(module, "cpu_linear", None)
    if probe is not None and name.endswith(".weight") and tensor.dim() == 2:
        return _probe(module, probe, tensor)
    if parameter is None or parameter.dim() != tensor.dim() or parameter.shape[1:] != tensor.shape[1:]:
        return "unseen"
    if len(parameter) < len(tensor):  # a shard; more rows than the file's are padding of the vocabulary
        return "unseen"
    held = parameter[: len(tensor)]
    return "equal" if torch.equal(held, tensor.to(held.device, held.dtype)) else "different"


def _probe(module: nn.Module, linear: Any, tensor: torch.Tensor) -> str:
    out_features, in_features = tensor.shape
    dtype = module.weight.dtype
    columns = torch.randperm(in_features)[:PROBE_ROWS]
    inputs = torch.zeros(len(columns), in_features, dtype=dtype)
    inputs[torch.arange(len(columns)), columns] = 1
    with torch.inference_mode():
        read = linear(inputs, module.weight, None)
    if read.shape[1] < out_features:
        return "unseen"
    return "probed" if torch.equal(read[:, :out_features], tensor[:, columns].T.to(dtype)) else "different"
