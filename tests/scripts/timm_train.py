# SPDX-License-Identifier: Apache-2.0
"""Train a network of timm: mixup, soft targets, an average of the weights, a cosine schedule."""

import argparse

import numpy as np
import torch
from timm import create_model
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, ModelEmaV2, accuracy, dispatch_clip_grad
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet10t")
parser.add_argument("--batch-size", type=int, default=48)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--smoothing", type=float, default=0.1)
args = parser.parse_args()


def main():
    np.random.seed(0)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.randint(10, (196,))
    images = torch.randn(10, 3, 24, 24)[target] + torch.randn(196, 3, 24, 24)
    train_loader = DataLoader(
        TensorDataset(images[:144], target[:144]), args.batch_size, shuffle=True, drop_last=True
    )
    val_loader = DataLoader(TensorDataset(images[144:], target[144:]), args.batch_size)
    model = create_model(
        args.model, num_classes=10, channels=(8, 16, 32, 64), drop_path_rate=0.1
    ).to(device)
    ema = ModelEmaV2(model, decay=0.8)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=args.lr, weight_decay=1e-4, momentum=0.9)
    scheduler = CosineLRScheduler(optimizer, t_initial=args.epochs, warmup_t=1, warmup_lr_init=0.01)
    mixup_fn = Mixup(mixup_alpha=0.4, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
    train_loss_fn, validate_loss_fn = SoftTargetCrossEntropy(), LabelSmoothingCrossEntropy(0.1)
    for epoch in range(args.epochs):
        losses = AverageMeter()
        model.train()
        for input, target in train_loader:
            input, target = input.to(device), target.to(device)
            input, target = mixup_fn(input, target)
            output = model(input)
            loss = train_loss_fn(output, target)
            optimizer.zero_grad()
            loss.backward()
            dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
            optimizer.step()
            ema.update(model)
            losses.update(loss.item(), input.size(0))
        scheduler.step(epoch + 1)
        top1 = AverageMeter()
        val_losses = AverageMeter()
        for which in (model, ema.module):
            which.eval()
            with torch.no_grad():
                for input, target in val_loader:
                    input, target = input.to(device), target.to(device)
                    output = which(input)
                    acc1, _ = accuracy(output, target, topk=(1, 5))
                    val_losses.update(validate_loss_fn(output, target).item(), input.size(0))
                    top1.update(acc1.item(), output.size(0))
        print(
            f"epoch {epoch} train {losses.avg:.5f} val {val_losses.avg:.5f} top1 {top1.avg:.3f} "
            f"lr {optimizer.param_groups[0]['lr']:.5f}"
        )


if __name__ == "__main__":
    main()
