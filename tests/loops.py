# SPDX-License-Identifier: Apache-2.0
"""Training loops with more than one loss, pass or optimizer to a batch, as scripts write them.

Each is made of a size: small ones are compared with eager, large ones are measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

Lazy = Callable[..., Any]
N_STEPS = 3


@dataclass
class Loop:
    """A loop's modules and optimizers, and its step: the losses of a batch."""

    modules: nn.ModuleDict
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[Lazy, int], list[Tensor]]


def _net(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _loop(
    modules: dict[str, nn.Module], groups: list[list[str]], n_rows: int, dim: int, step: Any
) -> Loop:
    m = nn.ModuleDict(modules)
    m.to(torch.get_default_dtype())
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam([p for name in names for p in m[name].parameters()], lr=1e-2)
        for names in groups
    ]

    def run(lazy: Lazy, number: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(number)
        data = torch.randn(n_rows, dim, generator=generator)
        labels = torch.randint(0, 3, (n_rows,), generator=generator)
        losses: list[Tensor] = step(m, optimizers, lazy, data, labels)
        return losses

    return Loop(m, optimizers, run)


def _update(optimizer: torch.optim.Optimizer, loss: Tensor, **words: Any) -> Tensor:
    optimizer.zero_grad()
    loss.backward(**words)
    optimizer.step()
    return loss.detach()


def _bce(scores: Tensor, target: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))


def gan(n_rows: int, wide: int) -> Loop:
    """A discriminator learns from the real and the detached generated; then the generator."""

    def step(m: Any, optimizers: Any, lazy: Lazy, data: Tensor, labels: Tensor) -> list[Tensor]:
        real, z = lazy(data, data.flip(0)[:, :4].clone())
        fake = m["g"](z)
        d_loss = _bce(m["d"](real), 1.0) + _bce(m["d"](fake.detach()), 0.0)
        first = _update(optimizers[0], d_loss)
        return [first, _update(optimizers[1], _bce(m["d"](fake), 1.0))]

    modules: dict[str, nn.Module] = {"d": _net(8, wide, wide, 1), "g": _net(4, wide, 8)}
    return _loop(modules, [["d"], ["g"]], n_rows, 8, step)


def _two_losses(is_retained: bool, n_rows: int, wide: int) -> Loop:
    def step(m: Any, optimizers: Any, lazy: Lazy, data: Tensor, labels: Tensor) -> list[Tensor]:
        x, y = lazy(data, labels)
        h = m["trunk"](x)
        optimizers[0].zero_grad()
        if is_retained:
            first = F.cross_entropy(m["head"](h), y)
            first.backward(retain_graph=True)
        else:
            first = F.cross_entropy(m["head"](h.detach()), y)
            first.backward()
        second = m["other"](h).square().mean()
        second.backward()
        optimizers[0].step()
        return [first.detach(), second.detach()]

    modules: dict[str, nn.Module] = {
        "trunk": _net(8, wide, 8),
        "head": _net(8, wide, 3),
        "other": _net(8, wide, wide, 1),
    }
    return _loop(modules, [["trunk", "head", "other"]], n_rows, 8, step)


def two_losses(n_rows: int, wide: int) -> Loop:
    """A probe learns from what is detached, then the model; each has a backward of its own."""
    return _two_losses(False, n_rows, wide)


def two_losses_retained(n_rows: int, wide: int) -> Loop:
    """Two backwards through what both losses are made of."""
    return _two_losses(True, n_rows, wide)


def actor_critic(n_rows: int, wide: int) -> Loop:
    """A critic and its trunk, then the actor on what the trunk made, by another optimizer."""

    def step(m: Any, optimizers: Any, lazy: Lazy, data: Tensor, labels: Tensor) -> list[Tensor]:
        x, action = lazy(data, labels)
        h = m["trunk"](x)
        value = m["critic"](h).squeeze(1)
        returns = x.sum(1)
        first = _update(optimizers[0], F.mse_loss(value, returns))
        chosen = F.log_softmax(m["actor"](h.detach()), 1).gather(1, action[:, None]).squeeze(1)
        actor_loss = -(chosen * (returns - value.detach())).mean()
        return [first, _update(optimizers[1], actor_loss)]

    modules: dict[str, nn.Module] = {
        "trunk": _net(8, wide, 8),
        "critic": _net(8, wide, 1),
        "actor": _net(8, wide, wide, 3),
    }
    return _loop(modules, [["trunk", "critic"], ["actor"]], n_rows, 8, step)


