# SPDX-License-Identifier: Apache-2.0
"""Train a character-level GPT for a few steps: an ordinary script. Prints one line of JSON a step.

With --koila one line more runs: the one that makes the batch lazy.
"""

from __future__ import annotations

import argparse
import json
import time
from pydoc_data.topics import topics

import torch
from torch import Tensor

from machine import Machine
from model import GPT


class Text:
    """The documentation that comes with Python, as numbers of characters."""

    def __init__(self, device: str) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        chars = sorted(set(text))
        number = {char: i for i, char in enumerate(chars)}
        self.n_chars = len(chars)
        self._data = torch.tensor([number[char] for char in text])
        self._device = device

    def batch(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Random pieces of the text, and the character that follows at each position."""
        starts = torch.randint(len(self._data) - length, (rows, 1))
        pieces = self._data[starts + torch.arange(length + 1)].to(self._device)
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--koila", action="store_true", help="make the batch lazy")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--memory-limit", type=int, metavar="BYTES", help="run on a smaller machine"
    )
    parser.add_argument("--rows", type=int, default=48, help="rows of a batch")
    parser.add_argument("--length", type=int, default=64, help="characters of a row")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="FILE", help="write the final parameters here")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.koila:
        import koila
    machine = Machine(args.device, args.memory_limit)

    torch.manual_seed(args.seed)
    text = Text(args.device)
    model = GPT(text.n_chars, length=args.length).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    for step in range(args.steps):
        start = time.perf_counter()
        x, y = text.batch(args.rows, args.length)
        if args.koila:
            x, y = koila.lazy(x, y, batch=0)  # the one line
        optimizer.zero_grad()
        loss = model.loss(x, y)
        loss.backward()
        optimizer.step()
        line = {
            "step": step + 1,
            "loss": loss.item(),
            "seconds": time.perf_counter() - start,
            "bytes_peak": machine.bytes_peak(),
            "chunks": koila.report().n_chunks if args.koila else 1,
        }
        print(json.dumps(line), flush=True)

    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
