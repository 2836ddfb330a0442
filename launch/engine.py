"""A DeepSpeed ZeRO-3 engine inside a worker, without DeepSpeed's launcher.

Gradient semantics: the gradient of a step is the *sum* of the gradients of every loss given to `backward`, over all
ranks and micro-steps. Callers divide their losses by global counts. (DeepSpeed divides by the number of ranks when it
reduces and by `gradient_accumulation_steps` in `backward`; the engine undoes the first and keeps the second at 1.)

All ranks must make the same calls in the same order, with the same module call sequence inside: every forward, backward
and gather is a collective. Batches may differ in shape.
"""

import contextlib
import json
import math
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launch.config import LearnerSettings, OptimizerSettings
from launch.errors import UserError

SHARDS = "shards"  # DeepSpeed's files, in the folder of a checkpoint
DESCRIPTION = "engine.json"  # what the shards are of: world size, parameters


class NonFiniteError(RuntimeError):
    """A loss or the gradient is NaN or infinite. Raised on every rank by `step`; parameters and state are unchanged."""


@dataclass(frozen=True)
class StepStats:
    """One optimizer step: the gradient's global norm before clipping, and the learning rate that was used."""

    grad_norm: float
    lr: float


def init_distributed(gpu: bool, threads: int = 1, timeout_s: float = 1800) -> None:
    """Join the process group that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, …, set by a WorkerGroup).

    Call once a process, before a TrainEngine. `timeout_s` bounds every collective; `threads` applies on CPUs.
    """
    if not gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        torch.set_num_threads(threads)
    import deepspeed

    if not gpu:  # else DeepSpeed compiles a shared-memory op: minutes, and a hang after a killed compile
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        "nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout_s), auto_mpi_discovery=False
    )


def lr_at(step: int, total_steps: int, optimizer: OptimizerSettings) -> float:
    """Learning rate of optimizer step `step` (0 is the first): a plain function, so that a resume cannot double it.

    Over n warm-up steps the rate rises linearly below the peak: peak · (step + 1)/(n + 1); step n has the peak. Then it
    falls along a cosine or a line that reaches `final_fraction` · peak after `total_steps` steps (no step is spent at a
    rate of zero), or stays (constant).
    """
    warmup = optimizer.warmup
    warm = math.ceil(warmup * total_steps) if warmup < 1 else int(warmup)
    if step < warm:
        return optimizer.lr * (step + 1) / (warm + 1)
    if optimizer.schedule == "constant":
        return optimizer.lr
    progress = min((step - warm) / max(total_steps - warm, 1), 1.0)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if optimizer.schedule == "cosine" else 1 - progress
    return optimizer.lr * (optimizer.final_fraction + (1 - optimizer.final_fraction) * shape)


