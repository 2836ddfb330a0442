"""What both engines agree on: a completion's random stream, its text, and what a sampling request must satisfy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from launch.errors import UserError
from realvr.data.examples import Example
from realvr.rollout.records import Sampling


def completion_seed(seed: int, index: int) -> int:
    """63-bit seed of rollout `index` of an example, from the example's seed alone."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def completion_text(tokenizer: Any, tokens: Sequence[int], eos: Sequence[int], stop: Sequence[str]) -> str:
    """Text with the latent markers; a final EOS is left out, and what follows a stop string within its token."""
    body = tokens[:-1] if len(tokens) and tokens[-1] in eos else tokens
    text = tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    ends = [text.index(s) + len(s) for s in stop if s in text]
    return text[: min(ends)] if ends else text


def check_request(
    examples: Sequence[Example], seeds: Sequence[int], sampling: Sampling, lengths: Sequence[int], limit: int
) -> None:
    """Stop before anything is sampled when a prompt and its longest completion do not fit; `limit` in tokens."""
    if len(seeds) != len(examples):
        raise ValueError(f"{len(examples)} examples need as many seeds, not {len(seeds)}")
    for example, length in zip(examples, lengths, strict=True):
        if length + sampling.max_new_tokens > limit:
            raise UserError(
                f"record {example.id}: {length} prompt tokens + {sampling.max_new_tokens} new ones exceed max_model_len"
                f" {limit}; raise rollout.engine_args.max_model_len or lower model.max_visual_tokens or max_new_tokens"
            )
