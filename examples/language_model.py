# SPDX-License-Identifier: Apache-2.0
"""A small GPT on the characters of Python's help texts: one line makes its batches lazy.

    python examples/language_model.py --memory-limit 48MiB --steps 20

The logits and the attention of 64 blocks of text take more memory than the limit. koila splits each
batch into as few chunks as fit. Loss, gradients and dropout are those of the whole batch.
"""

import argparse
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import nn

import koila


class Block(nn.Module):
    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x):
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, n_chars, n_positions, width=64, n_heads=4, n_layers=2):
        super().__init__()
        self.chars = nn.Embedding(n_chars, width)
        self.positions = nn.Embedding(n_positions, width)
        self.blocks = nn.Sequential(*(Block(width, n_heads) for _ in range(n_layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, n_chars))

    def forward(self, x):
        positions = self.positions(torch.arange(x.shape[1]))
        return self.head(self.blocks(self.chars(x) + positions))


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--length", type=int, default=96, help="characters in a block of text")
    parser.add_argument("--memory-limit", default="48MiB", help="empty: use free memory")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    if args.memory_limit:
        koila.config(memory_limit=args.memory_limit)
    text = "\n".join(topics.topics.values())[:200_000]
    number_of = {char: number for number, char in enumerate(sorted(set(text)))}
    data = torch.tensor([number_of[char] for char in text])
    model = GPT(len(number_of), args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(args.steps):
        starts = torch.randint(len(data) - args.length, (args.batch_size, 1))
        blocks = data[starts + torch.arange(args.length + 1)]
        blocks = koila.lazy(blocks, batch=0)  # the one line: the rest is plain PyTorch
        logits = model(blocks[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    print(koila.report())
    print(f"final loss: {loss.item():.6f}")
    return loss.item()


if __name__ == "__main__":
    main()
