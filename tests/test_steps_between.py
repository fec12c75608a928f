# SPDX-License-Identifier: Apache-2.0
"""Parameters that are written between a forward pass and its backward.

Eager's backward reads what its graph saved: the activations of the old parameters. koila runs the
forward again then, and must not read the new ones. Fused optimizers write parameters without a new
version, so nothing tells afterwards that they did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import koila
from chunked import split
from koila.recording import bridge
from oracle import Lazy, assert_same_story, eager
from profiled import bytes_over_time

N_ROWS = 11
CHUNKS = [1, 2, 3, 7, N_ROWS]

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda given: torch.optim.SGD(given, 0.1),
    "foreach": lambda given: torch.optim.SGD(given, 0.1, foreach=True),
    "fused": lambda given: torch.optim.SGD(given, 0.1, fused=True),
    "adam": lambda given: torch.optim.Adam(given, 0.1),
    "fused_adam": lambda given: torch.optim.Adam(given, 0.1, fused=True),
}


def rows(n: int) -> Tensor:
    return torch.randn(N_ROWS, n, dtype=torch.float64)


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out).double()


class Probed(nn.Module):
    """A probe learns from features that get no gradient from it, inside one module."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.probe = linear(5, 8), linear(8, 3), linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.tanh(self.body(x))
        return self.head(features), self.probe(features.detach())


def a_probe(lazy: Lazy, make: Make) -> Any:
    model, losses = Probed(), []
    of_model = make([*model.body.parameters(), *model.head.parameters()])
    of_probe = make(model.probe.parameters())
    for _ in range(3):
        x, y = lazy(rows(5), torch.randint(3, (N_ROWS,)))
        out, probed = model(x)
        loss, other = F.cross_entropy(out, y), F.cross_entropy(probed, y)
        of_model.zero_grad()
        loss.backward()
        of_model.step()
        of_probe.zero_grad()
        other.backward()
        of_probe.step()
        losses += [loss.item(), other.item()]
    return losses, model


def both_losses_first(lazy: Lazy, make: Make) -> Any:
    """A GAN whose losses are there before the first step; nobody holds what was generated."""
    g, d = linear(4, 5), linear(5, 1)
    of_g = make(g.parameters())
    z = lazy(rows(4))

    def losses() -> tuple[Tensor, Tensor]:
        made = g(z)
        return -d(made).mean(), d(made.detach()).pow(2).mean()

    of_generator, of_critic = losses()
    of_generator.backward()
    of_g.step()
    d.zero_grad()
    of_critic.backward()
    return g, d.weight.grad


def a_value_from_before(lazy: Lazy, make: Make) -> Any:
    model = linear(4, 5)
    optimizer = make(model.parameters())
    z = lazy(rows(4))
    before = model(z)
    model(z * 2).mean().backward()
    optimizer.step()
    before.pow(2).mean().backward()
    return model.weight.grad


def two_heads(lazy: Lazy, make: Make) -> Any:
    body, first, second = linear(4, 8), linear(8, 3), linear(8, 3)
    optimizer = make([*body.parameters(), *first.parameters()])
    h = torch.tanh(body(lazy(rows(4))))
    first(h).pow(2).mean().backward(retain_graph=True)
    optimizer.step()
    second(h).pow(2).mean().backward()
    return body.weight.grad, second.weight.grad


def three_networks(lazy: Lazy, make: Make) -> Any:
    """Two optimizers step before the last backward."""
    body, critic, probe = linear(5, 8), linear(8, 1), linear(8, 3)
    of_body, of_probe = make(body.parameters()), make(probe.parameters())
    x, target, y = lazy(rows(5), rows(1), torch.randint(3, (N_ROWS,)))
    z = body(x)
    of_critic = F.mse_loss(critic(z.detach()), target)
    of_z, labels = z.mean(), F.cross_entropy(probe(z.detach()), y)
    of_z.backward()
    of_body.step()
    labels.backward()
    of_probe.step()
    of_critic.backward()
    return body, probe, critic.weight.grad


def a_network_in_two_places(lazy: Lazy, make: Make) -> Any:
    """Split learning: the gradient at the cut comes back after the server's step."""
    client, server = linear(5, 8), nn.BatchNorm1d(8).double()
    optimizer = make(server.parameters())
    sent = client(lazy(rows(5)))
    received = sent.clone().detach().requires_grad_()
    server(received).pow(2).mean().backward()
    optimizer.step()
    sent.backward(received.grad)
    return client.weight.grad, server.running_mean, server.running_var


def statistics_and_draws(lazy: Lazy, make: Make) -> Any:
    """What the part draws and updates is not repeated when it runs again."""
    body = nn.Sequential(linear(4, 8), nn.BatchNorm1d(8).double(), nn.Dropout(0.5))
    head = linear(8, 3)
    optimizer = make(body[:1].parameters())
    x = lazy(rows(4))
    loss = head(body(x).detach()).pow(2).mean()
    body(x * 2).mean().backward()
    optimizer.step()
    loss.backward()
    return head.weight.grad, body[1].running_mean, body[1].num_batches_tracked


def a_hook(lazy: Lazy, make: Make) -> Any:
    """A program with a hook is not cut: it runs whole before the step."""
    body, first, second = linear(4, 8), linear(8, 3), linear(8, 3)
    optimizer = make([*body.parameters(), *first.parameters()])
    h = torch.tanh(body(lazy(rows(4))))
    h.register_hook(lambda gradient: gradient * 2)
    first(h).pow(2).mean().backward(retain_graph=True)
    optimizer.step()
    second(h).pow(2).mean().backward()
    return body.weight.grad, second.weight.grad