def distillation(n_rows: int, wide: int) -> Loop:
    """A teacher learns from the labels, and then teaches."""

    def step(m: Any, optimizers: Any, lazy: Lazy, data: Tensor, labels: Tensor) -> list[Tensor]:
        x, y = lazy(data, labels)
        logits = m["teacher"](x)
        first = _update(optimizers[0], F.cross_entropy(logits, y))
        soft = F.softmax(logits.detach() / 2, 1)
        loss = F.kl_div(F.log_softmax(m["student"](x) / 2, 1), soft, reduction="batchmean")
        return [first, _update(optimizers[1], loss)]

    modules: dict[str, nn.Module] = {"teacher": _net(8, wide, 3), "student": _net(8, wide, wide, 3)}
    return _loop(modules, [["teacher"], ["student"]], n_rows, 8, step)


def self_conditioning(n_rows: int, wide: int) -> Loop:
    """A first pass without gradients goes into a second, in which a look at it comes between."""

    def step(m: Any, optimizers: Any, lazy: Lazy, data: Tensor, labels: Tensor) -> list[Tensor]:
        x = lazy(data)
        with torch.no_grad():
            guess = m["net"](torch.cat([x, torch.zeros_like(x)], 1))
            scale = guess.abs().mean().item()
        for _ in range(2):
            made = m["net"](torch.cat([x, guess / scale], 1))
            first = _update(optimizers[0], F.mse_loss(made, x))
            guess = made.detach()
        return [first]

    modules: dict[str, nn.Module] = {"net": _net(16, wide, wide, 8)}
    return _loop(modules, [["net"]], n_rows, 8, step)


def simsiam(n_rows: int, wide: int) -> Loop:
    """Each view predicts the other, to which no gradient goes; each has a backward of its own."""

    def step(m: Any, optimizers: Any, lazy: Lazy, data: Tensor, labels: Tensor) -> list[Tensor]:
        one, other = lazy(data + 0.1, data.flip(1))
        z1, z2 = m["encoder"](one), m["encoder"](other)
        optimizers[0].zero_grad()
        first = -F.cosine_similarity(m["predictor"](z1), z2.detach()).mean()
        first.backward()
        second = -F.cosine_similarity(m["predictor"](z2), z1.detach()).mean()
        second.backward()
        optimizers[0].step()
        return [first.detach(), second.detach()]

    modules: dict[str, nn.Module] = {"encoder": _net(8, wide, 8), "predictor": _net(8, wide, 8)}
    return _loop(modules, [["encoder", "predictor"]], n_rows, 8, step)


