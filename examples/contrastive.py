# SPDX-License-Identifier: Apache-2.0
"""A contrastive loss that compares each sample with all others in the batch, as in SimCLR.

    python examples/contrastive.py --memory-limit 20MiB --steps 15

A small batch has a different loss, because each sample is compared with fewer others. So gradient
accumulation cannot replace a large batch. koila runs the encoder in chunks and the comparison on
the whole batch, and computes the gradients of both.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import koila


def views(x: torch.Tensor) -> torch.Tensor:
    """Return the images with noise, half of them mirrored."""
    mirrored = torch.rand(len(x), 1, 1, 1) < 0.5
    return torch.where(mirrored, x.flip(-1), x) + 0.2 * torch.randn(x.shape)


def contrastive_loss(a: torch.Tensor, b: torch.Tensor, temperature: float = 0.2) -> torch.Tensor:
    """Return the cross-entropy of finding the other view of each image among all views."""
    similarity = F.normalize(a) @ F.normalize(b).T / temperature
    target = torch.arange(len(a))
    return (F.cross_entropy(similarity, target) + F.cross_entropy(similarity.T, target)) / 2


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--memory-limit", default="20MiB", help="empty: use free memory")
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
