"""Run a function on gloo ranks, each a process; what rank i returns is item i of the result."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing


def on_ranks(world: int, function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """function(rank, world, *args) of an importable module → its results, as torch.save keeps them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.start_processes(_start, (world, port, function, str(folder), args), world, start_method="fork")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _start(rank: int, world: int, port: int, function: Callable[..., Any], folder: str, args: tuple) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        torch.save(function(rank, world, *args), Path(folder) / f"{rank}.pt")
    finally:
        distributed.destroy_process_group()
