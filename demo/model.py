# SPDX-License-Identifier: Apache-2.0
"""A character-level GPT in plain PyTorch: nothing here knows of koila."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention over the characters of one row."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.qkv(x).view(rows, length, 3, self.n_heads, width // self.n_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    """Attention and a two-layer network, each added to what came in."""

    def __init__(self, width: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, n_heads)
        self.norm_2 = nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.network(self.norm_2(x)))


class GPT(nn.Module):
    """Predicts the next character everywhere; the table of characters is used at both ends."""

    def __init__(
        self,
        n_chars: int,
        *,
        length: int = 128,
        width: int = 384,
        n_heads: int = 6,
        n_blocks: int = 6,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.chars = nn.Embedding(n_chars, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, n_heads, dropout) for _ in range(n_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_chars, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.chars.weight

    def forward(self, chars: Tensor) -> Tensor:
        places = torch.arange(chars.shape[1], device=chars.device)
        x = self.chars(chars) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, chars: Tensor, following: Tensor) -> Tensor:
        """Mean cross-entropy of the next character over all rows and positions."""
        return F.cross_entropy(self(chars).flatten(0, 1), following.flatten())
