"""How a vLLM engine is started: environment, arguments, and the settings that latent decoding cannot have."""

import os
from pathlib import Path
from typing import Any

from launch.errors import UserError
from launch.staging import staged
from realvr.config import ModelSettings, RolloutSettings
from realvr.families import read_config
from realvr.rollout.latent_core import Grammar
from realvr.rollout.vllm_plugin import PREFIX

MAX_MODEL_LEN = 8192  # default for prompt + completion: KV memory, not the checkpoint's 128k, is what limits a batch
MAX_IMAGES = 8
OURS = ("model", "dtype", "seed", "hf_overrides", "worker_cls", "scheduler_cls", "additional_config", "logprobs_mode")
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # learners and engines share the cores
    "TORCHDYNAMO_DISABLE": "1",  # the first batch would spend 30 s compiling a sampler
    "VLLM_LOGGING_LEVEL": "ERROR",  # its CPU worker warns at each step that threads are bound
}


def prepare_environment(model_path: str) -> bool:
    """Set what vLLM reads while it is imported; returns whether it will run on the CPU.

    The engine runs inside this process, so that none is left behind when it dies. Values the user has set stay.
    """
    import torch

    on_cpu = not torch.cuda.is_available()  # true for ROCm builds too
    values = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if Path(model_path).is_dir():
        values["HF_HUB_OFFLINE"] = "1"
    for name, value in (values | (CPU_ENVIRONMENT if on_cpu else {})).items():
        os.environ.setdefault(name, value)
    return on_cpu


def engine_args(
    model: ModelSettings,
    rollout: RolloutSettings,
    grammar: Grammar,
    processor_kwargs: dict[str, Any],
    seed: int,
    on_cpu: bool,
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`: ours, then the user's `rollout.engine_args` over them."""
    config = read_config(model.path)
    positions = config.get("text_config", config).get("max_position_embeddings", MAX_MODEL_LEN)
    args: dict[str, Any] = {
        "model": staged(model.path),
        "dtype": model.dtype,
        "seed": seed % 2**31,
        "tensor_parallel_size": rollout.tensor_parallel,
        "max_model_len": min(positions, MAX_MODEL_LEN),
        "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0},
        "mm_processor_kwargs": processor_kwargs,
        "mm_processor_cache_gb": 0,  # each example is processed once and its pixels are let go
        "enable_prefix_caching": True,  # siblings share the prompt's keys and values
        "disable_log_stats": True,
        "generation_config": "vllm",  # sampling comes from us, not from the checkpoint's defaults
        "logprobs_mode": "processed_logprobs",  # after temperature and bans: the distribution that was sampled
        "hf_overrides": {"architectures": [PREFIX + config["architectures"][0]]},
        "worker_cls": "realvr.rollout.vllm_v1.LatentWorker",
        "additional_config": {"realvr": grammar.to_dict()},
        "weight_transfer_config": {"backend": sync_backend(rollout.sync, on_cpu)},
    }
    if on_cpu:
        args |= {"enforce_eager": True, "block_size": 32, "async_scheduling": False}
    user = rollout.engine_args
    refuse(user)
    args |= user
    # A scheduler class of one's own must match the mode: vLLM does not choose it then.
    overlapped = args.setdefault("async_scheduling", True)
    args["scheduler_cls"] = f"realvr.rollout.scheduler.Latent{'Async' if overlapped else ''}Scheduler"
    return args


def refuse(user: dict[str, Any]) -> None:
    """UserError for engine arguments that are ours, or under which latents would be lost."""
    field = "rollout.engine_args"
    taken = sorted(set(user) & set(OURS))
    if taken:
        raise UserError(f"{field}.{taken[0]}: set by the rollout engine itself; remove it")
    if user.get("tensor_parallel_size") is not None:
        raise UserError(f"{field}.tensor_parallel_size: use rollout.tensor_parallel, which also reserves the GPUs")
    if user.get("pipeline_parallel_size", 1) != 1:
        raise UserError(
            f"{field}.pipeline_parallel_size: {user['pipeline_parallel_size']} is not supported with latents, whose "
            f"states go from the last layer to the first at each token; use rollout.tensor_parallel"
        )
    if user.get("speculative_config") is not None:
        raise UserError(f"{field}.speculative_config: drafted tokens cannot stand in for latents; remove it")
    if user.get("data_parallel_size", 1) != 1:
        raise UserError(f"{field}.data_parallel_size: use rollout.workers, one engine each")
    if user.get("enable_prompt_embeds"):
        raise UserError(f"{field}.enable_prompt_embeds: clashes with latents, which are embeddings too; remove it")


def sync_backend(sync: str, on_cpu: bool) -> str:
    """The weight-transfer back end: `auto` is `shm`, the only one that needs no GPU-to-GPU link."""
    if sync in ("nccl", "ipc") and on_cpu:
        raise UserError(f"rollout.sync: {sync} moves weights between GPUs and this machine has none; use shm")
    return "shm" if sync == "auto" else sync
