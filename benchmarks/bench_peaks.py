# SPDX-License-Identifier: Apache-2.0
"""Peaks of steps whose largest tensors are not the model's, beside eager's.

    python -m benchmarks.bench_peaks

A language model whose logits are ten times everything else; an output that the script holds until
backward() is done; a loss over all pairs of rows. What torch's allocator hands out at most beyond
what was there before. "Bodies" is how many chunks the body alone would need for that peak.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from benchmarks.bench import parser, prepare, publish, table
from benchmarks.bench_limits import peak_of

Step = Callable[[int | None], Any]


def lazily(chunks: int | None, *batch: Tensor) -> Any:
    """Make a batch lazy, unless this is eager."""
    return batch if chunks is None else koila.lazy(*batch)


class Words(nn.Module):
    """A small body, and a head of very many words."""

    def __init__(self, n_words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(n_words, width)
        self.body = nn.Sequential(
            *(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU()))
        )
        self.head = nn.Linear(width, n_words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.words(ids)))


def words(chunks: int | None) -> None:
    """8 layers of width 64 keep 4 KiB a token; the logits, 32 KiB, are there three times."""
    model = WORDS
    ids, targets = lazily(chunks, IDS, IDS)
    F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()


def held(chunks: int | None) -> Any:
    """The output is held over backward()."""
    model = HELD
    x, y = lazily(chunks, ROWS, OUTPUTS)
    output = model(x)
    loss = F.mse_loss(output, y)
    loss.backward()
    return output, loss


def held_and_read(chunks: int | None) -> Any:
    """The output is held, and read when the step is done."""
    output, loss = held(chunks)
    return output.detach().sum().item(), loss


def contrastive(chunks: int | None) -> None:
    """All rows against all rows, both ways."""
    x, y = lazily(chunks, LEFT, RIGHT)
    logits = F.normalize(TOWERS[0](x), dim=1) @ F.normalize(TOWERS[1](y), dim=1).T * 10
    labels = torch.arange(len(LEFT))
    (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)).backward()


def one_way(chunks: int | None) -> None:
    """All rows against all rows, the loss of each row."""
    x, y = lazily(chunks, LEFT, RIGHT)
    logits = F.normalize(TOWERS[0](x), dim=1) @ F.normalize(TOWERS[1](y), dim=1).T * 10
    F.cross_entropy(logits, torch.arange(len(LEFT))).backward()


def distances(chunks: int | None) -> None:
    """All distances."""
    x, y = lazily(chunks, LEFT, RIGHT)
    torch.cdist(TOWERS[0](x), TOWERS[1](y)).sub(1).relu().mean().backward()


def differences(chunks: int | None) -> None:
    """All distances, not by matrix products."""
    x, y = lazily(chunks, LEFT, RIGHT)
    mode = "donot_use_mm_for_euclid_dist"
    torch.cdist(TOWERS[0](x), TOWERS[1](y), compute_mode=mode).sub(1).relu().mean().backward()


torch.manual_seed(0)
WORDS = Words(8192, 64, 8)
IDS = torch.randint(8192, (64, 32))
HELD = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1024))
ROWS, OUTPUTS = torch.randn(4096, 64), torch.randn(4096, 1024)
TOWERS = nn.ModuleList(
    nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)
)
LEFT, RIGHT = torch.randn(2048, 32), torch.randn(2048, 32)

STEPS: dict[str, tuple[Step, nn.Module]] = {
    "logits": (words, WORDS),
    "held output": (held, HELD),
    "held output, read": (held_and_read, HELD),
    "contrastive": (contrastive, TOWERS),
    "contrastive, one way": (one_way, TOWERS),
    "distances": (distances, TOWERS),
    "distances, one by one": (differences, TOWERS),
}
CHUNKS = (1, 2, 4, 8)


def peak(step: Step, model: nn.Module, chunks: int | None) -> float:
    """MiB at most."""
    model.zero_grad(set_to_none=True)
    with koila.config(chunks=chunks):
        return peak_of(partial(step, chunks)) / 2**20


def main() -> None:
    args = parser(__doc__).parse_args()
    prepare(args)
    found = []
    for name, (step, model) in STEPS.items():
        plain = peak(step, model, None)
        shares = (f"{peak(step, model, chunks) / plain:.2f}" for chunks in CHUNKS)
        found.append([name, f"{plain:.1f}", *shares])
    heads = ["step", "eager, MiB", *(f"{chunks} chunks" for chunks in CHUNKS)]
    publish(args, "Peaks of large outputs, of eager's", [table(heads, found)])


if __name__ == "__main__":
    main()
