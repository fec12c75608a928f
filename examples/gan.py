# SPDX-License-Identifier: Apache-2.0
"""A generator and a discriminator that train each other, with batch normalization in the generator.

    python examples/gan.py --memory-limit 16MiB --steps 10

The images and the noise are lazy, so both backward passes of a step run in chunks. In both, the
generator normalizes by the whole batch.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import koila

N_NOISE = 32


def rings(n: int) -> torch.Tensor:
    """Return images of rings of random size, which the generator learns to draw."""
    axis = torch.linspace(-1, 1, 16)
    distance = (axis[:, None] ** 2 + axis**2).sqrt()
    radius = 0.3 + 0.5 * torch.rand(n, 1, 1, 1)
    return 2 * torch.exp(-40 * (distance - radius) ** 2) - 1


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--memory-limit", default="16MiB", help="empty: use free memory")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    if args.memory_limit:
        koila.config(memory_limit=args.memory_limit)
    generator = nn.Sequential(
        nn.Linear(N_NOISE, 512),
        nn.Unflatten(1, (32, 4, 4)),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(1, 16, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(512, 1),
    )
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))

    for step in range(args.steps):
        real, noise = rings(args.batch_size), torch.randn(args.batch_size, N_NOISE)
        real, noise = koila.lazy(real, noise, batch=0)  # the one line

        fake = generator(noise).detach()
        d_loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()

        g_loss = F.softplus(-discriminator(generator(noise))).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        if step % 5 == 0:
            print(f"step {step}: {d_loss.item():.4f} and {g_loss.item():.4f}")

    print(koila.report())
    print(f"final losses: {d_loss.item():.6f} and {g_loss.item():.6f}")
    return g_loss.item()


if __name__ == "__main__":
    main()
