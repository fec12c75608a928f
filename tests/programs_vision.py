# SPDX-License-Identifier: Apache-2.0
"""Models of vectors and images, written as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N_CLASSES = 5


class Mlp(nn.Module):
    """A perceptron of a module and a functional half."""

    def __init__(self, n_in: int = 6, n_hidden: int = 16, n_out: int = N_CLASSES) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(n_in, n_hidden), nn.ReLU(), nn.Linear(n_hidden, n_hidden)
        )
        self.head = nn.Linear(n_hidden, n_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class DropoutMlp(nn.Module):
    """Two dropouts in a row: the order of the draws is not the order of the chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 32), nn.Linear(32, 32)
        self.fc3 = nn.Linear(32, N_CLASSES)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.fc1(x)))
        x = F.dropout(torch.tanh(self.fc2(x)), p=0.2, training=self.training)
        return self.fc3(x)


class TabularMlp(nn.Module):
    """Categories embedded, numbers normalised, side by side into an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 3) for n in (4, 7, 2))
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(13, 16), nn.GELU(), nn.Linear(16, N_CLASSES))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        parts = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        return self.mlp(torch.cat([*parts, self.norm(numbers)], dim=1))


class Cnn(nn.Module):
    """Convolutions, both poolings, GroupNorm; flattened by the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.fc = nn.Linear(8 * 2 * 2, N_CLASSES)

    def features(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x)), inplace=True), 2)
        return F.avg_pool2d(F.silu(self.conv2(x)), 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.fc(x.view(x.size(0), -1))


class CnnBaked(Cnn):
    """The same with the size of the batch written into the code."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).view(8, -1))


class Residual(nn.Module):
    """Residual blocks with in-place activations, and a pooling over pixels by mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(4))
        self.fc = nn.Linear(8, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in (0, 2):
            identity = x
            out = torch.relu_(self.norms[i](self.convs[i](x)))
            out = self.norms[i + 1](self.convs[i + 1](out))
            out += identity
            x = F.relu(out)
        return self.fc(x.mean(dim=(2, 3)))


class DenseNet(nn.Module):
    """Each layer sees the list of all before it, and the list goes on growing."""

    def __init__(self, growth: int = 4, n_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(3 + i * growth, growth, 3, padding=1) for i in range(n_layers)
        )
        self.fc = nn.Linear(3 + n_layers * growth, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(F.relu(layer(torch.cat(features, 1))))
        pooled = F.adaptive_avg_pool2d(torch.cat(features, 1), 1)
        return self.fc(torch.flatten(pooled, 1))


class Mixer(nn.Module):
    """Patches by reshape and permute, then MLPs along tokens and along channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * 4 * 4, 12)
        self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.tokens = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.channels = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.head = nn.Linear(12, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.reshape(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 1, 3, 5)
        x = self.embed(x.reshape(b, (h // 4) * (w // 4), c * 16))
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.head(x.mean(1))


class UNet(nn.Module):
    """Down and up again, the skip concatenated to what comes back."""

    def __init__(self, n_out: int = 3) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 6, 3, padding=1)
        self.down2 = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.out = nn.Conv2d(12, n_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.leaky_relu(self.down1(x), 0.1)
        x = F.gelu(self.down2(skip))
        x = self.up(F.gelu(self.middle(x)))
        return self.out(torch.cat([skip, x], dim=1))


class BilinearUNet(UNet):
    """The same, coming back by interpolation to the size of the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv2d(8, 6, 1)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.sigmoid(self.down1(x))
        x = F.softplus(self.down2(skip))
        x = F.interpolate(self.up(x), size=skip.shape[2:], mode="bilinear", align_corners=False)
        return self.out(torch.cat((x, skip), 1))


class Vae(nn.Module):
    """The reparametrisation draws noise like a value that is not known yet."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 16)
        self.mean, self.log_var = nn.Linear(16, 4), nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.encoder(x))
        mean, log_var = self.mean(h), self.log_var(h)
        std = torch.exp(0.5 * log_var)
        eps = torch.randn_like(std)
        return self.decoder(mean + eps * std), mean, log_var


class Denoiser(nn.Module):
    """Predicts the noise in an image from the image and a timestep."""

    def __init__(self, n_steps: int = 20) -> None:
        super().__init__()
        self.register_buffer("alphas", torch.linspace(0.99, 0.05, n_steps))
        self.time = nn.Embedding(n_steps, 6)
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(x) + self.time(t)[:, :, None, None]
        return self.conv2(F.silu(h))


class ConvBatchNorm(nn.Module):
    """Convolutions with BatchNorm between them: it mixes the rows, and keeps statistics."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6, momentum=momentum)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(6, momentum=momentum)
        self.fc = nn.Linear(6, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)), inplace=True)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class ResidualBatchNorm(ConvBatchNorm):
    """A residual that goes round a BatchNorm."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(x)))))
        return self.fc(x.mean((2, 3)))


class BasicBlock(nn.Module):
    """A block of torchvision's ResNet: one in-place activation twice, and `out += identity`."""

    def __init__(self, n_in: int, n_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.down: nn.Module | None = None
        if stride != 1:
            conv = nn.Conv2d(n_in, n_out, 1, stride, bias=False)
            self.down = nn.Sequential(conv, nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.down is None else self.down(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Two blocks of a ResNet after a stem whose activation is in place before its BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.blocks = nn.Sequential(BasicBlock(6, 6), BasicBlock(6, 8, stride=2))
        self.fc = nn.Linear(8, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.stem(x), inplace=True))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.blocks(x), 1), 1))


class Generator(nn.Sequential):
    """A GAN's generator of vectors."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 6), nn.Tanh())


class Discriminator(nn.Sequential):
    """A GAN's discriminator of vectors: one logit a row."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
