# SPDX-License-Identifier: Apache-2.0
"""Programs whose step is more than a model and a loss, all of one pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint

from programs_kit import WHOLE, Program, images, sentences_time_major, vectors
from programs_losses import N_STEPS, labels, next_tokens, randn
from programs_text import N_TOKENS, WIDTH
from programs_vision import (
    Cnn,
    ConvBatchNorm,
    Denoiser,
    Discriminator,
    Mlp,
    Vae,
)
from programs_vision import (
    Generator as GanGenerator,
)


def vectors_and_labels(n_rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Six numbers and a class for each row."""
    return *vectors(n_rows, generator), *labels(n_rows, generator)


def images_and_labels(n_rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """A small image and a class for each row."""
    return *images(n_rows, generator), *labels(n_rows, generator)


# Programs that draw -----------------------------------------------------------------------------


def vae_batch(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """Eight numbers between 0 and 1 for each row."""
    return (torch.rand(n_rows, 8, generator=generator, dtype=torch.float64),)


def vae_step(model: nn.Module, x: Tensor) -> Tensor:
    """Reconstruction and KL, both summed and divided by the size of the batch."""
    out, mean, log_var = model(x)
    reconstruction = F.binary_cross_entropy_with_logits(out, x, reduction="sum")
    kl = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
    return (reconstruction + kl) / x.size(0)


def diffusion_step(model: Any, x: Tensor) -> Tensor:
    """Noise like the batch, a timestep for each row, and the noise predicted."""
    noise = torch.randn_like(x)
    t = torch.randint(0, len(model.alphas), (x.size(0),), device=x.device)
    alpha = model.alphas[t].view(-1, 1, 1, 1)
    noised = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
    return F.mse_loss(model(noised, t), noise)


def gan() -> nn.Module:
    """Return a generator and a discriminator."""
    return nn.ModuleDict({"g": GanGenerator(), "d": Discriminator()})


def discriminator_step(model: Any, x: Tensor) -> Tensor:
    """The discriminator's loss on real rows and on detached fakes."""
    z = torch.randn(x.size(0), 4, dtype=x.dtype)
    fake = model["g"](z).detach()
    real_logits, fake_logits = model["d"](x), model["d"](fake)
    return F.binary_cross_entropy_with_logits(
        real_logits, torch.ones_like(real_logits)
    ) + F.binary_cross_entropy_with_logits(fake_logits, torch.zeros_like(fake_logits))


def generator_step(model: Any, x: Tensor) -> Tensor:
    """The generator's loss through the discriminator, with a reconstruction of real rows."""
    fake = model["g"](torch.randn(len(x), 4, dtype=x.dtype) + x[:, :4])
    logits = model["d"](fake)
    target = torch.full((x.shape[0], 1), 0.9, dtype=x.dtype)
    return F.binary_cross_entropy_with_logits(logits, target) + F.l1_loss(fake, x)


def noisy_labels_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mixup: a permutation of the batch and one coefficient, both drawn plainly."""
    lam = float(torch.distributions.Beta(0.4, 0.4, validate_args=False).sample())
    order = torch.randperm(x.size(0))
    mixed = lam * x + (1 - lam) * x[order]
    out = model(mixed)
    return lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[order])


# Steps with more than one forward or loss -------------------------------------------------------


def siamese_batch(n_rows: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of rows, and whether they belong together."""
    same = torch.randint(0, 2, (n_rows,), generator=generator)
    return randn(generator, n_rows, 6), randn(generator, n_rows, 6), same


def siamese_step(model: nn.Module, a: Tensor, b: Tensor, same: Tensor) -> Tensor:
    """Both towers are one module; a contrastive margin of each pair."""
    distance = F.pairwise_distance(model(a), model(b))
    apart = torch.clamp(1.0 - distance, min=0.0)
    return (same * distance.pow(2) + (1 - same) * apart.pow(2)).mean()


def triplet_step(model: nn.Module, a: Tensor, b: Tensor, same: Tensor) -> Tensor:
    """Three towers and torch's own margin."""
    return F.triplet_margin_loss(model(a), model(b), model(a + b), margin=0.3)


def distillation_model() -> nn.Module:
    """Return a student and its teacher."""
    return nn.ModuleDict({"student": Mlp(), "teacher": Mlp(n_hidden=24)})


def distillation_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Soft targets from a teacher that runs without gradients, and the labels."""
    with torch.no_grad():
        target = F.softmax(model["teacher"](x) / 3, dim=-1)
    out = model["student"](x)
    soft = F.kl_div(F.log_softmax(out / 3, dim=-1), target, reduction="batchmean")
    return 0.7 * 9 * soft + 0.3 * F.cross_entropy(out, y)


def q_learning_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The value of the action taken against the target network's best."""
    value = model["student"](x).gather(1, y.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        best = model["teacher"](x * 0.5).max(1).values
    return F.smooth_l1_loss(value, x[:, 0] + 0.99 * best)


def scaled_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss scaled as AMP scales it, and divided for accumulation."""
    return F.cross_entropy(model(x), y) * 65536.0 / 8


def rotary_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Pairs of features are complex numbers, which are turned."""
    h = model(x)
    turns = torch.polar(torch.ones(4), torch.arange(4) * 0.5)
    pairs = torch.view_as_complex(h.reshape(len(h), -1, 2))
    turned = torch.view_as_real(pairs * turns).flatten(1)
    power = (pairs * pairs.conj()).real
    return F.cross_entropy(turned, y) + (power + pairs.imag).mean()


def auxiliary_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Losses of two heads, one of them on activations of the middle."""
    h = model.body(x)
    out = model.head(torch.tanh(h))
    return F.cross_entropy(out, y) + 0.1 * h.abs().mean() + 0.01 * (out.logsumexp(-1) ** 2).mean()


def vector_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A regression of one number a row, squeezed to (B,)."""
    return ((model(x)[:, :1].squeeze(-1) - y.to(x.dtype)) ** 2).mean()


# Ways of computing ------------------------------------------------------------------------------


def eval_norm() -> nn.Module:
    """Return a model whose BatchNorms use the statistics they have."""
    model = ConvBatchNorm()
    model.bn1.running_mean += 0.3  # type: ignore[operator]
    model.bn2.running_var *= 2.0  # type: ignore[operator]
    return model.eval()


def in_place_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Writes into activations: a column, a masked fill, an addition."""
    h = model.body(x)
    h[:, 0] = 0.5
    h = torch.tanh(h)
    h = h * 2
    h.add_(h.mean(dim=1, keepdim=True)).mul_(0.7)
    h.masked_fill_(h < -1, 0.0)
    return F.cross_entropy(model.head(h), y)


def checkpoint_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The body under non-reentrant checkpointing."""
    h = checkpoint(model.body, x, use_reentrant=False)
    return F.cross_entropy(model.head(torch.tanh(h)), y)


class Quantise(torch.autograd.Function):
    """Rounding with the gradient passed straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def straight_through_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Straight-through rounding by detach()."""
    h = torch.tanh(model.body(x))
    h = h + (torch.round(h * 4) / 4 - h).detach()
    return F.cross_entropy(model.head(h), y)


def weight_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Weights that are computed from parameters, once, for all rows."""
    weight = model.head.weight / model.head.weight.norm(dim=1, keepdim=True)
    return F.cross_entropy(10 * F.linear(F.normalize(model.body(x), dim=-1), weight), y)


def functional_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A functional call with other parameters of the same shape."""
    moved = {name: p * 1.5 for name, p in model.named_parameters()}
    return F.cross_entropy(torch.func.functional_call(model, moved, (x,)), y)


def video_batch(n_rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Three frames and a class for each row."""
    return randn(generator, n_rows, 3, 3, 8, 8), *labels(n_rows, generator)


def video_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Frames merged with the batch for the CNN, and split again for the mean over time."""
    b, t, c, h, w = x.shape
    out = model(x.view(b * t, c, h, w)).view(b, t, -1)
    return F.cross_entropy(out.mean(dim=1), y)


class TimeMajor(nn.Module):
    """A GRU language model with time first throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(N_TOKENS, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, N_TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.tokens(ids))[0])


def time_major_batch(n_rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens, both as (T, B)."""
    (ids,) = sentences_time_major(n_rows, generator)
    return ids, next_tokens(n_rows, generator)[0].t().contiguous()


def time_major_step(model: nn.Module, ids: Tensor, y: Tensor) -> Tensor:
    """Time and batch flattened, batch inner."""
    return F.cross_entropy(model(ids).view(-1, N_TOKENS), y.view(-1))


def features_first_batch(n_rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Columns as rows: (6, B), with a class for each column."""
    return randn(generator, n_rows, 6).t().contiguous(), *labels(n_rows, generator)


def features_first_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The batch is the last dim of the input."""
    return F.cross_entropy(model(x.t()), y)


def scan_step(model: Any, ids: Tensor, y: Tensor) -> Tensor:
    """Teacher forcing by hand: the loss of each step added up in a Python loop."""
    h, total = torch.zeros(ids.shape[1], WIDTH, dtype=model.head.weight.dtype), 0.0
    weights = [model.rnn.weight_ih_l0[:WIDTH], model.rnn.weight_hh_l0[:WIDTH]]
    for t in range(N_STEPS):
        h = torch.tanh(F.linear(model.tokens(ids[t]), weights[0]) + F.linear(h, weights[1]))
        total = total + F.cross_entropy(model.head(h), y[t])
    return total / N_STEPS  # type: ignore[return-value]


SPECIAL = [
    Program("vae", Vae, vae_batch, vae_step, draws=WHOLE),
    Program("diffusion", Denoiser, images, diffusion_step, draws=WHOLE, partly="plain timesteps"),
    Program("gan_discriminator", gan, vectors, discriminator_step, draws=WHOLE),
    Program("gan_generator", gan, vectors, generator_step, draws=WHOLE),
    Program("mixup", Mlp, vectors_and_labels, noisy_labels_step, draws=WHOLE),
    Program("siamese", Mlp, siamese_batch, siamese_step),
    Program("triplet_rows", Mlp, siamese_batch, triplet_step),
    Program("distillation", distillation_model, vectors_and_labels, distillation_step),
    Program("q_learning", distillation_model, vectors_and_labels, q_learning_step),
    Program("scaled", Mlp, vectors_and_labels, scaled_step),
    Program("rotary", lambda: Mlp(n_out=8), vectors_and_labels, rotary_step),
    Program("auxiliary", Mlp, vectors_and_labels, auxiliary_step),
    Program("vector", Mlp, vectors_and_labels, vector_step),
    Program("eval_norm", eval_norm, images_and_labels, lambda m, x, y: F.cross_entropy(m(x), y)),
    Program("in_place", Mlp, vectors_and_labels, in_place_step),
    Program("checkpoint", Mlp, vectors_and_labels, checkpoint_step),
    Program("straight_through", Mlp, vectors_and_labels, straight_through_step),
    Program("computed_weight", Mlp, vectors_and_labels, weight_step),
    Program("functional_call", Mlp, vectors_and_labels, functional_step),
    Program("video", Cnn, video_batch, video_step),
    Program("time_major", TimeMajor, time_major_batch, time_major_step, dims=1),
    Program(
        "time_major_scan",
        TimeMajor,
        time_major_batch,
        scan_step,
        dims=1,
        partly="a plain first state",
    ),
    Program("features_first", Mlp, features_first_batch, features_first_step, dims=(1, 0)),
]
