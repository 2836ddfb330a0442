"""Tiny policies in float64 for the learner's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.realvr.learner.samples import World


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """RMSNorm in the type it is given: transformers' own goes through float32, which would hide 1e-9 in 1e-7."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen25
    from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(qwen25.Qwen2_5_VLRMSNorm, "forward", forward)
    monkeypatch.setattr(qwen3.Qwen3VLTextRMSNorm, "forward", forward)


@pytest.fixture(scope="module")
def qwen25(tiny_qwen25: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tiny_qwen25, tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def qwen3(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tiny_qwen3, tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module", params=["qwen25", "qwen3"])
def world(request: pytest.FixtureRequest) -> World:
    """Both families."""
    return request.getfixturevalue(request.param)