#: What is differentiated is handed out at the write, and torch's own backward leads to its part.
OUT = "the backward begins at a number"

STORIES: dict[Callable[..., Any], str] = {
    a_probe: OUT,
    both_losses_first: OUT,
    a_value_from_before: "",
    two_heads: "",
    three_networks: "",
    a_network_in_two_places: OUT,
    statistics_and_draws: OUT,
    a_hook: "the second backward is that of a whole run",
}


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("story", STORIES)
def test_an_optimizers_step(story: Callable[..., Any], optimizer: str, chunks: int) -> None:
    make, partly = OPTIMIZERS[optimizer], STORIES[story] if chunks > 1 else ""
    tolerance = 1e-8 if "adam" in optimizer else None  # it divides by small gradients
    assert_same_story(lambda lazy: story(lazy, make), chunks, tolerance=tolerance, partly=partly)


def deep_loss(lazy: Lazy) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(linear(4, 8), nn.Tanh(), linear(8, 3))
    return model, model(lazy(rows(4))).pow(2).mean()


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("is_fused", [False, True])
def test_what_its_own_backward_needs(is_fused: bool, chunks: int) -> None:
    """Eager refuses it; after a fused step eager does not see it, and reads the new numbers."""
    torch.manual_seed(0)
    model, loss = deep_loss(eager)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=is_fused)
    loss.backward(retain_graph=True)
    optimizer.step()
    if not is_fused:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with split(chunks, partly=OUT):
        model, loss = deep_loss(koila.lazy)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=is_fused)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError) as raised:
            loss.backward()
    told = "a fused optimizer" if is_fused else "modified by an inplace operation"
    assert told in str(raised.value)


def averaged(target: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        for one, other in zip(target.parameters(), source.parameters(), strict=True):
            one.mul_(0.9).add_(other, alpha=0.1)


def set_as_data(target: nn.Module, source: nn.Module) -> None:
    for one, other in zip(target.parameters(), source.parameters(), strict=True):
        one.data = one.data * 0.9 + other.data * 0.1


def loaded(target: nn.Module, source: nn.Module) -> None:
    target.load_state_dict(source.state_dict())


def set_from_a_vector(target: nn.Module, source: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(source.parameters()), target.parameters())


def drawn_again(target: nn.Linear, _: nn.Module) -> None:
    target.reset_parameters()


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("write", [averaged, set_as_data, loaded, set_from_a_vector, drawn_again])
def test_weights_of_a_detached_target(write: Callable[..., None], chunks: int) -> None:
    """Each of the target's weights is kept, not only the one that is written first."""

    def story(lazy: Lazy) -> Any:
        target, model = linear(5, 3), linear(5, 3)
        x = lazy(rows(5))
        loss = F.mse_loss(model(x), target(x).detach())
        write(target, model)
        loss.backward()
        return target, model.weight.grad, model.bias.grad

    assert_same_story(story, chunks, partly=OUT if chunks > 1 else "")


def test_no_copies_where_nothing_is_read_later() -> None:
    """In an ordinary step the graph is gone when the optimizer steps."""
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    x = torch.randn(64, 256)
    with split(4):
        for _ in range(2):
            out = model(koila.lazy(x))
            loss = out.pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            most = max([0, *bytes_over_time(optimizer.step)])
    assert most < model.weight.nbytes


def in_the_backward(lazy: Lazy, make: Make, n_losses: int) -> Any:
    """Each parameter has an optimizer, which steps as soon as its gradient is there."""
    g, d = linear(4, 5), linear(5, 1)

    def step_at_once(parameter: nn.Parameter) -> None:
        optimizer = make([parameter])

        def step(_: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)

    for parameter in g.parameters():
        step_at_once(parameter)
    for _ in range(3):
        z = lazy(rows(4))
        made = [g(z) for _ in range(n_losses)]
        losses = [made[0].pow(2).mean(), *(d(one.detach()).pow(2).mean() for one in made[1:])]
        del made
        for loss in losses:
            loss.backward()
    return g, d.weight.grad


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_optimizers_that_step_in_the_backward(optimizer: str, chunks: int) -> None:
    make = OPTIMIZERS[optimizer]
    assert_same_story(lambda lazy: in_the_backward(lazy, make, 1), chunks)


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_a_second_loss_beside_such_an_optimizer(optimizer: str) -> None:
    """Nothing can be cut while a backward runs: it is refused, also where no version tells."""
    make = OPTIMIZERS[optimizer]
    with split(3), pytest.raises(koila.StaleError, match="was changed in place"):
        in_the_backward(koila.lazy, make, 2)


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_a_program_that_neither_is_cut_nor_fits(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "_run_whole", lambda _: False)
    with split(3), pytest.raises(koila.StaleError, match="was changed in place"):
        a_hook(koila.lazy, OPTIMIZERS[optimizer])


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_a_step_in_a_hook(optimizer: str) -> None:
    """The hook writes what the program that is running reads again."""
    first, second = linear(4, 8), linear(8, 3)
    of_second = OPTIMIZERS[optimizer](second.parameters())
    for parameter in second.parameters():
        parameter.grad = torch.ones_like(parameter)
    with split(3), pytest.raises(koila.KoilaError, match="a hook of a value has written"):
        h = torch.tanh(first(koila.lazy(rows(4))))
        out = second(h)
        out.register_hook(lambda _: of_second.step())
        out.pow(2).mean().backward()