def ppo(n_rows: int, wide: int) -> Loop:
    """A policy is asked once, and learns for some epochs from parts of what it said."""

    def step(m: Any, optimizers: Any, lazy: Lazy, data: Tensor, labels: Tensor) -> list[Tensor]:
        x, action = lazy(data, labels)
        with torch.no_grad():
            before = Categorical(logits=m["actor"](x)).log_prob(action)
            value = m["critic"](x).squeeze(1)
            advantage = x.sum(1) - value
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        losses = []
        for epoch in range(2):
            order = torch.randperm(n_rows, generator=torch.Generator().manual_seed(epoch))
            for part in order.split(-(-n_rows // 2)):
                policy = Categorical(logits=m["actor"](x[part]))
                ratio = (policy.log_prob(action[part]) - before[part]).exp()
                clipped = ratio.clamp(0.8, 1.2)
                gain = torch.min(ratio * advantage[part], clipped * advantage[part]).mean()
                error = F.mse_loss(m["critic"](x[part]).squeeze(1), advantage[part] + value[part])
                loss = error - gain - 0.01 * policy.entropy().mean()
                losses.append(_update(optimizers[0], loss))
        return losses

    modules: dict[str, nn.Module] = {"actor": _net(8, wide, wide, 3), "critic": _net(8, wide, 1)}
    return _loop(modules, [["actor", "critic"]], n_rows, 8, step)


def vae_gan(n_rows: int, wide: int) -> Loop:
    """An autoencoder with a discriminator of what it makes."""

    def step(m: Any, optimizers: Any, lazy: Lazy, data: Tensor, labels: Tensor) -> list[Tensor]:
        x, noise = lazy(data, data.flip(0)[:, :4].clone())
        mean, log_var = m["encoder"](x).chunk(2, 1)
        made = m["decoder"](mean + noise * (log_var / 2).exp())
        d_loss = _bce(m["d"](x), 1.0) + _bce(m["d"](made.detach()), 0.0)
        first = _update(optimizers[0], d_loss)
        divergence = torch.distributions.kl_divergence(
            Normal(mean, (log_var / 2).exp(), validate_args=False), Normal(0.0, 1.0)
        ).mean()
        loss = F.mse_loss(made, x) + 0.1 * divergence + _bce(m["d"](made), 1.0)
        return [first, _update(optimizers[1], loss)]

    modules: dict[str, nn.Module] = {
        "encoder": _net(8, wide, 8),
        "decoder": _net(4, wide, 8),
        "d": _net(8, wide, wide, 1),
    }
    return _loop(modules, [["d"], ["encoder", "decoder"]], n_rows, 8, step)


def dqn(n_rows: int, wide: int) -> Loop:
    """Q values of an action, beside those of a network that follows slowly."""

    def step(m: Any, optimizers: Any, lazy: Lazy, data: Tensor, labels: Tensor) -> list[Tensor]:
        now, after, action = lazy(data, data.roll(1, 0), labels)
        q = m["q"](now)
        with torch.no_grad():
            best = m["q"](after).argmax(1, keepdim=True)
            target = now.sum(1) + 0.9 * m["slow"](after).gather(1, best).squeeze(1)
        loss = F.smooth_l1_loss(q.gather(1, action[:, None]).squeeze(1), target)
        first = _update(optimizers[0], loss)
        with torch.no_grad():
            for p, of_q in zip(m["slow"].parameters(), m["q"].parameters(), strict=True):
                p.lerp_(of_q, 0.1)
        priority = (target - m["q"](now).gather(1, action[:, None]).squeeze(1)).abs().mean()
        return [first, priority.detach()]

    modules: dict[str, nn.Module] = {"q": _net(8, wide, wide, 3), "slow": _net(8, wide, wide, 3)}
    return _loop(modules, [["q"]], n_rows, 8, step)


def gradient_cache(n_rows: int, wide: int) -> Loop:
    """Two towers whose embeddings are made without gradients; what the loss of all pairs sends to
    them goes back through each half of the batch."""

    def step(m: Any, optimizers: Any, lazy: Lazy, data: Tensor, labels: Tensor) -> list[Tensor]:
        batch = lazy(data, data.roll(3, 1))
        towers = m["image"], m["text"]
        with torch.no_grad():
            made = [tower(x) for tower, x in zip(towers, batch, strict=True)]
        leaves = [one.detach().requires_grad_() for one in made]
        a, b = (F.normalize(leaf, dim=1) for leaf in leaves)
        scores = a[:32] @ b[:32].t() * 5
        of = torch.arange(len(scores))
        loss = (F.cross_entropy(scores, of) + F.cross_entropy(scores.t(), of)) / 2
        loss = loss + (a - b).square().sum(1).mean()
        optimizers[0].zero_grad()
        loss.backward()
        for tower, x, leaf in zip(towers, batch, leaves, strict=True):
            assert leaf.grad is not None
            for half in (slice(0, n_rows // 2), slice(n_rows // 2, None)):
                (tower(x[half]) * leaf.grad[half]).sum().backward()
        optimizers[0].step()
        return [loss]

    modules: dict[str, nn.Module] = {
        "image": _net(8, wide, 6),
        "text": _net(8, wide, wide, 6),
    }
    return _loop(modules, [["image", "text"]], n_rows, 8, step)


def sharpness_aware(n_rows: int, wide: int) -> Loop:
    """The weights go uphill, a second pass finds the gradient there, and they step from where they
    were; batch statistics are moved by the first pass alone."""

    def step(m: Any, optimizers: Any, lazy: Lazy, data: Tensor, labels: Tensor) -> list[Tensor]:
        x, y = lazy(data, labels)
        weights = [p for p in m["net"].parameters() if p.requires_grad]
        first = F.cross_entropy(m["net"](x), y, label_smoothing=0.1)
        optimizers[0].zero_grad()
        first.backward()
        kept = [p.detach().clone() for p in weights]
        norm = torch.stack([p.grad.norm() for p in weights if p.grad is not None]).norm()
        with torch.no_grad():
            for p in weights:
                assert p.grad is not None
                p.add_(p.grad * (0.05 / (norm + 1e-12)))
        m["net"][1].momentum = 0.0
        second = F.cross_entropy(m["net"](x), y, label_smoothing=0.1)
        optimizers[0].zero_grad()
        second.backward()
        m["net"][1].momentum = 0.1
        for p, before in zip(weights, kept, strict=True):
            p.data = before
        optimizers[0].step()
        return [first, second]

    net = nn.Sequential(nn.Linear(8, wide, bias=False), nn.BatchNorm1d(wide), nn.Tanh())
    net.extend([nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh()])
    net.append(nn.Linear(wide, 3))
    return _loop({"net": net}, [["net"]], n_rows, 8, step)


def adversarial(n_rows: int, wide: int) -> Loop:
    """Inputs go uphill by the sign of their gradients, in a box around what they were; the model
    learns from them, and draws the same masks for a second pass."""

    def step(m: Any, optimizers: Any, lazy: Lazy, data: Tensor, labels: Tensor) -> list[Tensor]:
        x, y = lazy(data, labels)
        near = x.detach() + torch.empty_like(x).uniform_(-0.1, 0.1)
        for _ in range(2):
            near.requires_grad_(True)
            (found,) = torch.autograd.grad(F.cross_entropy(m["net"](near), y), [near])
            near = near.detach() + 0.05 * found.detach().sign()
            near = torch.min(torch.max(near, x - 0.2), x + 0.2).clamp(-3, 3)
        state = torch.get_rng_state()
        out = m["net"](near.detach())
        torch.set_rng_state(state)
        same = m["net"](x)
        apart = F.kl_div(out.log_softmax(1), same.softmax(1), reduction="batchmean")
        loss = F.cross_entropy(out, y) + apart
        right = (out.argmax(1) == y).sum()
        return [_update(optimizers[0], loss), right / n_rows]

    net = nn.Sequential(nn.Linear(8, wide), nn.GELU(), nn.Dropout(0.2), nn.Linear(wide, wide))
    net.extend([nn.GELU(), nn.Linear(wide, 3)])
    return _loop({"net": net}, [["net"]], n_rows, 8, step)


def predictions_that_stay(n_rows: int, wide: int) -> Loop:
    """Several predictions of each sample are read for a log and kept, with their history, while the
    model learns; it is evaluated in the midst of the step, too."""

    def step(m: Any, optimizers: Any, lazy: Lazy, data: Tensor, labels: Tensor) -> list[Tensor]:
        x, y = lazy(data, labels)
        drawn = torch.stack([F.dropout(m["net"](x), 0.1) for _ in range(3)])
        spread = drawn.std(0).mean().item()
        out = m["net"](x)
        m["net"].eval()
        calm = m["net"](x)
        m["net"].train()
        loss = F.cross_entropy(out, y) + F.mse_loss(out, calm)
        return [_update(optimizers[0], loss), torch.tensor(spread)]

    return _loop({"net": _net(8, wide, wide, 3)}, [["net"]], n_rows, 8, step)


LOOPS = [
    gan,
    two_losses,
    two_losses_retained,
    actor_critic,
    distillation,
    self_conditioning,
    simsiam,
    ppo,
    vae_gan,
    dqn,
    gradient_cache,
    sharpness_aware,
    adversarial,
    predictions_that_stay,
]


def seen_of(loop: Loop) -> Iterator[Tensor]:
    """What a loop leaves: parameters, buffers, and what optimizers keep."""
    yield from loop.modules.state_dict().values()
    for optimizer in loop.optimizers:
        for kept in optimizer.state_dict()["state"].values():
            yield from (value for value in kept.values() if isinstance(value, Tensor))
