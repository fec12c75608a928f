# SPDX-License-Identifier: Apache-2.0
"""Networks that are held together by batch normalization, and a step of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SIZE = 16


def norm_act(n: int, act: type[nn.Module] = nn.ReLU) -> list[nn.Module]:
    return [nn.BatchNorm2d(n), act()]


def pooled(n: int, *layers: nn.Module) -> nn.Module:
    """A classifier of five classes."""
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, 5))


class Residual(nn.Module):
    """A basic block, or a bottleneck, and what goes around it."""

    def __init__(self, before: int, after: int, stride: int, is_bottleneck: bool) -> None:
        super().__init__()
        middle = after // 2 if is_bottleneck else after
        kernel = 1 if is_bottleneck else 3
        first = nn.Conv2d(before, middle, kernel, 1, kernel // 2, bias=False)
        self.layers = nn.Sequential(
            first,
            *norm_act(middle),
            nn.Conv2d(middle, middle if is_bottleneck else after, 3, stride, 1, bias=False),
            *(norm_act(middle) if is_bottleneck else []),
            *([nn.Conv2d(middle, after, 1, bias=False)] if is_bottleneck else []),
            nn.BatchNorm2d(after),
        )
        around = nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
        self.around = nn.Identity() if before == after else nn.Sequential(*around)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.around(x), inplace=True)


def resnet(is_bottleneck: bool) -> nn.Module:
    """Four stages of two blocks, as ResNet-18."""
    widths = [8, 8, 12, 16, 24]
    blocks = [
        Residual(widths[i + (k > 0)], widths[i + 1], 2 if i > 0 and k == 0 else 1, is_bottleneck)
        for i in range(4)
        for k in range(2)
    ]
    return pooled(24, nn.Conv2d(3, 8, 3, padding=1, bias=False), *norm_act(8), *blocks)


class Squeezed(nn.Module):
    """A block whose sum no cheap calls can recompute: its gate is computed from all pixels."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(n, n, 1, bias=False), nn.BatchNorm2d(n))
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(n, n, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        found = self.layers(x)
        return F.relu(x + found * self.gate(found))


def squeezed() -> nn.Module:
    blocks = (Squeezed(8) for _ in range(8))
    return pooled(8, nn.Conv2d(3, 8, 3, padding=1, bias=False), *norm_act(8), *blocks)


class Inverted(nn.Module):
    """A block of MobileNetV3: wide, depthwise, squeezed and excited, narrow."""

    def __init__(self, n: int, wide: int) -> None:
        super().__init__()
        self.deep = nn.Sequential(
            nn.Conv2d(n, wide, 1, bias=False),
            *norm_act(wide, nn.Hardswish),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            *norm_act(wide, nn.Hardswish),
        )
        squeeze = nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 4, 1), nn.ReLU()
        self.gate = nn.Sequential(*squeeze, nn.Conv2d(4, wide, 1), nn.Hardsigmoid())
        self.last = nn.Sequential(nn.Conv2d(wide, n, 1, bias=False), nn.BatchNorm2d(n))

    def forward(self, x: Tensor) -> Tensor:
        deep = self.deep(x)
        return x + self.last(deep * self.gate(deep))


def mobile() -> nn.Module:
    stem = nn.Conv2d(3, 8, 3, padding=1, bias=False), *norm_act(8, nn.Hardswish)
    return pooled(8, *stem, *(Inverted(8, 24) for _ in range(3)))


class Grown(nn.Module):
    """A layer of a DenseNet: all that was found, and some more."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*norm_act(n), nn.Conv2d(n, 8, 3, padding=1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layers(x)], 1)


def dense() -> nn.Module:
    grown = [Grown(8 + 8 * i) for i in range(4)]
    return pooled(40, nn.Conv2d(3, 8, 3, padding=1), *grown, *norm_act(40))


class UNet(nn.Module):
    """Down twice, up twice, with what is as high put beside it."""

    def __init__(self) -> None:
        super().__init__()

        def twice(before: int, after: int) -> nn.Module:
            first = nn.Conv2d(before, after, 3, padding=1), *norm_act(after)
            return nn.Sequential(*first, nn.Conv2d(after, after, 3, padding=1), *norm_act(after))

        self.down = nn.ModuleList([twice(3, 8), twice(8, 12), twice(12, 16)])
        self.up = nn.ModuleList([twice(28, 12), twice(20, 8)])
        self.last = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down[0](x)
        middle = self.down[1](F.max_pool2d(high, 2))
        low = self.down[2](F.max_pool2d(middle, 2))
        middle = self.up[0](torch.cat([F.interpolate(low, scale_factor=2), middle], 1))
        high = self.up[1](torch.cat([F.interpolate(middle, scale_factor=2), high], 1))
        return self.last(high).mean((2, 3))


class OfDims(nn.Module):
    """Lines, pictures and volumes of twelve channels."""

    def __init__(self, n_dims: int, **options: Any) -> None:
        super().__init__()
        self.sizes = {1: (3, 256), 2: (3, 16, 16), 3: (3, 4, 8, 8)}[n_dims]
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[n_dims]
        norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[n_dims]
        layers: list[nn.Module] = []
        for i in range(4):
            layers += [conv(12 if i else 3, 12, 3, padding=1), norm(12, **options), nn.Tanh()]
        self.layers = nn.Sequential(*layers)
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x.reshape(-1, *self.sizes)).flatten(2).mean(2))


class Checkpointed(nn.Module):
    """Every block in a checkpoint of torch's."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.inner = OfDims(2)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self.inner.layers)
        x = layers[0](x)
        for i in range(1, 9, 3):
            block = nn.Sequential(*layers[i : i + 3])
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return self.inner.last(nn.Sequential(*layers[10:])(x).mean((2, 3)))


