"""Latent decoding in vLLM's model runner V1 (CPU builds, and GPUs without Triton): a worker class with a runner mixin.

Imported only inside vLLM workers, by the name that `vllm_args` gives as `worker_cls`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from realvr.rollout.latent_core import Grammar, LatentCore
from realvr.rollout.weight_transfer import weights_held

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput


def make_core(config: "VllmConfig", device: torch.device) -> LatentCore:
    """The worker's core, from the grammar that the engine was started with."""
    grammar = Grammar.from_dict(config.additional_config["realvr"])
    model, slots = config.model_config, config.scheduler_config.max_num_seqs
    return LatentCore(grammar, slots, model.get_inputs_embeds_size(), model.dtype, device)


def latent_key(sampling_params: Any) -> str | None:
    """Name of a request's latents; None for requests that are not latent (vLLM's own warm-up)."""
    extra = sampling_params.extra_args if sampling_params is not None else None
    return extra.get("latent_key") if extra else None


class LatentRunnerMixin:
    """Hooks into GPUModelRunner (V1) and CPUModelRunner; `latent` is set by the worker."""

    latent: LatentCore

    def _update_states(self, scheduler_output: "SchedulerOutput") -> Callable | None:
        after = super()._update_states(scheduler_output)
        for request_id in scheduler_output.finished_req_ids:
            self.latent.remove(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            key = latent_key(new.sampling_params)
            if key is not None:
                self.latent.add(new.req_id, key, new.prompt_token_ids, len(new.prompt_token_ids))
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            request = self.requests[request_id]
            key = latent_key(request.sampling_params)
            if key is not None:
                tokens = [*request.prompt_token_ids, *request.output_token_ids]
                self.latent.add(request_id, key, tokens, request.num_prompt_tokens)
        return after

    def _preprocess(self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any) -> tuple:
        out = super()._preprocess(scheduler_output, *args, **kwargs)
        if self.latent.slot_of:
            self._overlay_latents(scheduler_output)
        return out

    def _overlay_latents(self, scheduler_output: "SchedulerOutput") -> None:
        """Only rows past their prompt can be latents, and the host knows which those are."""
        request_ids = self.input_batch.req_ids
        n = len(request_ids)
        ends = self.query_start_loc.np[1 : n + 1]
        scheduled = ends - self.query_start_loc.np[:n]
        computed = self.input_batch.num_computed_tokens_cpu[:n]
        past_prompt = np.clip(computed + scheduled - self.input_batch.num_prompt_tokens[:n], 0, scheduled)
        total = int(past_prompt.sum())
        if total == 0:
            return
        slots = self.latent.slots(request_ids)
        if total == n == scheduler_output.total_num_scheduled_tokens:  # a pure decode step: every row, in order
            rows: slice | torch.Tensor = slice(0, n)
        else:
            spans = [np.arange(end - count, end) for end, count in zip(ends, past_prompt, strict=True)]
            rows = torch.from_numpy(np.concatenate(spans)).to(self.device, non_blocking=True)
            repeats = torch.from_numpy(past_prompt.astype(np.int64)).to(self.device, non_blocking=True)
            slots = torch.repeat_interleave(slots, repeats, output_size=total)
        embeds = self.inputs_embeds.gpu
        embeds[rows] = self.latent.overlay(embeds[rows], self.input_ids.gpu[rows], self.positions[rows], slots)

    def sample_tokens(self, grammar_output: Any) -> Any:
        state = self.execute_model_state
        self._latent_hidden = None if state is None else state.sample_hidden_states
        return super().sample_tokens(grammar_output)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        if self.latent.slot_of and logits is not None:
            n = self.input_batch.num_reqs
            last = self.query_start_loc.gpu[1 : n + 1].long() - 1
            self.latent.step(
                logits,
                self._latent_hidden[:n],
                self.input_ids.gpu[last],
                self.positions[last].long(),
                self.latent.slots(self.input_batch.req_ids),
                ~self.discard_request_mask.gpu[:n].bool(),
            )
        with self._streams_of_discarded_rows():
            return super()._sample(logits, spec_decode_metadata)

    @contextmanager
    def _streams_of_discarded_rows(self) -> Iterator[None]:
        """Give back what rows of unfinished prefills draw, so that a seed gives one completion however it is scheduled.

        vLLM winds generators back by an offset, which CPU generators lack: there it would stop the engine.
        """
        discarded = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])
        generators = self.input_batch.generators
        used = [generators[int(i)] for i in discarded if int(i) in generators] if self.device.type == "cpu" else []
        before = [g.get_state() for g in used]
        yield
        for generator, state in zip(used, before, strict=True):
            generator.set_state(state)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "cpu":
            return super()._bookkeeping_sync(*args, **kwargs)
        generators, self.input_batch.generators = self.input_batch.generators, {}  # wound back above
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators


def platform_worker() -> type:
    """vLLM's own worker class of this platform."""
    name = "vllm.v1.worker.cpu_worker.CPUWorker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker.Worker"
    return resolve_obj_by_qualname(name)


class LatentWorker(platform_worker()):
    """vLLM's worker with the latent runner, and what the engine asks of it over `collective_rpc`."""

    def init_device(self) -> None:
        super().init_device()
        if not self.use_v2_model_runner:  # V2 is reached through the model class, see vllm_v2
            runner = self.model_runner
            runner.__class__ = type(f"Latent{type(runner).__name__}", (LatentRunnerMixin, type(runner)), {})
            runner.latent = make_core(self.vllm_config, self.device)

    def set_grammar(self, fields: dict[str, Any]) -> None:
        """Start over with another grammar (K, open, close); latents that were not taken are lost."""
        self.vllm_config.additional_config["realvr"] = fields
        holder = self.model_runner.model_state if self.use_v2_model_runner else self.model_runner
        holder.latent = make_core(self.vllm_config, self.device)

    def latent_core(self) -> LatentCore:
        return self.model_runner.model_state.latent if self.use_v2_model_runner else self.model_runner.latent

    def take_latents(self, keys: list[str], path: str) -> dict[str, int]:
        """Write latents [n, d] float32 and positions [n] of the keys to a safetensors file; returns n by key.

        Every rank drops its copy, the first one writes.
        """
        from safetensors.torch import save_file

        taken = self.latent_core().take(keys)
        if self.rank == 0:
            latents = {f"latents/{key}": z for key, (z, _) in taken.items()}
            save_file(latents | {f"positions/{key}": p for key, (_, p) in taken.items()}, path)
        return {key: len(positions) for key, (_, positions) in taken.items()}

    def latent_stats(self) -> dict[str, Any]:
        """Live and waiting requests, resumptions after preemption, and which model runner this is."""
        core = self.latent_core()
        runner = "v2" if self.use_v2_model_runner else "v1"
        return {"live": len(core.slot_of), "waiting": len(core.done), "resumed": core.resumed, "runner": runner}

    def weights_held(self, path: str) -> dict[str, int]:
        """Compare the file's tensors with what this worker's model holds; see `weight_transfer.weights_held`."""
        return weights_held(self.model_runner.get_model(), path)
