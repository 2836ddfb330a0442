"""Reward functions in TRL's signature, f(completions, **columns) → one float a completion, and how they are loaded.

Completions are text with special tokens kept. Columns are lists of the same length: `prompts`, `answer`, `kind`,
`options`, `id`, `images`, `source`, `meta`, `finish`.
"""

import importlib
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from launch.errors import UserError
from realvr.config import RewardSettings
from realvr.families.base import END, START
from realvr.rewards import worker
from realvr.rewards.grading import grade

# The token that ended the completion is not part of what was said.
EOS = re.compile(r"(?:<\|(?:im_end|endoftext|eot_id|end|eos)\|>|</s>|<eos>|<end_of_turn>)\Z")
FORMAT = re.compile(
    rf"{re.escape(START)}(?:(?!<\|lvr_|</?answer>).|{re.escape('<|lvr|>')})*{re.escape(END)}"
    r"\s*<answer>(?:(?!</?answer>|<\|lvr).)*\S(?:(?!</?answer>|<\|lvr).)*</answer>",
    re.DOTALL,
)


def accuracy(
    completions: Sequence[str],
    answer: Sequence[str],
    kind: Sequence[str] | None = None,
    options: Sequence[Sequence[str]] | None = None,
    **columns: Any,
) -> list[float]:
    """1 where the completion has exactly one `<answer>…</answer>` block and it is right, else 0 (paper, stage 2)."""
    kinds = kind or ["text"] * len(completions)
    choices = options or [()] * len(completions)
    rows = zip(completions, answer, kinds, choices, strict=True)
    return [float(grade(text, gold, k, "reward", o).correct) for text, gold, k, o in rows]


def format(completions: Sequence[str], **columns: Any) -> list[float]:
    """1 where the completion is `<|lvr_start|>…<|lvr_end|>`, white space, `<answer>…</answer>` and nothing else, or 0.

    One closed span, one answer that is not blank; the end-of-sequence token at the end is allowed (paper, stage 2).
    """
    return [float(FORMAT.fullmatch(EOS.sub("", text)) is not None) for text in completions]


def warm_up() -> None:
    """Called once in a worker, before the clock starts: math-verify takes a second to import."""
    importlib.import_module("realvr.rewards.maths")


@dataclass(frozen=True)
class Reward:
    """A reward function that was found: its name in the log, its path, its weight, its time limit in seconds."""

    name: str
    path: str
    weight: float
    timeout_s: float


def load_rewards(settings: Sequence[RewardSettings]) -> list[Reward]:
    """Find every function of the configuration. UserError, one line, where a path leads nowhere.

    A function's name is the last part of its path, or the whole path if two functions share it. Only functions inside
    installed packages may be named, unless the entry says `local: true`: a configuration that one is given should not
    run a file that lies about.
    """
    if not settings:
        raise UserError("rewards is empty: name at least one function, for example realvr.rewards.rewards.accuracy")
    for entry in settings:
        find(entry)
    paths = [entry.function for entry in settings]
    if len(set(paths)) < len(paths):
        raise UserError(f"rewards names {max(paths, key=paths.count)} twice: give it once, with the sum of the weights")
    short = [path.rpartition(".")[2] for path in paths]
    names = [path if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True)]
    return [Reward(n, e.function, e.weight, e.timeout_s) for n, e in zip(names, settings, strict=True)]


def find(entry: RewardSettings) -> Callable[..., Any]:
    """The function that an entry names; UserError if there is none, it is none, or it may not be named."""
    path = entry.function
    module, _, name = path.rpartition(".")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        raise UserError(f"rewards: {path!r} is not a dotted path; write package.module.function")
    if not entry.local and path.split(".")[0] not in packages_distributions():
        raise UserError(
            f"rewards: {path} is in no installed package; install the package it is in, or allow your own file with "
            f"`local: true` beside `function`"
        )
    here = str(Path.cwd())
    if entry.local and not {"", here} & set(sys.path):
        sys.path.append(here)  # a console script does not look into the folder it is started from
    try:
        function = worker.resolve(path)
    except AttributeError:
        raise UserError(f"rewards: {module} has no {name!r}; name a function that it defines") from None
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"rewards: {path} cannot be imported ({reason}); check the path and its imports") from None
    if not callable(function):
        raise UserError(f"rewards: {path} is a {type(function).__name__}, not a function of (completions, **columns)")
    return function


def check(reward: Reward, values: Any, number: int) -> list[float]:
    """What a function returned, as floats; UserError unless it is one finite number a completion."""
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise UserError(f"rewards: {reward.path} returned a {type(values).__name__}; it must return a list of floats")
    if len(values) != number:
        raise UserError(
            f"rewards: {reward.path} returned {len(values)} values for {number} completions; return one each"
        )
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        raise UserError(f"rewards: {reward.path} returned {list(values)!r:.80}; every value must be a float") from None
    if not all(map(math.isfinite, numbers)):
        raise UserError(f"rewards: {reward.path} returned {numbers!r:.80}; every value must be finite")
    return numbers
