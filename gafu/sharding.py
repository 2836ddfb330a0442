"""A frozen backbone sharded by ZeRO-3 beside small trained parts that every rank holds whole.

ZeRO-3 with an optimizer adds all gradients up into one vector, and GAFU's weighting and cap need three. So DeepSpeed
gets the frozen module alone and no optimizer; adapters are put on afterwards, out of its sight.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from launch.config import LearnerSettings, OptimizerSettings
from launch.engine import deepspeed_config, numel_of
from launch.errors import UserError

_COUNTERS = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")


class FrozenShards:
    """Shards the parameters of `module` in place; forwards gather them layer by layer, whatever calls the layers.

    Call after `launch.engine.init_distributed` and before adapters are added; call the module itself as before. All
    ranks make the same module calls in the same order, in shapes of their own. UserError when a parameter trains.
    """

    def __init__(self, module: nn.Module, learner: LearnerSettings):
        import deepspeed

        trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        if trained:
            raise UserError(
                f"learner: {trained[0]} of the backbone trains, and only a frozen backbone is sharded; freeze it, and "
                "add adapters after sharding"
            )
        first = next(module.parameters())
        numel = sum(numel_of(parameter) for parameter in module.parameters())
        whole = deepspeed_config(OptimizerSettings(), learner, torch.float32, numel)
        # No precision section: DeepSpeed would cast the module, its rotary frequencies too.
        kept = ("train_micro_batch_size_per_gpu", "zero_optimization", "steps_per_print")
        self.module, self.dtype = module, first.dtype
        self._engine, *_ = deepspeed.initialize(model=module, config={name: whole[name] for name in kept})

    @contextmanager
    def graph(self) -> Iterator["Graph"]:
        """Around the forwards of one graph and all its backward passes: call `again()` before each but the first.

        Leaving the block gives up what a forward without backward had reserved.
        """
        try:
            yield Graph(self.module)
        finally:
            _restore({layer: (0, 0) for layer in self.module.modules() if _COUNTERS[0] in layer.__dict__})


class Graph:
    """Several backward passes through one graph. ZeRO-3 gathers a layer once for every forward that has not been
    differentiated yet, so from the second pass on it would compute with the empty weights of released layers."""

    def __init__(self, module: nn.Module):
        self._module, self._after_forward = module, None

    def built(self) -> None:
        """The forwards are done, the first backward pass has not begun."""
        self._after_forward = {
            layer: tuple(layer.__dict__.get(name, 0) for name in _COUNTERS)
            for layer in self._module.modules()
            if _COUNTERS[0] in layer.__dict__
        }

    def again(self) -> None:
        """Another backward pass follows. RuntimeError before `built()`."""
        if self._after_forward is None:
            raise RuntimeError("again() before built(): mark the end of the forwards first")
        _restore(self._after_forward)


def _restore(counters: dict[nn.Module, tuple[int, int]]) -> None:
    for layer, values in counters.items():
        for name, value in zip(_COUNTERS, values, strict=True):
            layer.__dict__[name] = value
