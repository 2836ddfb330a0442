"""Rollouts from vLLM, in this process. Latent decoding is a plug-in (`vllm_plugin`); the engine is unmodified."""

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from launch.errors import UserError
from realvr.config import LatentSettings, ModelSettings, RolloutSettings
from realvr.data.examples import Example
from realvr.data.prompts import PromptBuilder
from realvr.rollout.completions import check_request, completion_seed, completion_text
from realvr.rollout.latent_core import Grammar
from realvr.rollout.records import Group, Rollout, Sampling
from realvr.rollout.vllm_args import engine_args, prepare_environment
from realvr.rollout.weights_file import check_weights, checkpoint_folder, checkpoint_shapes

log = logging.getLogger(__name__)

Request = tuple[Example, int, int, Sequence[str]]  # example, its seed, its prompt's length, a key a sibling


class VllmEngine:
    """RolloutEngine on `vllm.LLM` (offline, one process unless `rollout.tensor_parallel` > 1).

    Raises UserError for a checkpoint without latent tokens and for engine arguments that latents forbid.
    """

    def __init__(self, model: ModelSettings, latent: LatentSettings, rollout: RolloutSettings, seed: int) -> None:
        self.builder = PromptBuilder(model.path, model.min_visual_tokens, model.max_visual_tokens)
        self.latent, self.grammar = latent, Grammar.of(self.builder.ids, latent)
        on_cpu = prepare_environment(model.path)
        args = engine_args(model, rollout, self.grammar, self.builder.processor_kwargs, seed, on_cpu)
        self.images_allowed = args["limit_mm_per_prompt"]["image"]
        self.shapes = checkpoint_shapes(checkpoint_folder(model.path))
        self.tower_prefix = self.builder.family.checkpoint_prefixes()["tower"]
        from vllm import LLM

        self.llm = LLM(**args)
        self.limit = self.llm.model_config.max_model_len
        self.version = 0
        self.llm.update_weight_version("0")
        self.transfer_ready = False
        self.requests = count()  # one number a generate() call: completions never share a key

    def generate(self, examples: Sequence[Example], sampling: Sampling, seeds: Sequence[int]) -> list[Group]:
        """One group per example, G separate requests each; the prompt is processed once a group."""
        self._check_images(examples)
        lengths = [self.builder.length(e) for e in examples]
        check_request(examples, seeds, sampling, lengths, self.limit)
        call = next(self.requests)
        keys = [[f"{call}-{e}-{i}" for i in range(sampling.n)] for e in range(len(examples))]
        flat = [key for group in keys for key in group]
        try:
            outputs = self._run(zip(examples, seeds, lengths, keys, strict=True), sampling)
        except BaseException:  # also when interrupted: nothing of this call may stay in the engine
            self.llm.llm_engine.abort_request(flat)
            self._take(flat)
            raise
        latents = self._take(flat)
        return [
            Group(example, tuple(self._rollout(outputs[k], *latents[k], sampling) for k in group))
            for example, group in zip(examples, keys, strict=True)
        ]

    def set_latent(self, latent: LatentSettings) -> None:
        """Go on with another K, open or close; only between two calls of `generate`."""
        self.latent, self.grammar = latent, Grammar.of(self.builder.ids, latent)
        self.llm.collective_rpc("set_grammar", args=(self.grammar.to_dict(),))

    def load_weights(self, path: str | Path, version: int, checksum: str) -> None:
        """Replace the weights, prove it, reset every cache.

        Proved: the file is byte for byte what the learner announced and holds the whole model (checksum, names,
        shapes); each tensor in it is what the engine now computes with (`weight_transfer.weights_held`); the engine
        reports `version`. A bad file raises UserError and leaves the engine as it was. RuntimeError afterwards means
        that the engine holds a mixture and must be replaced.
        """
        check_weights(path, checksum, self.shapes, self.tower_prefix)
        if not self.transfer_ready:
            self.init_weight_transfer_engine({"init_info": {}})
        self.start_weight_update()
        self.update_weights({"update_info": {"path": str(path)}})
        self.llm.finish_weight_update(weight_version=str(version))
        self._prove(str(path), version)
        self.reset_caches()
        self.version = version

    def _prove(self, path: str, version: int) -> None:
        held = self.llm.collective_rpc("weights_held", args=(path,))
        if any(worker["different"] for worker in held) or not any(worker["equal"] for worker in held):
            raise RuntimeError(f"weight sync of version {version} failed: {held}")
        if self.llm.get_weight_version() != str(version):
            raise RuntimeError(f"weight sync: vLLM reports {self.llm.get_weight_version()}, wanted {version}")
        log.info("weights of version %d: %s", version, held)

    def reset_caches(self) -> None:
        """Forget prompts, pictures and encoder outputs that were computed with older weights."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    # The names that vLLM's RayVLLMWeightSyncClient calls: with them an actor that holds this engine can be the target
    # of the native nccl and ipc back ends, whose trainer side drives the whole exchange.

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.llm.init_weight_transfer_engine(request)
        self.transfer_ready = True

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, request: Any) -> None:
        self.llm.update_weights(request)

    def finish_weight_update(self) -> None:
        self.llm.finish_weight_update()
        self.reset_caches()

    def update_weight_version(self, version: str) -> None:
        self.llm.update_weight_version(version)
        self.version = int(version)

    def close(self) -> None:
        """Stop the engine and its worker processes, if it has any; idempotent."""
        if self.llm is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        cleanup_dist_env_and_memory()

    def _check_images(self, examples: Sequence[Example]) -> None:
        for example in examples:
            if len(example.images) > self.images_allowed:
                raise UserError(
                    f"record {example.id}: {len(example.images)} images, the engine takes {self.images_allowed} a "
                    f"prompt; raise rollout.engine_args.limit_mm_per_prompt (for example {{image: 16, video: 0}})"
                )

    def _run(self, groups: Iterable[Request], sampling: Sampling) -> dict[str, Any]:
        """Finished outputs by key. Groups enter as there is room for them, each with its leader first.

        vLLM looks a prompt up in its prefix cache once, when it admits the request, and it admits siblings before their
        common prompt is computed wherever pictures exceed the encoder's budget of a step. So the siblings wait until
        the leader has its first token; then they share everything but the prompt's last partial block.
        """
        engine, finished = self.llm.llm_engine, {}
        states, room = engine.output_processor.request_states, engine.vllm_config.scheduler_config.max_num_seqs
        groups, leaders, flying = iter(groups), {}, 0
        following = next(groups, None)
        while following is not None or flying:
            while following is not None and (flying == 0 or flying + sampling.n <= room):
                example, seed, length, keys = following
                prompt = self._prompt(example, length)
                params = [self._params(sampling, completion_seed(seed, i), key) for i, key in enumerate(keys)]
                siblings = list(zip(keys[1:], params[1:], strict=True))
                leaders[engine.add_request(keys[0], prompt, params[0])] = (prompt, siblings)
                flying += sampling.n
                following = next(groups, None)
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = output
                    flying -= 1
            for leader in [name for name in leaders if name not in states or not states[name].is_prefilling]:
                prompt, siblings = leaders.pop(leader)
                for key, own in siblings:
                    engine.add_request(key, prompt, own)
        return finished

    def _prompt(self, example: Example, length: int) -> Any:
        """What vLLM makes of the example, once for all siblings: tokens with pictures expanded, pixels, hashes."""
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        prompt: dict[str, Any] = {"prompt_token_ids": self.builder.token_ids(example)}
        if example.images:
            prompt["multi_modal_data"] = {"image": self.builder.images(example)}
        renderer = self.llm.llm_engine.renderer
        (rendered,) = renderer.render_cmpl([parse_model_prompt(self.llm.model_config, prompt)])
        if len(rendered["prompt_token_ids"]) != length:
            raise RuntimeError(
                f"{example.id}: vLLM's prompt has {len(rendered['prompt_token_ids'])} tokens, not {length}"
            )
        return rendered

    def _params(self, sampling: Sampling, seed: int, key: str) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=seed if sampling.temperature > 0 else None,
            max_tokens=sampling.max_new_tokens,
            stop=list(sampling.stop),
            stop_token_ids=list(self.builder.ids.eos),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(sampling.stop),  # only to look for stop strings: the text is decoded once, at the end
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"latent_key": key},
        )

    def _take(self, keys: Sequence[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        from safetensors.numpy import load_file

        with shared_file("latents") as path:
            self.llm.collective_rpc("take_latents", args=(list(keys), str(path)))
            held = load_file(path)
        return {k: (held[f"latents/{k}"], held[f"positions/{k}"]) for k in keys if f"latents/{k}" in held}

    def _rollout(self, output: Any, latents: np.ndarray, positions: np.ndarray, sampling: Sampling) -> Rollout:
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"request {output.request_id} ended with {completion.finish_reason!r}")
        tokens = np.asarray(completion.token_ids, dtype=np.int64)
        where = np.flatnonzero(tokens == self.grammar.latent)
        positions = positions[: len(where)] - len(output.prompt_token_ids)  # one may be stored that was never fed
        if not np.array_equal(positions, where):
            raise RuntimeError(f"request {output.request_id}: latents at {positions}, their tokens at {where}")
        versions = np.zeros(len(tokens), dtype=np.int32)
        for span in completion.weight_versions or ():
            versions[span.start : span.end] = int(span.version)
        return Rollout(
            tokens=tokens,
            logprobs=np.asarray(completion.logprobs.logprobs, dtype=np.float32),
            latents=latents[: len(where)],
            latent_positions=where,
            versions=versions,
            text=completion_text(self.builder.tokenizer, tokens.tolist(), self.grammar.eos, sampling.stop),
            finish=completion.finish_reason,
        )


@contextmanager
def shared_file(kind: str) -> Iterator[Path]:
    """A path in shared memory (in the temporary folder where there is none) whose file is gone afterwards."""
    shared = Path("/dev/shm")
    folder = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    handle, name = tempfile.mkstemp(prefix=f"realvr-{kind}-{os.getpid()}-", suffix=".safetensors", dir=folder)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        with suppress(FileNotFoundError):
            Path(name).unlink()
