"""Sizes and data of the tiny model; imports nothing of Nanotron's."""

import torch
from torch import Tensor

WIDTH, ROWS, LAYERS = 8, 3, 4


def rows(number: int) -> tuple[Tensor, Tensor]:  # each (ROWS, WIDTH) bfloat16
    """Return inputs and targets of a microbatch."""
    generator = torch.Generator().manual_seed(1000 + number)
    both = torch.randn(2, ROWS, WIDTH, generator=generator).to(torch.bfloat16)
    return both[0], both[1]
