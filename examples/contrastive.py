# SPDX-License-Identifier: Apache-2.0
"""A contrastive loss in which each sample is compared with all others of the batch, as in SimCLR.

    python examples/contrastive.py --memory-limit 20MiB --steps 15

The loss of a small batch is another loss, with fewer samples to be told apart from, so gradient
accumulation cannot replace a large batch. koila runs the encoder in chunks and the comparison over
the whole batch, and gives the gradients of both.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import koila


def views(x: torch.Tensor) -> torch.Tensor:
    """The images again, each with noise, and half of them mirrored."""
    mirrored = torch.rand(len(x), 1, 1, 1) < 0.5
    return torch.where(mirrored, x.flip(-1), x) + 0.2 * torch.randn(x.shape)


def contrastive_loss(a: torch.Tensor, b: torch.Tensor, temperature: float = 0.2) -> torch.Tensor:
    """Cross entropy of finding the other view of an image among those of all images."""
    similarity = F.normalize(a) @ F.normalize(b).T / temperature
    target = torch.arange(len(a))
    return (F.cross_entropy(similarity, target) + F.cross_entropy(similarity.T, target)) / 2


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--memory-limit", default="20MiB", help="empty: what is free")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    if args.memory_limit:
        koila.config(memory_limit=args.memory_limit)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    for step in range(args.steps):
        images = torch.randn(args.batch_size, 3, 4, 4)
        x = F.interpolate(images, size=(16, 16), mode="bilinear")
        a, b = koila.lazy(views(x), views(x), batch=0)  # the one line
        loss = contrastive_loss(model(a), model(b))
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
