# SPDX-License-Identifier: Apache-2.0
"""Convolutions with batch normalization on generated images: one line makes the loader lazy.

    python examples/image_classifier.py --memory-limit 20MiB --steps 12

Gradient accumulation would normalize each small batch by its own mean and variance. koila
normalizes its chunks by those of the whole batch, and updates the running statistics with them.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import koila


def images(n: int, n_classes: int = 10) -> TensorDataset:
    """Return noisy pictures of patterns, one pattern for each class."""
    patterns = torch.randn(n_classes, 3, 8, 8)
    labels = torch.randint(n_classes, (n,))
    clean = F.interpolate(patterns[labels], size=(16, 16), mode="bilinear")
    return TensorDataset(clean + 0.5 * torch.randn_like(clean), labels)


def block(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(n_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--memory-limit", default="20MiB", help="empty: use free memory")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    if args.memory_limit:
        koila.config(memory_limit=args.memory_limit)
    data = images(args.steps * args.batch_size)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    loader = koila.lazy(loader)  # the one line: all its batches are lazy
    model = nn.Sequential(
        block(3, 16), block(16, 32), nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for step, (x, y) in enumerate(loader):
        logits = model(x)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    print(koila.report())
    print(f"final loss: {loss.item():.6f}")
    return loss.item()


if __name__ == "__main__":
    main()
