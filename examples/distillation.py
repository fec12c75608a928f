# SPDX-License-Identifier: Apache-2.0
"""A small network learns from a large one that gets no gradient.

    python examples/distillation.py --memory-limit 24MiB --steps 15

The teacher is under torch.no_grad(): koila runs it where that block ends, in chunks if necessary.
It runs the student in backward(), in chunks of its own.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import koila


def network(width: int, n_layers: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(n_layers):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--memory-limit", default="24MiB", help="empty: use free memory")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    if args.memory_limit:
        koila.config(memory_limit=args.memory_limit)
    teacher = network(width=512, n_layers=2).eval()
    student = network(width=256, n_layers=2)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)

    for step in range(args.steps):
        x = torch.randn(args.batch_size, 64)
        y = torch.randint(10, (args.batch_size,))
        x, y = koila.lazy(x, y, batch=0)  # the one line
        with torch.no_grad():
            soft = F.softmax(teacher(x) / args.temperature, dim=1)
        logits = student(x)
        learned = F.log_softmax(logits / args.temperature, dim=1)
        from_teacher = F.kl_div(learned, soft, reduction="batchmean") * args.temperature**2
        loss = 0.9 * from_teacher + 0.1 * F.cross_entropy(logits, y)
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
