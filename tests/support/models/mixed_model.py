"""A model with weights of usual magnitudes and elements of every width, and steps of training for it."""

from __future__ import annotations

import torch
from torch import nn


class Mixed(nn.Module):
    """Weights of usual magnitudes over several chunks, and elements of other widths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(500, 100) * 0.02)
        self.head = self.embedding
        self.small = nn.Parameter(torch.randn(30, 100) * 0.02)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("counter", torch.arange(5))
        self.register_buffer("mask", torch.zeros(9, dtype=torch.bool))
        self.register_buffer("empty", torch.empty(0, 4))


def train(model: nn.Module, step: int) -> None:
    """A step of about a quarter of a learning rate of 3e-6, and one for every other element."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 1e-6
        model.get_buffer("counter")[step % 5] += 1
        model.get_buffer("mask")[step % 9] ^= True
