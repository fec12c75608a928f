# SPDX-License-Identifier: Apache-2.0
"""A ResNet for CIFAR-sized pictures: momentum, milestones, top-k accuracy, the best checkpoint."""

import argparse
import os
import shutil
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(description="Proper ResNets for CIFAR10 in PyTorch")
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=96, type=int)
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--weight-decay", default=1e-4, type=float)
parser.add_argument("--print-freq", default=1, type=int)
best_prec1 = 0


class Pictures(Dataset):
    """Pictures whose class is the place of a bright square."""

    def __init__(self, n, seed, train):
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(9, (n,), generator=generator)
        self.data = 0.5 * torch.randn(n, 3, 18, 18, generator=generator)
        self.train = train
        for image, target in zip(self.data, self.targets, strict=True):
            row, column = divmod(target.item(), 3)
            image[:, 6 * row : 6 * row + 6, 6 * column : 6 * column + 6] += 1

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image = self.data[index]
        if self.train:  # a random crop
            top, left = torch.randint(3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[:, top : top + 18, left : left + 18]
        return image, int(self.targets[index])


class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.planes, self.is_same = planes, stride == 1 and in_planes == planes

    def shortcut(self, x):
        if self.is_same:
            return x
        extra = (self.planes - x.size(1)) // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, extra, extra), "constant", 0)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self, num_blocks, num_classes=9):
        super().__init__()
        self.in_planes = 8
        self.conv1 = nn.Conv2d(3, 8, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = self._make_layer(8, num_blocks[0], stride=1)
        self.layer2 = self._make_layer(16, num_blocks[1], stride=2)
        self.linear = nn.Linear(16, num_classes)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Conv2d)):
                nn.init.kaiming_normal_(m.weight)

    def _make_layer(self, planes, num_blocks, stride):
        layers = []
        for s in [stride] + [1] * (num_blocks - 1):
            layers.append(BasicBlock(self.in_planes, planes, s))
            self.in_planes = planes
        return nn.Sequential(*layers)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer2(self.layer1(out))
        out = F.avg_pool2d(out, out.size()[3])
        return self.linear(out.view(out.size(0), -1))


class AverageMeter:
    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def accuracy(output, target, topk=(1,)):
    maxk = max(topk)
    batch_size = target.size(0)
    _, pred = output.topk(maxk, 1, True, True)
    pred = pred.t()
    correct = pred.eq(target.view(1, -1).expand_as(pred))
    res = []
    for k in topk:
        correct_k = correct[:k].reshape(-1).float().sum(0)
        res.append(correct_k.mul_(100.0 / batch_size))
    return res


def train(train_loader, model, criterion, optimizer, epoch, args, device):
    losses, top1, top5 = AverageMeter(), AverageMeter(), AverageMeter()
    model.train()
    for i, (input, target) in enumerate(train_loader):
        target = target.to(device, non_blocking=True)
        input_var = input.to(device, non_blocking=True)
        output = model(input_var)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        prec1, prec5 = accuracy(output.data, target, topk=(1, 5))
        losses.update(loss.item(), input.size(0))
        top1.update(prec1.item(), input.size(0))
        top5.update(prec5.item(), input.size(0))
        if i % args.print_freq == 0:
            print(
                f"Epoch: [{epoch}][{i}/{len(train_loader)}]\tLoss {losses.val:.4f} "
                f"({losses.avg:.4f})\tPrec@1 {top1.val:.3f} Prec@5 {top5.val:.3f}"
            )


def validate(val_loader, model, criterion, device):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for input, target in val_loader:
            input, target = input.to(device), target.to(device)
            output = model(input)
            loss = criterion(output, target)
            output = output.float()
            loss = loss.float()
            prec1 = accuracy(output.data, target)[0]
            losses.update(loss.item(), input.size(0))
            top1.update(prec1.item(), input.size(0))
    print(f" * Prec@1 {top1.avg:.3f} Loss {losses.avg:.4f}")
    return top1.avg


def save_checkpoint(state, is_best, folder):
    torch.save(state, os.path.join(folder, "checkpoint.th"))
    if is_best:
        shutil.copyfile(
            os.path.join(folder, "checkpoint.th"), os.path.join(folder, "model_best.th")
        )


def main():
    global best_prec1
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ResNet([1, 2]).to(device)
    train_loader = DataLoader(
        Pictures(210, 1, True), batch_size=args.batch_size, shuffle=True, pin_memory=False
    )
    val_loader = DataLoader(Pictures(90, 2, False), batch_size=args.batch_size, shuffle=False)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1])
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(args.epochs):
            print(f"current lr {optimizer.param_groups[0]['lr']:.5e}")
            train(train_loader, model, criterion, optimizer, epoch, args, device)
            lr_scheduler.step()
            prec1 = validate(val_loader, model, criterion, device)
            is_best = prec1 > best_prec1
            best_prec1 = max(prec1, best_prec1)
            state = {"state_dict": model.state_dict(), "best_prec1": best_prec1}
            save_checkpoint(state, is_best, folder)


if __name__ == "__main__":
    main()
