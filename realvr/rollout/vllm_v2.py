"""Latent decoding in vLLM's model runner V2 (the default where Triton works): model classes with their own state.

`vllm_plugin.register` names the classes `Latent<architecture>`; each is made here when vLLM asks for it.
"""

from importlib import import_module
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from realvr.families import family_names, get_family
from realvr.rollout.vllm_plugin import PREFIX
from realvr.rollout.vllm_v1 import latent_key, make_core


class LatentModelState(DefaultModelState):
    """Feeds latents before the forward and wraps the sampler."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.latent = make_core(vllm_config, device)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        key = latent_key(new_req_data.sampling_params)
        if key is not None:
            self.latent.add(new_req_data.req_id, key, new_req_data.prefill_token_ids, new_req_data.prompt_len)

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        self.latent.remove(req_id)

    def prepare_inputs_embeds(self, scheduled_encoder_inputs: Any, input_batch: Any, req_states: Any) -> torch.Tensor:
        embeds = super().prepare_inputs_embeds(scheduled_encoder_inputs, input_batch, req_states)
        if not self.latent.slot_of:
            return embeds
        tokens = input_batch.num_tokens
        slots = self.latent.slots(input_batch.req_ids)
        if tokens != input_batch.num_reqs:
            repeats = torch.from_numpy(input_batch.num_scheduled_tokens.astype(np.int64))
            slots = torch.repeat_interleave(slots, repeats.to(self.device, non_blocking=True), output_size=tokens)
        ids, positions = input_batch.input_ids[:tokens], input_batch.positions[:tokens]
        embeds[:tokens] = self.latent.overlay(embeds[:tokens], ids, positions, slots)
        return embeds

    def custom_sampler(self, sampler: Any) -> tuple[Any, None]:
        return LatentSampler(sampler, self), None


class LatentSampler:
    """vLLM's sampler behind the grammar's bans; everything but the call is the sampler's own."""

    def __init__(self, sampler: Any, state: LatentModelState) -> None:
        self._sampler, self._state = sampler, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        core = self._state.latent
        if core.slot_of:
            last, n = input_batch.logits_indices, input_batch.num_reqs
            prefill = self._sampler.req_states.prefill_len.gpu[input_batch.idx_mapping]
            core.step(
                logits,
                self._state.model.latent_hidden,
                input_batch.input_ids[last],
                input_batch.positions[last].long(),
                core.slots(input_batch.req_ids),
                input_batch.seq_lens[:n] >= prefill,
            )
        return self._sampler(logits, input_batch)


def latent_model(base: type) -> type:
    """`base` with the latent state; keeps the hidden states that logits are computed from (outside any CUDA graph)."""

    def compute_logits(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        self.latent_hidden = hidden_states
        return base.compute_logits(self, hidden_states, *args, **kwargs)

    def get_model_state_cls(cls: type) -> type[LatentModelState]:
        return LatentModelState

    members = {"compute_logits": compute_logits, "get_model_state_cls": classmethod(get_model_state_cls)}
    return type(PREFIX + base.__name__, (base,), {**members, "__module__": __name__})


def __getattr__(name: str) -> type:
    for family_name in family_names():
        module, _, base = get_family(family_name).vllm_model.partition(":")
        if name == PREFIX + base:
            made = globals()[name] = latent_model(getattr(import_module(module), base))
            return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
