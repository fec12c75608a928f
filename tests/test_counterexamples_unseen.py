# SPDX-License-Identifier: Apache-2.0
"""Programs that break a naive recorder by what happens out of its sight: one test for each.

Weights that change between record and replay, flags, and calls that are no torch functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oracle import Lazy, assert_same_story, gradients
from programs_special import Quantise
from programs_vision import Discriminator, Generator, Mlp
from stories import N_ROWS, batches, make, rows

each_split = pytest.mark.parametrize("chunks", [None, 1, 2, 3])

# Between record and replay ----------------------------------------------------------------------

CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "data": lambda m: [p.data.mul_(0.5) for p in m.parameters()],
    "data assigned": lambda m: [setattr(p, "data", p.data * 0.5) for p in m.parameters()],
    "data of one": lambda m: m.body[0].bias.data.add_(1.0),
    "data and back": lambda m: [p.data.mul_(2).div_(2) for p in m.parameters()],
    "detached": lambda m: [p.detach().mul_(0.5) for p in m.parameters()],
    "loaded": lambda m: m.load_state_dict({n: v * 0.5 for n, v in m.state_dict().items()}),
    "initialised": lambda m: nn.init.zeros_(m.head.bias),
    "vector": lambda m: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.parameters()) * 0.5, m.parameters()
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tracked", [True, False])
@each_split
def test_weights_changed_before_the_value_is_read(
    chunks: int | None, tracked: bool, change: str
) -> None:
    """`p.data.mul_()`, `p.data =` between record and read: what waits runs first."""

    def story(lazy: Lazy) -> Any:
        model, x, _ = make()
        x = lazy(x)
        with torch.set_grad_enabled(tracked):
            out = model(x)
        with torch.no_grad():
            CHANGES[change](model)
        return out, model(x)

    assert_same_story(story, chunks)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [True, False])
@each_split
def test_optimizer_stepped_before_the_value_is_read(
    chunks: int | None, fused: bool, kind: type[torch.optim.Optimizer]
) -> None:
    """A fused optimizer leaves no version behind: what is pending is read before it steps."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        optimizer = kind(model.parameters(), lr=0.5, fused=fused)  # type: ignore[call-arg]
        x, y = lazy(x, y)
        with torch.no_grad():
            before = model(x)
        F.cross_entropy(model(x), y).backward()
        pending = model(x)
        optimizer.step()
        return before, pending.detach(), model(x), model

    assert_same_story(story, chunks)


@each_split
def test_discriminator_stepped_before_the_generators_backward(chunks: int | None) -> None:
    """optD.step() between G's forward and errG.backward() is legal: G's weights are the same."""

    def story(lazy: Lazy) -> Any:
        g, d = Generator().double(), Discriminator().double()
        of_g = torch.optim.Adam(g.parameters(), lr=0.05, fused=True)
        of_d = torch.optim.Adam(d.parameters(), lr=0.05, fused=True)
        losses = []
        for _ in range(2):
            x, z = lazy(rows(6), rows(4))
            fake = g(z)
            loss_d = F.softplus(-d(x)).mean() + F.softplus(d(fake.detach())).mean()
            of_d.zero_grad()
            loss_d.backward()
            of_d.step()
            loss_g = F.softplus(-d(fake)).mean() + F.mse_loss(fake, x)
            of_g.zero_grad()
            loss_g.backward()
            of_g.step()
            losses.append([loss_d.item(), loss_g.item()])
        return losses, g, d

    assert_same_story(story, chunks)


@each_split
def test_gradients_switched_off_and_on_again(chunks: int | None) -> None:
    """pix2pix: requires_grad_(False) when recorded, on again at backward: eager has None."""

    def story(lazy: Lazy) -> Any:
        g, d = Generator().double(), Discriminator().double()
        x, z = lazy(rows(6), rows(4))
        d.requires_grad_(False)
        loss = F.softplus(-d(g(z))).mean() + F.l1_loss(g(z), x)
        d.requires_grad_(True)
        loss.backward()
        return loss, gradients(g, d)

    assert_same_story(story, chunks)


@each_split
def test_gradients_switched_between_two_calls(chunks: int | None) -> None:
    """A frozen use and a free use of the same parameters in one program."""

    def story(lazy: Lazy) -> Any:
        g, d = Generator().double(), Discriminator().double()
        x, z = lazy(rows(6), rows(4))
        loss = F.softplus(d(x)).mean()
        d.requires_grad_(False)
        loss = loss + F.softplus(-d(g(z))).mean()
        d.requires_grad_(True)
        loss.backward()
        return loss, gradients(g, d)

    assert_same_story(story, chunks)


