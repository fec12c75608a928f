# SPDX-License-Identifier: Apache-2.0
"""Models of sequences, written as people write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N_TOKENS = 13
N_CLASSES = 5
WIDTH = 12


class Attention(nn.Module):
    """Causal self-attention, by the fused function or by hand."""

    def __init__(self, n_heads: int = 2, *, fused: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_heads, self.fused, self.p = n_heads, fused, dropout
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16, dtype=torch.bool)))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.qkv(x).split(c, dim=2)
        q, k, v = (z.view(b, t, self.n_heads, c // self.n_heads).transpose(1, 2) for z in (q, k, v))
        if self.fused:
            p = self.p if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            score = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            score = score.masked_fill(self.mask[:t, :t] == 0, float("-inf"))
            y = self.drop(F.softmax(score, dim=-1)) @ v
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))


class Gpt(nn.Module):
    """A small GPT with tied input and output embeddings."""

    def __init__(self, *, fused: bool, dropout: float = 0.0, n_layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(N_TOKENS, WIDTH), nn.Embedding(16, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * n_layers + 1))
        self.attentions = nn.ModuleList(
            Attention(fused=fused, dropout=dropout) for _ in range(n_layers)
        )
        self.mlps = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                nn.Linear(4 * WIDTH, WIDTH),
                nn.Dropout(dropout),
            )
            for _ in range(n_layers)
        )
        self.head = nn.Linear(WIDTH, N_TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        t = ids.shape[1]
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(t, device=ids.device)))
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


class Encoder(nn.Module):
    """torch's own encoder layers over padded sequences, batch first or time first."""

    def __init__(self, *, batch_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.tokens = nn.Embedding(N_TOKENS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 3, 2 * WIDTH, dropout, batch_first=batch_first, norm_first=bool(i)
            )
            for i in range(2)
        )
        self.head = nn.Linear(WIDTH, N_CLASSES)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        """Take ids as (B, T) or (T, B), and the padding always as (B, T)."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return self.head(x[:, 0] if self.batch_first else x[0])


class CrossAttention(nn.Module):
    """nn.MultiheadAttention of a learned query over padded keys, pooled by a masked mean."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.tokens = nn.Embedding(N_TOKENS, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)
        self.query = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(2 * WIDTH, N_CLASSES)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.batch_first:
            query = self.query.expand(x.size(0), 1, -1)
            pooled, _ = self.attention(query, x, x, key_padding_mask=padding, need_weights=False)
            pooled = pooled.squeeze(1)
            kept = (~padding).to(x.dtype).unsqueeze(-1)
            mean = (x * kept).sum(1) / kept.sum(1)
        else:
            query = self.query.view(1, 1, -1).expand(-1, x.shape[1], -1)
            pooled, weights = self.attention(query, x, x, key_padding_mask=padding)
            pooled = pooled[0]
            mean = torch.bmm(weights, x.transpose(0, 1)).squeeze(1)
        return self.head(torch.cat([pooled, mean], -1))


class Recurrent(nn.Module):
    """An LSTM or a GRU and its last step."""

    def __init__(self, cell: type[nn.Module], *, batch_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.tokens = nn.Embedding(N_TOKENS, 6)
        self.rnn = cell(
            6, 8, num_layers=2, batch_first=batch_first, bidirectional=True, dropout=dropout
        )
        self.head = nn.Linear(16, N_CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        out, _ = self.rnn(self.tokens(ids))
        return self.head(out[:, -1] if self.batch_first else out[-1])


class StatefulLstm(nn.Module):
    """An LSTM whose first state is made by hand with the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(N_TOKENS, 6)
        self.rnn = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, N_CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        h0 = torch.zeros(1, ids.size(0), 8, dtype=self.head.weight.dtype)
        _, (h, _) = self.rnn(self.tokens(ids), (h0, torch.zeros_like(h0)))
        return self.head(h.squeeze(0))


class CellLoop(nn.Module):
    """A GRU cell stepped by a Python loop, its states stacked at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(N_TOKENS, 6)
        self.cell = nn.GRUCell(6, 8)
        self.head = nn.Linear(8, N_CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.zeros(len(ids), 8, dtype=self.head.weight.dtype)
        states = []
        for t in range(ids.shape[1]):
            h = self.cell(self.tokens(ids[:, t]), h)
            states.append(h)
        return self.head(torch.stack(states, dim=1).amax(dim=1))


class BagOfWords(nn.Module):
    """An embedding bag with weights for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(N_TOKENS, 8, mode="sum")
        self.fc = nn.Linear(8, N_CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        weights = torch.ones_like(ids, dtype=self.fc.weight.dtype) / ids.shape[1]
        return self.fc(F.hardswish(self.bag(ids, per_sample_weights=weights)))


class TextCnn(nn.Module):
    """Convolutions of several widths over words, each pooled by the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(N_TOKENS, 6, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(6, 4, k) for k in (2, 3))
        self.fc = nn.Linear(8, N_CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids).permute(0, 2, 1)
        pooled = [F.relu(conv(x)).max(dim=2).values for conv in self.convs]
        return self.fc(torch.cat(pooled, dim=1))


class Seq2Seq(nn.Module):
    """A GRU decoder with attention over a GRU encoder; logits for each target step."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(N_TOKENS, 8)
        self.encoder = nn.GRU(8, 8, batch_first=True)
        self.decoder = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(16, N_TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        memory, state = self.encoder(self.tokens(ids))
        steps, _ = self.decoder(self.tokens(ids), state)
        weights = torch.bmm(steps, memory.transpose(1, 2)).softmax(-1)
        context = torch.einsum("bts,bsd->btd", weights, memory)
        return self.out(torch.cat([steps, context], dim=-1))
