# SPDX-License-Identifier: Apache-2.0
"""A vision transformer with bfloat16 autocast, accumulated gradients, clipping, and warmup."""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class ViT(nn.Module):
    def __init__(self, side=16, patch=4, dim=48, depth=2, heads=4, classes=10, dropout=0.1):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, dim))
        layer = nn.TransformerEncoderLayer(
            dim, heads, 4 * dim, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.encoder(x)[:, 0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.randint(10, (384,))
    prototypes = torch.randn(10, 3, 16, 16)
    images = prototypes[target] + torch.randn(384, 3, 16, 16)
    loader = DataLoader(TensorDataset(images, target), args.batch_size, shuffle=True)
    model = ViT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    total = args.epochs * len(loader) // args.accumulate
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total),
        ],
        milestones=[1],
    )
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    for epoch in range(args.epochs):
        model.train()
        running = 0.0
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            with torch.autocast(device_type=device, dtype=torch.bfloat16):
                logits = model(x)
                loss = criterion(logits, y) / args.accumulate
            scaler.scale(loss).backward()
            running += loss.item()
            if (i + 1) % args.accumulate == 0:
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                scheduler.step()
                lr = scheduler.get_last_lr()[0]
                print(f"epoch {epoch} loss {running:.4f} norm {norm:.3f} lr {lr:.6f}")
                running = 0.0
        with tempfile.TemporaryDirectory() as folder:
            torch.save(
                {"model": model.state_dict(), "scheduler": scheduler.state_dict()},
                Path(folder) / "last.pt",
            )


if __name__ == "__main__":
    main()
