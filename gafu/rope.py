"""Rotary positions on a plane: half of a head turns with the row, half with the column."""

import torch


def cell_centres(grid: tuple[int, int], frame: tuple[int, int]) -> torch.Tensor:
    """Centres of the cells of `grid` laid over `frame`, in the frame's own index: [rows·columns, 2], raster order.

    A cell of the frame itself sits at its (row, column); a coarser cell in the middle of those it covers.
    """
    rows, columns = ((torch.arange(n) + 0.5) * size / n - 0.5 for n, size in zip(grid, frame, strict=True))
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)


def plane_angles(places: torch.Tensor, head_dim: int, base: float) -> torch.Tensor:
    """Angles [T, head_dim / 2] of places [T, 2]: the first half turns with the row, the second with the column.

    ValueError when head_dim is no multiple of 4.
    """
    if head_dim % 4:
        raise ValueError(f"head_dim is {head_dim}; two axes rotated in pairs want a multiple of 4")
    quarter = head_dim // 4
    frequencies = base ** -(torch.arange(quarter, dtype=torch.float64, device=places.device) / quarter)
    return (places.double()[:, :, None] * frequencies).flatten(1)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (2i, 2i+1) of x [..., T, head_dim] by angles [T, head_dim / 2]."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