@each_split
def test_gradients_switched_off_before_backward(chunks: int | None) -> None:
    """What is frozen when backward() runs gets no gradient; what it was used for does."""

    def story(lazy: Lazy) -> Any:
        d = Discriminator().double()
        x = lazy(rows(6)).requires_grad_()
        loss = F.softplus(d(x)).mean()
        d.requires_grad_(False)
        loss.backward()
        return loss, x.grad, gradients(d)

    assert_same_story(story, chunks)


# What does not come by torch functions ----------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("width", [12, 8])
@pytest.mark.parametrize("kind", ["layer", "encoder", "transformer", "attention"])
@each_split
def test_fast_path_of_transformers(chunks: int | None, kind: str, width: int) -> None:
    """nn.TransformerEncoder in eval, without gradient, padded: eager's own fast path."""

    def story(lazy: Lazy) -> Any:
        x, y = rows(4, width).float(), rows(3, width).float()
        padding = torch.arange(4) >= torch.randint(1, 5, (N_ROWS, 1))
        x, y, padding = lazy(x, y, padding)
        layer = nn.TransformerEncoderLayer(width, 2, 16, batch_first=True).eval()
        with torch.no_grad():
            if kind == "layer":
                return layer(x, src_key_padding_mask=padding)
            if kind == "encoder":
                encoder = nn.TransformerEncoder(layer, 2).eval()
                return encoder(x, src_key_padding_mask=padding)
            if kind == "transformer":
                model = nn.Transformer(width, 2, 1, 1, 16, batch_first=True).eval()
                return model(x, y, src_key_padding_mask=padding)
            attention = nn.MultiheadAttention(width, 2, batch_first=True).eval()
            return attention(x, x, x, key_padding_mask=padding)

    # Behind the fused layers a decoder goes on.
    whole = "" if kind == "transformer" else "torch's fused layers run at once"
    assert_same_story(story, chunks, whole=whole)


class Square(torch.autograd.Function):
    """A square whose backward is three times too large, so that its loss is noticed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x**power, x.sum(-1)

    @staticmethod
    def backward(ctx: Any, of_square: Tensor, of_sum: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 6 * x * of_square + of_sum[..., None], None


@pytest.mark.parametrize("captured", [True, False])
@each_split
def test_custom_functions(chunks: int | None, captured: bool) -> None:
    """A custom autograd.Function keeps its own backward, also through an `apply` kept before."""
    square = Square.apply

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        h = Quantise.apply(model.body(x).tanh())
        squared, total = (square if captured else Square.apply)(h, 2)
        loss = F.cross_entropy(model.head(squared), y) + total.mean()
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


@pytest.mark.parametrize("use_reentrant", [True, False])
@each_split
def test_checkpoint(chunks: int | None, use_reentrant: bool) -> None:
    """Recording inside checkpoint, nested and with dropout off: transparent."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        h = model.body(x)
        h = checkpoint(lambda t: torch.tanh(t) * 2, h, use_reentrant=use_reentrant)
        h = checkpoint(model.head, h, use_reentrant=use_reentrant)
        loss = F.cross_entropy(h, y)
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_user_hooks_on_saved_tensors(chunks: int | None) -> None:
    """Saved tensors packed by the user's own hooks, who loses digits, give the same gradients."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        packed = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tuple(tensor.shape))
            return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

        def unpack(tensor: Tensor) -> Tensor:
            return tensor.to(x.dtype) if tensor.is_floating_point() else tensor

        h = model.body(x)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = F.cross_entropy(model.head(h), y)
        with torch.autograd.graph.save_on_cpu():
            loss = loss + model(x).pow(2).mean()
        loss.backward()
        assert packed
        return loss, gradients(model), packed

    assert_same_story(story, chunks, partly="inside of hooks calls run where they stand")


@each_split
def test_evaluation_over_an_epoch(chunks: int | None) -> None:
    """`preds.append(out)` and `total += loss` without no_grad around them, read at the end."""

    def story(lazy: Lazy) -> Any:
        model = Mlp().double().requires_grad_(False)
        predictions, total = [], 0.0
        for x, y in batches(5):
            x, y = lazy(x, y)
            out = model(x)
            total += F.cross_entropy(out, y)
            predictions.append(out)
        before = torch.cat(predictions)
        model.requires_grad_(True)
        return before, total, [p.mean().item() for p in predictions]

    assert_same_story(story, chunks)
