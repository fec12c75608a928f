# SPDX-License-Identifier: Apache-2.0
"""Programs with a step of their own that need values of the whole batch: each says why."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from programs_kit import IN_ORDER, Program, images, vectors
from programs_losses import labels, randn
from programs_special import (
    Quantise,
    gan,
    images_and_labels,
    vectors_and_labels,
)
from programs_vision import Cnn, ConvBatchNorm, DropoutMlp, Mlp, ResNet

# Contrastive losses -----------------------------------------------------------------------------


def two_views(n_rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Two noisy views of each row."""
    x = randn(generator, n_rows, 6)
    return x + 0.1 * randn(generator, n_rows, 6), x + 0.1 * randn(generator, n_rows, 6)


def two_views_and_labels(n_rows: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Two noisy views of each row and its class."""
    return *two_views(n_rows, generator), *labels(n_rows, generator)


def info_nce_step(model: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    """Each row against all others."""
    za, zb = F.normalize(model(a), dim=-1), F.normalize(model(b), dim=-1)
    return F.cross_entropy(za @ zb.T / 0.2, torch.arange(za.size(0)))


class Clip(nn.Module):
    """Two towers and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Mlp(n_out=4), Mlp(n_out=4)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        za, zb = self.image(a), self.text(b)
        za = za / za.norm(dim=-1, keepdim=True)
        zb = zb / zb.norm(dim=-1, keepdim=True)
        return self.logit_scale.exp() * za @ zb.t()


def clip_step(model: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    """Rows against columns and columns against rows."""
    logits = model(a, b)
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def sim_clr_step(model: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    """Both views in one batch of twice the size; a row is not its own neighbour."""
    z = F.normalize(torch.cat([model(a), model(b)]), dim=1)
    n = z.size(0) // 2
    similar = (z @ z.t() / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(similar, target)


def nt_xent_step(model: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    """The same, with what a row is to itself written over in place."""
    z = F.normalize(model(torch.cat([a, b])), dim=1)
    n = len(a)
    similar = z @ z.T / 0.5
    similar.fill_diagonal_(float("-inf"))
    return F.cross_entropy(similar, torch.cat([torch.arange(n) + n, torch.arange(n)]))


def sup_con_step(model: nn.Module, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Two views cut out of one batch by the model; all rows of a class are positives."""
    z = F.normalize(model(torch.cat([a, b], dim=0)), dim=1)
    y = torch.cat([y, y])
    n = len(y)
    logits = z @ z.T / 0.3
    logits = logits - logits.max(dim=1, keepdim=True).values.detach()
    others = 1 - torch.eye(n, dtype=z.dtype)
    positives = (y[:, None] == y[None, :]).to(z.dtype) * others
    log_p = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
    return -((positives * log_p).sum(1) / positives.sum(1)).mean()


def barlow_step(model: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    """The cross-correlation of two views, standardised over the batch."""
    za, zb = model(a), model(b)
    za = (za - za.mean(0)) / za.std(0)
    zb = (zb - zb.mean(0)) / zb.std(0)
    c = za.T @ zb / za.shape[0]
    on_diagonal = (torch.diagonal(c) - 1).pow(2).sum()
    return on_diagonal + 0.05 * (c - torch.diag(torch.diagonal(c))).pow(2).sum()


def hard_triplet_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """For each row its farthest positive and its nearest negative in the batch."""
    z = model(x)
    distance = torch.cdist(z, z, compute_mode="donot_use_mm_for_euclid_dist")
    same = y[:, None] == y[None, :]
    positive = distance.masked_fill(~same, 0.0).max(dim=1).values
    negative = distance.masked_fill(same, 1e4).min(dim=1).values
    return F.relu(positive - negative + 0.5).mean()


def pairwise_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Differences of all pairs of rows by broadcasting (RankNet)."""
    score = model(x)[:, 0]
    difference = score[:, None] - score[None, :]
    order = (y[:, None] > y[None, :]).to(score.dtype)
    return (F.softplus(-difference) * order).sum() / order.sum().clamp(min=1)


# Numbers of the batch that meet its rows again --------------------------------------------------


class Mixture(nn.Module):
    """Experts by the two best of a router, and the balance of their load."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 5) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.router(x).softmax(dim=-1)
        weight, index = p.topk(2, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        every = torch.stack([torch.tanh(expert(x)) for expert in self.experts], dim=1)
        chosen = every.gather(1, index.unsqueeze(-1).expand(-1, -1, every.size(-1)))
        load = F.one_hot(index, 4).sum(1).to(x.dtype).mean(0)
        return (chosen * weight.unsqueeze(-1)).sum(1), 4 * (load * p.mean(0)).sum()


def mixture_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The balance is a product of two means over the batch."""
    out, balance = model(x)
    return F.cross_entropy(out, y) + 0.1 * balance


class SparseMixture(Mixture):
    """Each expert sees only its rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.router(x).softmax(dim=-1)
        weight, index = p.max(dim=-1)
        out = torch.zeros(x.size(0), 5, dtype=x.dtype)
        for i, expert in enumerate(self.experts):
            rows = torch.where(index == i)[0]
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out, (p.mean(0) ** 2).sum()


def standardised_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Activations standardised over the batch by hand in the middle of the model."""
    h = model.body(x)
    h = (h - h.mean(dim=0, keepdim=True)) / (h.std(dim=0, keepdim=True) + 1e-5)
    return F.cross_entropy(model.head(torch.tanh(h)), y)


def attention_over_rows_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Rows attend to rows, and a residual goes round it."""
    h = model.body(x)
    h = h + torch.softmax(h @ h.t() / 4, dim=-1) @ h
    return F.cross_entropy(model.head(h), y)


def shuffled_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Activations meet those of the next row."""
    h = model.body(x)
    return F.cross_entropy(model.head(h + 0.3 * h.roll(1, dims=0) + 0.1 * h.flip(0)), y)


def reused_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """One value read by a body, by a barrier and by a later body."""
    h = model.body(x)
    scale = torch.log(h.exp().mean())
    return F.cross_entropy(model.head(h * scale + h), y) * scale


def uncertain_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Losses weighted by learned uncertainties: the weights' gradients need the losses."""
    out = model["net"](x)
    s = model["s"].value
    first, second = F.cross_entropy(out, y), (out**2).mean()
    return torch.exp(-s[0]) * first + torch.exp(-s[1]) * second + s.sum()


class Scalars(nn.Module):
    """Two learned numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([0.3, -0.2]))


def scalars() -> nn.Module:
    """Return an MLP and two learned numbers."""
    return nn.ModuleDict({"net": Mlp(), "s": Scalars()})


def flooding_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss is turned round where it falls below a level."""
    loss = F.cross_entropy(model(x), y)
    return (loss - 1.5).abs() + 1.5


def balanced_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One mean scaled by another that is detached."""
    out = model(x)
    a, b = F.cross_entropy(out, y), (out**2).mean()
    return a + b * (a / b).detach()


def fix_match_step(model: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    """Pseudo-labels of the confident rows, averaged over them."""
    with torch.no_grad():
        confidence, label = model(a).softmax(dim=-1).max(dim=-1)
    mask = (confidence > 0.23).to(a.dtype)
    losses = F.cross_entropy(model(b), label, reduction="none")
    strong = model(a).softmax(-1).amax(-1)
    return (losses * mask).sum() / mask.sum() + (strong * mask).sum() / strong.sum()


def quantise_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Straight-through rounding by a custom function."""
    h = Quantise.apply(torch.tanh(model.body(x)))
    return F.cross_entropy(model.head(h), y)


# Gradients of gradients -------------------------------------------------------------------------


def critic_step(model: Any, x: Tensor) -> Tensor:
    """WGAN-GP: a penalty on the critic's gradient between real and fake rows."""
    fake = model["g"](torch.randn(x.size(0), 4, dtype=x.dtype)).detach()
    mix = torch.rand(x.size(0), 1, dtype=x.dtype)
    between = (mix * x + (1 - mix) * fake).requires_grad_(True)
    score = model["d"](between)
    (slope,) = torch.autograd.grad(
        score, between, grad_outputs=torch.ones_like(score), create_graph=True
    )
    penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
    return model["d"](fake).mean() - model["d"](x).mean() + 10 * penalty


def maml_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """One inner step on half of the features, differentiated through."""
    names, values = zip(*model.named_parameters(), strict=True)
    inner = F.cross_entropy(model(x), y)
    slopes = torch.autograd.grad(inner, values, create_graph=True)
    moved = {n: v - 0.1 * s for n, v, s in zip(names, values, slopes, strict=True)}
    return F.cross_entropy(torch.func.functional_call(model, moved, (x * 0.9,)), y)


def slope_penalty_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A penalty on the size of the loss's own gradient."""
    loss = F.cross_entropy(model(x), y)
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * torch.stack([s.pow(2).sum() for s in slopes]).sum().sqrt()


def tanh_gan() -> nn.Module:
    """Return a GAN whose discriminator is smooth."""
    model = gan()
    model["d"][1] = nn.Tanh()  # type: ignore[index, operator]
    return model


def smooth_mlp() -> nn.Module:
    """Return an MLP without a kink."""
    model = Mlp()
    model.body[1] = nn.Tanh()
    return model


def norm_before_pool() -> nn.Module:
    """Return a CNN whose GroupNorm is a BatchNorm."""
    model = Cnn()
    model.norm = nn.BatchNorm2d(8)  # type: ignore[assignment]
    return model


def vector_norm() -> nn.Module:
    """Return an MLP with BatchNorm1d without weights."""
    model = Mlp()
    model.body[1] = nn.BatchNorm1d(16, affine=False)
    return model


def norm_without_memory() -> nn.Module:
    """Return a CNN whose BatchNorms keep no statistics."""
    model = ConvBatchNorm()
    model.bn1 = nn.BatchNorm2d(6, track_running_stats=False)
    return model


def tracked_instance_norm() -> nn.Module:
    """Return a CNN whose InstanceNorm averages its statistics over the batch."""
    model = Cnn()
    model.norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)  # type: ignore[assignment]
    return model


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy, mean."""
    return F.cross_entropy(model(x), y)


def rooted_images(model: nn.Module, x: Tensor) -> Tensor:
    """The root of a mean through BatchNorm."""
    return model(x).pow(2).mean().sqrt()


#: Why a part of a program runs whole.
TWICE = "gradients of gradients run at once"

BARRIER_STEPS = [
    Program("info_nce", Mlp, two_views, info_nce_step, barrier="rows against rows"),
    Program(
        "info_nce_dropout",
        DropoutMlp,
        two_views,
        info_nce_step,
        barrier="rows against rows",
        draws=IN_ORDER,
    ),
    Program("clip", Clip, two_views, clip_step, barrier="rows against rows"),
    Program("sim_clr", Mlp, two_views, sim_clr_step, barrier="cat of two batches"),
    Program("nt_xent", Mlp, two_views, nt_xent_step, barrier="cat of two batches"),
    Program("sup_con", Mlp, two_views_and_labels, sup_con_step, barrier="cat of two batches"),
    Program("barlow", Mlp, two_views, barlow_step, barrier="standardised over the batch"),
    Program("hard_triplet", Mlp, vectors_and_labels, hard_triplet_step, barrier="mined pairs"),
    Program("pairwise", Mlp, vectors_and_labels, pairwise_step, barrier="all pairs"),
    Program("mixture", Mixture, vectors_and_labels, mixture_step, barrier="product of means"),
    Program(
        "sparse_mixture", SparseMixture, vectors_and_labels, mixture_step, barrier="routed rows"
    ),
    Program(
        "standardised", Mlp, vectors_and_labels, standardised_step, barrier="mean of the batch"
    ),
    Program(
        "attention_over_rows",
        Mlp,
        vectors_and_labels,
        attention_over_rows_step,
        barrier="rows",
    ),
    Program("shuffled", Mlp, vectors_and_labels, shuffled_step, barrier="roll and flip"),
    Program("reused", Mlp, vectors_and_labels, reused_step, barrier="log of a mean"),
    Program(
        "uncertain", scalars, vectors_and_labels, uncertain_step, barrier="weights need losses"
    ),
    Program("flooding", Mlp, vectors_and_labels, flooding_step, barrier="sign of the loss"),
    Program("balanced", Mlp, vectors_and_labels, balanced_step, barrier="detached mean"),
    Program("fix_match", Mlp, two_views, fix_match_step, barrier="number of confident rows"),
    Program(
        "quantise",
        Mlp,
        vectors_and_labels,
        quantise_step,
        barrier="custom function",
    ),
    Program("critic", tanh_gan, vectors, critic_step, barrier="create_graph", draws=IN_ORDER),
    Program(
        "maml", smooth_mlp, vectors_and_labels, maml_step, barrier="create_graph", partly=TWICE
    ),
    Program(
        "slope",
        smooth_mlp,
        vectors_and_labels,
        slope_penalty_step,
        barrier="create_graph",
        whole=TWICE,
    ),
    Program("resnet", ResNet, images_and_labels, classify, barrier="BatchNorm"),
    Program("norm_pool", norm_before_pool, images_and_labels, classify, barrier="BatchNorm"),
    Program("vector_norm", vector_norm, vectors_and_labels, classify, barrier="BatchNorm"),
    Program(
        "norm_stateless", norm_without_memory, images_and_labels, classify, barrier="BatchNorm"
    ),
    Program("instance_norm", tracked_instance_norm, images_and_labels, classify),
    Program("norm_root", ConvBatchNorm, images, rooted_images, barrier="BatchNorm, root of a mean"),
]