class Gan(nn.Module):
    """A DCGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.makes = nn.Sequential(
            nn.ConvTranspose2d(6, 24, 4, bias=False),
            *norm_act(24),
            nn.ConvTranspose2d(24, 16, 4, 2, 1, bias=False),
            *norm_act(16),
            nn.ConvTranspose2d(16, 12, 4, 2, 1, bias=False),
            *norm_act(12),
            nn.Conv2d(12, 3, 3, padding=1),
            nn.Tanh(),
        )
        self.tells = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(12, 16, 4, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 24, 4, 2, 1, bias=False),
            nn.BatchNorm2d(24),
            nn.LeakyReLU(0.2),
            nn.Conv2d(24, 1, 4),
            nn.Flatten(),
        )


class Vae(nn.Module):
    """Convolutions down to a mean and a spread, and up again."""

    def __init__(self) -> None:
        super().__init__()
        down = nn.Conv2d(3, 12, 3, 2, 1), *norm_act(12), nn.Conv2d(12, 16, 3, 2, 1), *norm_act(16)
        self.encoder = nn.Sequential(*down, nn.Flatten(), nn.Linear(256, 16))
        up = nn.Linear(8, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Unflatten(1, (16, 4, 4))
        more = (
            nn.ConvTranspose2d(16, 12, 4, 2, 1),
            *norm_act(12),
            nn.ConvTranspose2d(12, 3, 4, 2, 1),
        )
        self.decoder = nn.Sequential(*up, *more)


def classify(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return [loss.detach()]


def play(model: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    """Both losses: the first stops at what was made."""
    z = torch.randn(len(x), 6, 1, 1, dtype=x.dtype) + 0 * x[:, 0, 0, 0].view(-1, 1, 1, 1)
    made = model.makes(z)
    first = F.softplus(-model.tells(x)).mean() + F.softplus(model.tells(made.detach())).mean()
    first.backward()
    second = F.softplus(-model.tells(made)).mean()
    second.backward()
    return [first.detach(), second.detach()]


def judge(model: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    """What is made is made again later: no gradient goes into it, and nobody holds it."""
    z = torch.randn(len(x), 6, 1, 1, dtype=x.dtype) + 0 * x[:, 0, 0, 0].view(-1, 1, 1, 1)
    loss = F.softplus(model.tells(model.makes(z).detach())).mean()
    loss.backward()
    return [loss.detach()]


def rebuild(model: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    mean, spread = model.encoder(x).chunk(2, 1)
    z = mean + torch.randn_like(mean) * (spread / 2).exp()
    apart = F.mse_loss(model.decoder(z), x)
    loss = apart - 0.01 * (1 + spread - mean.pow(2) - spread.exp()).mean()
    loss.backward()
    return [loss.detach()]


def look(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Statistics alone."""
    with torch.no_grad():
        return [F.cross_entropy(model(x), y)]


def freeze(model: nn.Module) -> nn.Module:
    """Every second norm evaluates, and is not trained."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms[::2]:
        norm.eval().requires_grad_(False)
    return model


class Network(NamedTuple):
    """A network, a step of it, and how much of eager's peak its chunks take at most."""

    make: Callable[[], nn.Module]
    step: Callable[[Any, Tensor, Tensor], list[Tensor]] = classify
    n_rows: int = 24
    share: float = 0.6


NETWORKS = {
    "resnet18": Network(lambda: resnet(False)),
    "bottleneck": Network(lambda: resnet(True)),
    "squeezed": Network(squeezed),
    "mobile": Network(mobile),
    "dense": Network(dense),
    "unet": Network(UNet),
    "dcgan": Network(Gan, play, 48),
    "judge": Network(Gan, judge, 48, 0.23),
    "vae": Network(Vae, rebuild, 96),
    "1d": Network(lambda: OfDims(1)),
    "2d": Network(lambda: OfDims(2)),
    "3d": Network(lambda: OfDims(3)),
    "no momentum": Network(lambda: OfDims(2, momentum=None)),
    "eval": Network(lambda: OfDims(2).eval()),
    "frozen": Network(lambda: freeze(OfDims(2))),
    "checkpoint": Network(lambda: Checkpointed(False)),
    "checkpoint, reentrant": Network(lambda: Checkpointed(True)),
    "no_grad": Network(lambda: resnet(False), look),
}