def deepspeed_config(
    optimizer: OptimizerSettings, learner: LearnerSettings, dtype: torch.dtype, numel: int
) -> dict[str, Any]:
    """DeepSpeed's configuration for a model of `numel` parameters, with `learner.deepspeed` merged over it."""
    gpu = learner.gpus > 0
    adam = {"lr": optimizer.lr, "betas": list(optimizer.betas), "eps": optimizer.eps, "torch_adam": True}
    if gpu:
        adam["fused"] = True  # one kernel, no temporaries as large as a sub-group; and nothing to compile
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # step() is the boundary: any number of micro-steps
        "gradient_clipping": optimizer.clip,
        "steps_per_print": 10**12,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": min(500_000_000, max(numel, 1)),  # a buffer of this size is allocated
            "stage3_prefetch_bucket_size": min(50_000_000, max(numel, 1)),
            "stage3_param_persistence_threshold": 100_000,
        },
    }
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
        # For a `buffer_dtype` in learner.deepspeed: rotary frequencies stay in float32.
        config["data_types"] = {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": ["inv_freq"]}
    elif dtype != torch.float32:
        raise UserError(f"learner dtype: got {dtype}, want torch.float32 or torch.bfloat16")
    return _merged(config, learner.deepspeed)


@contextlib.contextmanager
def zero_init_context(optimizer: OptimizerSettings, learner: LearnerSettings, dtype: torch.dtype) -> Iterator[None]:
    """Inside, a module's parameters are sharded as they are created, for models larger than a device.

    `init_distributed` comes first. Loading weights into such parameters is collective (see `gathered`).
    """
    import deepspeed

    arange = torch.arange
    config = deepspeed_config(optimizer, learner, dtype, numel=500_000_000)
    with deepspeed.zero.Init(config_dict_or_path=config):  # its dtype argument is misread on CPUs
        # DeepSpeed makes the constructors give `dtype`. Rotary frequencies are computed from an arange, and in bfloat16
        # they are wrong by radians at positions in the thousands.
        torch.arange = arange
        yield


class TrainEngine:
    """AdamW on a module whose parameters, gradients and optimizer state are sharded over the ranks (ZeRO-3).

    Weight decay applies to trained tensors of two or more dimensions (matrices, embeddings, convolutions). Norm scales
    and biases, one-dimensional, are spared: decaying them regularises nothing and shifts the scale of activations.

    Args:
        module: the root module; every forward goes through `engine(...)`, one call a micro-step. Parameters with
            `requires_grad=False` are sharded too and stay as they are.
        optimizer, learner: settings; `learner.deepspeed` is merged over the configuration built here.
        total_steps: optimizer steps of the whole run, for the schedule.
        dtype: float32, or bfloat16 with float32 master weights.
        moe_leaves: class names of sparse blocks, inside which ranks may use different experts.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: OptimizerSettings,
        learner: LearnerSettings,
        total_steps: int,
        dtype: torch.dtype = torch.float32,
        moe_leaves: Sequence[str] = (),
    ):
        import deepspeed
        from deepspeed.utils import set_z3_leaf_modules, z3_leaf_parameter

        self.optimizer_settings, self.total_steps, self.steps = optimizer, total_steps, 0
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise UserError("learner: the module has no trained parameter; check what is frozen")
        if moe_leaves:
            set_z3_leaf_modules(module, list(moe_leaves))
        numel = sum(numel_of(parameter) for parameter in module.parameters())
        config = deepspeed_config(optimizer, learner, dtype, numel)
        self._engine, *_ = deepspeed.initialize(
            model=module, model_parameters=_parameter_groups(module, optimizer), config=config
        )
        self.device = self._engine.device
        self._leaf_parameters = [p for p in module.parameters() if p.requires_grad and z3_leaf_parameter(p)]
        self._bad_losses: list[float] = []
        self._micro_steps = 0

    @property
    def module(self) -> torch.nn.Module:
        """The module as given (its parameters are shards: gather before reading them)."""
        return self._engine.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One forward of the root module."""
        return self._engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a scalar `loss` to the step's. Losses are summed over ranks and micro-steps."""
        value = loss.detach().float().item()
        if not math.isfinite(value):  # remembered, not raised: a rank that stopped here would leave the others hanging
            self._bad_losses.append(value)
        # DeepSpeed reduces a leaf's gradient after each of its calls in a graph, and keeps only the last: hold it back.
        for parameter in self._leaf_parameters:
            parameter.ds_grad_is_ready = False
        self._engine.backward(loss * self.world, scale_wrt_gas=False)
        for parameter in self._leaf_parameters:
            parameter.ds_grad_is_ready = True
            if parameter.grad is not None:  # None on every rank or on none: calls are in lockstep
                self._engine.optimizer.reduce_ready_partitions_and_remove_grads(parameter)
        if self._leaf_parameters:
            self._engine.optimizer.independent_gradient_partition_epilogue()
        self._micro_steps += 1

    def step(self, lr: float | None = None) -> StepStats:
        """Clip, update, forget the gradient. `lr` takes the place of the schedule's rate (steps beyond the schedule).

        Raises:
            NonFiniteError: on every rank, if a loss on any rank or the gradient is not finite. Nothing is updated, the
                gradient is dropped, and training may go on.
        """
        if not self._micro_steps:
            raise RuntimeError("step() without a backward()")
        bad, self._bad_losses, micro_steps, self._micro_steps = self._bad_losses, [], self._micro_steps, 0
        flags = torch.zeros(self.world, device=self.device)
        flags[self.rank] = len(bad)
        torch.distributed.all_reduce(flags)
        if flags.any():
            self._engine.optimizer.zero_grad()
            counts = {rank: int(count) for rank, count in enumerate(flags.tolist()) if count}
            raise NonFiniteError(
                f"step {self.steps}: losses that are not finite, by rank {counts} (of {micro_steps} micro-steps each); "
                f"on this rank: {bad or 'none'}"
            )
        if lr is None:
            lr = lr_at(self.steps, self.total_steps, self.optimizer_settings)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        skipped = self._engine.skipped_steps
        self._engine.step()
        if self._engine.skipped_steps != skipped:
            raise NonFiniteError(f"step {self.steps}: the gradient is not finite although every loss is")
        self.steps += 1
        return StepStats(float(self._engine.get_global_grad_norm()), lr)

    def iter_full_parameters(
        self, bucket_bytes: int = 256 * 2**20, trained_only: bool = False
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Whole parameters in buckets of about `bucket_bytes`, as `(name, tensor)`; buffers are not among them.

        Collective: every rank iterates to the end, also one that uses nothing. A bucket's tensors are valid until the
        next is asked for and must not be changed. One larger than the bucket comes alone.
        """
        chosen = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad or not trained_only]
        for bucket in _buckets(chosen, bucket_bytes):
            with gathered([parameter for _, parameter in bucket]):
                yield [(name, parameter.detach()) for name, parameter in bucket]

    def save(self, folder: Path, client_state: dict[str, Any] | None = None) -> None:
        """Write shards, optimizer, random states and `client_state` (each rank its own) into `folder`. Collective.

        The folder is shared by all ranks. Making it appear atomically is the caller's part.

        Raises:
            UserError: on every rank, when the disk has no room for it.
        """
        folder = Path(folder)
        trained = sum(numel_of(p) for p in self.module.parameters() if p.requires_grad)
        shards = sum(numel_of(p) * p.element_size() for p in self.module.parameters())
        free = torch.zeros(1, dtype=torch.int64, device=self.device)
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            free[0] = shutil.disk_usage(folder).free
        torch.distributed.broadcast(free, 0)
        _require_room(folder, shards + 12 * trained, int(free))
        state = {"client": client_state or {}, "steps": self.steps, "random": _random_states(self.device)}
        self._engine.save_checkpoint(str(folder), tag=SHARDS, client_state={"launch": state}, save_latest=False)
        if self.rank == 0:
            description = {"world": self.world, "steps": self.steps, "parameters": self._describe()}
            (folder / DESCRIPTION).write_text(json.dumps(description, indent=1))
        torch.distributed.barrier()

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue exactly where `save` was: returns this rank's `client_state`. Collective; the engine must be fresh.

        Optimizer hyperparameters are those of the current settings, not the saved ones.

        Raises:
            UserError: no checkpoint, one of another module (names the first difference), or of another world size.
        """
        folder = Path(folder)
        check_description(folder, self._describe(), self.world)
        kept = [{k: v for k, v in group.items() if k != "params"} for group in self._engine.optimizer.param_groups]
        path, state = self._engine.load_checkpoint(str(folder), tag=SHARDS)
        if path is None:
            raise UserError(f"{folder}: its shards cannot be read; use another checkpoint")
        for group, values in zip(self._engine.optimizer.param_groups, kept, strict=True):
            group.update(values)
        state = state["launch"]
        self.steps = state["steps"]
        _set_random_states(state["random"], self.device)
        return state["client"]

    def _describe(self) -> list[list]:
        """`[name, shape, trained]` of every parameter, in order."""
        return [[n, list(shape_of(p)), p.requires_grad] for n, p in self.module.named_parameters()]


def check_description(folder: Path, parameters: list[list], world: int) -> None:
    """Compare `folder`'s engine.json with a module's parameters (`[name, shape, trained]` each) and a world size.

    Raises:
        UserError: it is missing or differs.
    """
    file = folder / DESCRIPTION
    if not file.exists():
        raise UserError(f"{folder}: no {DESCRIPTION}, so not a complete checkpoint; use another one")
    saved = json.loads(file.read_text())
    for ours, theirs in zip(parameters, saved["parameters"], strict=False):
        if ours != theirs:
            raise UserError(
                f"{folder}: a checkpoint of another model: parameter {theirs[0]} of shape {tuple(theirs[1])}"
                f"{'' if theirs[2] else ' (frozen)'} where this run has {ours[0]} of shape {tuple(ours[1])}"
                f"{'' if ours[2] else ' (frozen)'}; use the run's own checkpoint or the same model settings"
            )
    if len(parameters) != len(saved["parameters"]):
        raise UserError(
            f"{folder}: a checkpoint of another model: {len(saved['parameters'])} parameters where this run has "
            f"{len(parameters)}; use the run's own checkpoint or the same model settings"
        )
    if saved["world"] != world:
        raise UserError(
            f"{folder}: saved by {saved['world']} learner ranks, this run has {world}; a resume needs the same "
            f"learner.ranks: set it to {saved['world']}"
        )


def numel_of(parameter: torch.nn.Parameter) -> int:
    """Elements of a parameter, sharded or not (a released shard's `numel()` is 0)."""
    return getattr(parameter, "ds_numel", parameter.numel())


def shape_of(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Shape of a parameter, sharded or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _parameter_groups(module: torch.nn.Module, optimizer: OptimizerSettings) -> list[dict[str, Any]]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if len(shape_of(parameter)) >= 2]
    spared = [parameter for parameter in trained if len(shape_of(parameter)) < 2]
    groups = [(decayed, optimizer.weight_decay), (spared, 0.0)]
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters]


def _buckets(
    named: Sequence[tuple[str, torch.nn.Parameter]], limit: int
) -> Iterator[list[tuple[str, torch.nn.Parameter]]]:
    bucket: list[tuple[str, torch.nn.Parameter]] = []
    size = 0
    for name, parameter in named:
        more = numel_of(parameter) * parameter.element_size()
        if bucket and size + more > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += more
    if bucket:
        yield bucket


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, dictionary by dictionary."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


def _require_room(folder: Path, needed: int, free: int) -> None:
    if free < needed:
        raise UserError(
            f"{folder}: a checkpoint needs {needed / 2**30:.1f} GiB and the disk has {free / 2**30:.1f} GiB free; "
            "make room, lower checkpoint.keep, or put runs_dir on another disk"
        )


def _random_states(device: torch.device) -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


@contextlib.contextmanager
def gathered(parameters: Sequence[torch.nn.Parameter], modify_on: int | None = None) -> Iterator[None]:
    """Whole parameters inside the block; with `modify_on`, what that rank writes is kept on all. Collective."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=modify_on):
        yield
