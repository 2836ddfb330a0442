"""Reward functions that misbehave."""

import os
import time


def slow_on_wait(completions, **columns):
    for text in completions:
        if "wait" in text:
            time.sleep(60)
    return [1.0 for _ in completions]


def dies_on_crash(completions, **columns):
    if any("crash" in text for text in completions):
        os._exit(9)
    return [1.0 for _ in completions]


def raises(completions, **columns):
    raise KeyError("no such column")


def too_few(completions, **columns):
    return [1.0]


def infinite(completions, **columns):
    return [float("inf") for _ in completions]


NUMBER = 3
