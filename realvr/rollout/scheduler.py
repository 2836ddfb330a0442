"""vLLM schedulers that keep a preempted latent request away from its siblings' cached blocks.

Prefix-cache blocks are hashed by token id. Blocks that hold `<|lvr|>` ids hash alike whatever latents were fed there:
a request that comes back from preemption could read another sample's keys and values. Prompts and images stay cached.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class _KeepOwnLatents:
    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        extra = request.sampling_params.extra_args if request.sampling_params is not None else None
        if extra and "latent_key" in extra:
            request.skip_reading_prefix_cache = True


class LatentScheduler(_KeepOwnLatents, Scheduler):
    """vLLM's scheduler, one step at a time."""


class LatentAsyncScheduler(_KeepOwnLatents, AsyncScheduler):
    """vLLM's scheduler that plans a step while the device runs the one before."""
