# SPDX-License-Identifier: Apache-2.0
"""The lines of random training scripts: models, and templates by kind.

Places in a template: {f}, {g}: features, one row of four for each row of the batch; {s}: such that
need a gradient; {l}, {k}: losses; {head}, {m}: a module; {q}: a scale; {B}: the number of the next
batch; {name}: what the line makes.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

WIDTH = 4

# Batches ------------------------------------------------------------------------------------------


def _floats(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    def make(n_rows: int, generator: torch.Generator) -> Tensor:
        return torch.randn(n_rows, *shape, generator=generator, dtype=torch.float64)

    return make


def _tokens(n_rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 9, (n_rows, 5), generator=generator)


def _time_major(n_rows: int, generator: torch.Generator) -> Tensor:
    return torch.randn(5, n_rows, 6, generator=generator, dtype=torch.float64)


#: How the batch of each kind is made.
INPUTS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "rows": _floats(6),
    "images": _floats(2, 6, 6),
    "tokens": _tokens,
    "texts": _floats(5, 6),
    "time-major": _time_major,
}

# Models -------------------------------------------------------------------------------------------


class Last(nn.Module):
    """A recurrent net's last output, of the rows of a batch."""

    def __init__(self, net: nn.Module, time: int) -> None:
        super().__init__()
        self.net, self.time = net, time

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0].select(self.time, -1)


class Attention(nn.Module):
    """A block of a transformer with a mask, and the mean over what it gives."""

    def __init__(self, time: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout, batch_first=time == 1)
        self.norm, self.out, self.time = nn.LayerNorm(6), nn.Linear(6, WIDTH), time

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[self.time]
        mask = torch.ones(t, t, dtype=torch.bool).triu(1)
        h = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return self.out(self.norm(h).mean(self.time))


class Words(nn.Module):
    """The mean of embeddings, padding left out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 6, padding_idx=0), nn.Embedding(5, 6)
        self.out = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        mask = (x != 0).unsqueeze(-1)
        return self.out((h * mask).sum(1) / mask.sum(1).clamp(min=1)).tanh()


class Counting(nn.Module):
    """A module with buffers of its own: how often it ran, and a moving mean of its input."""

    mean: Tensor
    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.n += 1
        return (x - self.mean) * self.weight


class Residual(nn.Module):
    """A block beside its input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Experts(nn.Module):
    """Two experts, each of which is given the rows that choose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = scores.argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            which = (chosen == i).nonzero().squeeze(-1)
            out = out.index_add(0, which, expert(x[which]) * scores[which, i : i + 1])
        return out


class Scaled(torch.autograd.Function):
    """A function of the user's, whose gradient is not that of its numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x > 0) * 0.5


class Called(torch.autograd.Function):
    """A function of the user's that calls others, which may read what it does not get."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any) -> Tensor:
        ctx.backward = backward
        made: Tensor = forward(x)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.backward(gradients[0]), None, None


class WithScaled(nn.Module):
    """A layer with a function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(self.layer(x))


class Drop(nn.Module):
    """Dropout, and noise that the module makes itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.4, self.training)
        return x + 0.1 * torch.randn_like(x) if self.training else x


def _heads() -> list[str]:
    one = "nn.Linear(4, 4)"
    return [
        one,
        f"nn.Sequential({one}, nn.ReLU(), {one})",
        f"nn.Sequential({one}, nn.BatchNorm1d(4), nn.ReLU(), {one})",
        f"nn.Sequential(nn.BatchNorm1d(4), {one}, nn.BatchNorm1d(4, momentum=None))",
        f"nn.Sequential({one}, nn.LayerNorm(4), nn.GELU())",
        f"nn.Sequential({one}, nn.Dropout(0.3), {one})",
        f"nn.Sequential(nn.GroupNorm(2, 4), {one}, nn.SiLU(inplace=True))",
        f"nn.Sequential({one}, nn.BatchNorm1d(4, affine=False), nn.ReLU(inplace=True))",
        f"nn.Sequential(Residual({one}, nn.BatchNorm1d(4), nn.ReLU()), Residual({one}, nn.Tanh()))",
        f"nn.Sequential({one}, Counting())",
        f"nn.Sequential(Drop(), {one})",
        "Experts()",
        "WithScaled()",
        f"nn.utils.parametrizations.weight_norm({one})",
        f"nn.utils.parametrizations.spectral_norm({one})",
        "nn.Sequential(nn.Linear(4, 8), nn.GLU())",
        f"nn.Sequential({one}, nn.Softmax(-1), {one})",
    ]


def _nets() -> dict[str, list[str]]:
    return {
        "rows": [
            "nn.Linear(6, 4)",
            "nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))",
            "nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))",
            "nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 4))",
        ],
        "images": [
            "nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3),"
            " nn.AdaptiveAvgPool2d(1), nn.Flatten())",
            "nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(),"
            " nn.Linear(36, 4))",
            "nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(0.2,"
            " inplace=True), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(64, 4))",
            "nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(),"
            " nn.Flatten(), nn.Linear(64, 4))",
        ],
        "tokens": [
            "Words()",
            "nn.Sequential(nn.Embedding(9, 6), Last(nn.GRU(6, 4, batch_first=True), 1))",
            "nn.EmbeddingBag(9, 4, mode='mean')",
            "nn.Sequential(nn.Embedding(9, 6, max_norm=1.0), Attention(1, 0.0))",
        ],
        "texts": [
            "Last(nn.GRU(6, 4, batch_first=True), 1)",
            "Last(nn.LSTM(6, 4, 2, batch_first=True, dropout=0.2), 1)",
            "Attention(1, 0.0)",
            "Attention(1, 0.3)",
            "nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8, 0.1, batch_first=True),"
            " nn.Flatten(), nn.Linear(30, 4))",
            "nn.Sequential(nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 4))",
        ],
        "time-major": [
            "Last(nn.GRU(6, 4), 0)",
            "Last(nn.RNN(6, 4, 2, dropout=0.2), 0)",
            "Attention(0, 0.0)",
        ],
    }


_SAME_FOR_ALL = {
    "head": _heads(),
    "other": _heads(),
    "disc": [
        "nn.Linear(4, 1)",
        "nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LeakyReLU(0.2), nn.Linear(4, 1))",
        "nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh(), nn.Linear(4, 1))",
        "nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU(),"
        " nn.Linear(4, 1))",
    ],
}
#: The modules of a script by name, and by the kind of its batch.
MODELS: dict[str, dict[str, list[str]]] = {
    "net": _nets(),
    **{name: dict.fromkeys(INPUTS, makes) for name, makes in _SAME_FOR_ALL.items()},
}

# What stands around calls -------------------------------------------------------------------------


class Half(TorchDispatchMode):
    """A dispatch mode that changes numbers."""

    n_changed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            self.n_changed += 1
            return out * 0.5
        return out


class Louder(TorchFunctionMode):
    """A function mode that changes numbers."""

    n_changed = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.n_changed += 1
            return out * 1.5
        return out


def halved(tensor: Tensor) -> Tensor:
    """What a hook on saved tensors packs, which changes gradients."""
    return tensor * 0.5 if tensor.is_floating_point() else tensor


def same(tensor: Tensor) -> Tensor:
    return tensor


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype for a block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def hook_on(tensor: Tensor, hook: Any) -> Any:
    """Register a hook. The node of a plain view that was written is asked for before: torch 2.13
    crashes where it is out of date."""
    if type(tensor) is Tensor:
        _ = tensor.grad_fn
    return tensor.register_hook(hook)


def saved(module: nn.Module) -> dict[str, Tensor]:
    """A module's state, through a file."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    found: dict[str, Tensor] = torch.load(file)
    return found


#: The names of this file that a script may use.
COMMON = (
    "torch",
    "nn",
    "F",
    "np",
    "copy",
    "AveragedModel",
    "checkpoint",
    "checkpoint_sequential",
    "hook_on",
    "Last",
    "Attention",
    "Words",
    "Counting",
    "Residual",
    "Experts",
    "Scaled",
    "Called",
    "WithScaled",
    "Drop",
    "Half",
    "Louder",
    "halved",
    "same",
    "default_dtype",
    "saved",
)
assert {np, copy, AveragedModel, checkpoint, checkpoint_sequential}

# Lines --------------------------------------------------------------------------------------------

_ALL = "[*net.parameters(), *head.parameters()]"
OPTIMIZERS = [
    f"opt = torch.optim.SGD({_ALL}, 0.1)",
    f"opt = torch.optim.SGD({_ALL}, 0.1, momentum=0.9, weight_decay=0.01, fused=True)",
    f"opt = torch.optim.Adam({_ALL}, 0.01, eps=1e-3)",
    f"opt = torch.optim.AdamW({_ALL}, 0.01, eps=1e-3, foreach=True)",
    "opt = torch.optim.SGD([{{'params': net.parameters(), 'lr': 0.1}},"
    " {{'params': head.parameters(), 'lr': 0.01}}], nesterov=True, momentum=0.9)".replace(
        "{{", "{"
    ).replace("}}", "}"),
    f"opt = torch.optim.RMSprop({_ALL}, 0.01, eps=1e-3)",
    "opt = torch.optim.SGD(net.parameters(), 0.1)",
]

KINDS: dict[str, list[str]] = {
    "enter": [
        "{name} = net(x)",
        "{name} = net(x)",
        "{name} = net(x).tanh()",
        "{name} = F.normalize(net(x), dim=-1)",
        "{name} = checkpoint(net, x, use_reentrant=False)",
        "{name} = torch.func.functional_call(net, dict(net.named_parameters()), (x,))",
        "with torch.autocast('cpu', torch.bfloat16):\n    {name} = net(x)",
        "with torch.no_grad():\n    {name} = net(x)",
        "{name} = net(x + 0.1 * torch.randn_like(x))",
    ],
    "value": [
        "{name} = torch.autograd.grad(head({s}).tanh().sum(), {s}, create_graph=True)[0]",
        "q{name} = {s}.detach().requires_grad_()\n"
        "{name} = torch.autograd.grad((q{name} * {f}).sin().mean(), q{name}, create_graph=True)[0]",
        "{name} = {head}({f})",
        "{name} = {head}({f})",
        "{name} = {head}({f}) + {g}",
        "{name} = {f} * {g}",
        "{name} = {f} + {q} * {g}",
        "{name} = {f}.detach()",
        "{name} = {f}.detach().requires_grad_()",
        "{name} = {f}.clone()",
        "{name} = net(x)",
        "{name} = net(x)",
        "{name} = {f}.relu()",
        "{name} = F.normalize({f}, dim=-1)",
        "{name} = {f} - {f}.mean(0)",
        "{name} = ({f} - {f}.mean(0)) / ({f}.std(0) + 0.1)",
        "{name} = ({f} @ {g}.T).softmax(-1) @ {f}",
        "{name} = {f}.softmax(-1)",
        "{name} = F.dropout({f}, 0.3)",
        "{name} = torch.where({f} > 0, {f}, {g} * 0.1)",
        "{name} = torch.cat([{head}({f}[:2]), {head}({f}[2:])])",
        "{name} = torch.stack([{f}, {g}]).mean(0)",
        "{name} = {head}({f})[torch.randperm({f}.shape[0])]",
        "{name} = Scaled.apply({f})",
        "{name} = {f}.index_select(0, y.argsort())",
        "{name} = {f} * F.one_hot(y, 4)",
        "{name} = {f} - center",
        "{name} = {head}({f}.detach()) + {f}",
        "{name} = {f} * (x.double().flatten(1)[:, :1] if x.shape[0] == y.shape[0] else 1.0)",
        "{name} = {head}(torch.cat([{f}, {g}])).chunk(2)[0]",
        "{name} = {f}.new_zeros({f}.shape) + {g}",
        "{name} = {f}.T.contiguous().T",
        "{name} = {head}({head}({f}))",
        "{name} = {head}({f}[{g}.argmax(1)])",
        "{name} = {f}.gather(0, {g}.argmax(1)[:, None].expand_as({f}))",
        "{name} = {f}.flip(0) @ ({f}.T @ {g})",
        "{name} = {f}[(y < 3).nonzero().squeeze(-1)].mean(0) + {g}",
        "{name} = {f}.data\n{name}.clamp_(-1, 1)",
        "{name} = {f}[:, :2].detach()\n{name}.mul_(0.9)\n{name} = torch.cat([{name}, {name}], 1)",
    ],
    "context": [
        "with torch.no_grad():\n    {name} = {head}({f})",
        "with torch.inference_mode():\n    {name} = {head}({f}).sum().item()",
        "with torch.autocast('cpu', torch.bfloat16):\n    {name} = {head}({f})",
        "with torch.autograd.detect_anomaly(False):\n    {name} = {head}({f})",
        "{name}m = Half()\nwith {name}m:\n    {name} = {head}({f})\n{name}n = {name}m.n_changed",
        "{name}m = Louder()\nwith {name}m:\n    {name} = {head}({f})\n{name}n = {name}m.n_changed",
        "with torch.autograd.graph.saved_tensors_hooks(halved, same):\n    {name} = {head}({f})",
        "with torch.autograd.graph.saved_tensors_hooks(lambda t: note('{name}', t), same):\n"
        "    {name} = {head}({f})",
        "with torch.autograd.graph.save_on_cpu():\n    {name} = {head}({f})",
        "{name} = checkpoint({head}, {f}, use_reentrant=False)",
        "{name} = checkpoint({head}, {s}, use_reentrant=True)",
        "{name} = checkpoint(lambda a, b={g}: {head}(a) * b, {f}, use_reentrant=False)",
        "{name} = checkpoint(lambda a, b: {head}(a) * b, {f}, {g}, use_reentrant=False)",
        "{name} = checkpoint({head}, {f}, use_reentrant=False, preserve_rng_state=False)",
        "{name} = checkpoint(lambda a: a * {g}, {s}, use_reentrant=True)",
        "{name} = checkpoint(lambda a: {head}(a) * {g}.detach(), {s}, use_reentrant=True,"
        " preserve_rng_state=False)",
        "{name} = checkpoint(lambda a: {head}(a) + {g}.mean(0), {s}, use_reentrant=False)",
        "{name} = Called.apply({s}, lambda a: a * {g}, lambda b: b * 0.5)",
        "{name} = Called.apply({s}, lambda a: {head}({g}) + a, lambda b: b * 0.5)",
        "{name} = Called.apply({s}, lambda a: a * {q} - F.dropout({g}, 0.3), lambda b: b * 0.5)",
        "{name} = Called.apply({s}, torch.tanh, lambda b, c={g}: b * c.detach() + c.mean())",
        "{name} = checkpoint_sequential(nn.Sequential({head}, {head}), 2, {s},"
        " use_reentrant=False)",
        "with default_dtype(torch.float64):\n    {name} = {head}({f}) + torch.ones(4)",
        "with torch.set_grad_enabled(False):\n    {name} = {f} * 2\n    center = {f}.mean(0)",
        "with torch.enable_grad():\n    {name} = {head}({f}.detach())",
        "with torch.random.fork_rng():\n    torch.manual_seed(3)\n    {name} = F.dropout({f}, 0.5)",
        "with torch.no_grad():\n    with torch.enable_grad():\n        {name} = {head}({f})",
        "with torch.nn.utils.parametrize.cached():\n    {name} = {head}({f}) + {head}({g})",
        "{name} = torch.func.functional_call({head}, {p: t * 0.5 for p, t in"
        " {head}.named_parameters()}, ({f},))",
    ],
    "hook": [
        "hook_on({s}, lambda g: note('{name}', g) * 0.5)",
        "hook_on({s}, lambda g: note('{name}', g).clamp(-0.1, 0.1))",
        "hook_on({s}, lambda g: note('{name}', g) + 0.01)",
        "hook_on({s}, lambda g: note('{name}', g) and None if False else None)",
        "hook_on({s}, lambda g: note('{name}', g) * {g}.detach())",
        "hook_on({s}, lambda g: note('{name}', g) + {f}.detach().mean())",
        "next({m}.parameters()).register_hook(lambda g: note('{name}', g) * {f}.detach().mean())",
        "{s}.retain_grad()",
        "{s}.grad_fn.register_prehook(lambda go: (note('{name}', go[0]) * 0.5,))",
        "{s}.grad_fn.register_hook(lambda gi, go: (note('{name}', go[0]), None)[1])",
        "{m}.register_forward_hook(lambda m, i, o: note.only_called('{name}', o) * 1.5)",
        "{m}.register_forward_pre_hook(lambda m, i: (note.only_called('{name}', i[0]) * 2,))",
        "{m}.register_full_backward_hook(lambda m, gi, go: (note('{name}', gi[0]) * 0.5,))",
        "{m}.register_full_backward_hook(lambda m, gi, go: (note('{name}', go[0]), None)[1])",
        "{m}.register_full_backward_pre_hook(lambda m, go: (note('{name}', go[0]) * 0.5,))",
        "{name}h = {m}.register_forward_hook(lambda m, i, o: note.only_called('{name}', o) + 1)\n"
        "{name} = {head}({f})\n{name}h.remove()",
        "next({m}.parameters()).register_hook(lambda g: note('{name}', g) * 0.5)",
        "next({m}.parameters()).register_post_accumulate_grad_hook("
        "lambda p: p.grad.mul_(0.5) if note('{name}', p.grad) is not None else None)",
        "for p in {m}.parameters():\n    p.register_hook(lambda g: note('{name}', g).clamp(-1, 1))",
        "torch.autograd.graph.register_multi_grad_hook([{s}], lambda gs: note('{name}', gs[0]))"
        " and None",
        "{name} = []\nhook_on({s}, lambda g: {name}.append(g.norm().item()))",
        "{l}.register_hook(lambda g: note('{name}', g) * 2)",
    ],
    "loss": [
        "{name} = F.cross_entropy({f}, y)",
        "{name} = F.cross_entropy({f}, y)",
        "{name} = F.cross_entropy({f}, y, label_smoothing=0.1)",
        "{name} = F.cross_entropy({f}, y, weight=torch.tensor([1.0, 2, 3, 4]).double())",
        "{name} = F.cross_entropy({f}, y.masked_fill(y == 1, -100))",
        "{name} = F.cross_entropy({f}, y, reduction='none').mean()",
        "{name} = F.mse_loss({f}, {g}.detach())",
        "{name} = F.mse_loss({f}, F.one_hot(y, 4).double(), reduction='sum')",
        "{name} = ({f} * (y > 1)[:, None]).sum() / (y > 1).sum().clamp(min=1)",
        "{name} = {f}[y > 0].pow(2).sum()",
        "{name} = F.cross_entropy({f} @ {g}.T / 0.5, torch.arange({f}.shape[0]))",
        "{name} = F.cross_entropy((F.normalize({f}, dim=1) @ F.normalize({g}, dim=1).T)"
        ".masked_fill(torch.eye({f}.shape[0], dtype=torch.bool), -9.0), y.argsort())",
        "{name} = F.relu(1 - {f}.std(0)).mean() + {f}.T.cov().pow(2).sum()",
        "{name} = {f}.pow(2).mean().sqrt()",
        "{name} = {f}.logsumexp(0).mean()",
        "{name} = ({f} - {f}.mean(0)).pow(2).mean() / ({f}.var() + 0.1)",
        # A divergence from itself would be zero but for rounding.
        "{name} = F.kl_div({f}.log_softmax(-1), {g}.detach().mul(0.5).softmax(-1), "
        "reduction='batchmean')",
        "{name} = F.binary_cross_entropy_with_logits(disc({f}), disc({f}).detach().sigmoid())",
        "{name} = F.binary_cross_entropy_with_logits(disc({f}), floats({f}.shape[0], 1).sigmoid())",
        "{name} = -disc({f}).mean()",
        "{name} = F.triplet_margin_loss({f}, {g}, {f}.roll(1, 0))",
        "{name} = torch.cdist({f}, {g}).mean()",
        "{name} = F.cosine_similarity({f}, {g}).mean()",
        "{name} = {f}.abs().max()",
        "{name} = F.cross_entropy({f}, {g}.softmax(-1))",
        "{name} = F.smooth_l1_loss({f}, center.expand_as({f}))",
        "{name} = F.cross_entropy({f}, y) + 0.01 * sum(p.pow(2).sum() for p in net.parameters())",
        "{name} = sum(F.cross_entropy(a, b) for a, b in zip({f}.split(2), y.split(2)))",
        "{name} = torch.stack([F.cross_entropy({f}, y), {g}.pow(2).mean()]).sum()",
        "{name} = {f}.norm() * 0.1",
        "{name} = ({f}.softmax(-1).mean(0) * {f}.softmax(-1).mean(0).log()).sum()",
    ],
    "sum of losses": [
        "{name} = {l} + {q} * {k}",
        "{name} = {l} * {k}",
        "{name} = {l} / {l}.detach() + {k}",
        "{name} = torch.stack([{l}, {k}]).mean()",
        "{name} = {l} * 0.5",
        "{name} = {l} + ({f} * {g}).mean()",
    ],
    "read": [
        "{name} = {l}.item()",
        "{name} = float({l})",
        "{name} = ({f}.argmax(1) == y).double().mean().item()",
        "{name} = ({f}.argmax(1) == y).sum().item()",
        "{name} = {f}.detach().cpu().numpy().sum().item()",
        "{name} = {f}.tolist()[0][0]",
        "{name} = f'{abs(float({l})):.6f}'",
        "if {l} > 1:\n    {name} = {f} * 0.5",
        "{name} = bool(torch.isfinite({f}).all())",
        "{name} = {f}.detach().norm().item()",
        "{name} = [{l}.detach()]",
        "{name} = {f}.std(0).mean().item()",
        "if torch.isnan({l}):\n    raise RuntimeError",
        "{name} = y.bincount(minlength=4).tolist()",
        "{name} = {head}({f}).detach().max().item()",
    ],
    "plain": [
        "plain = floats(3, 4)",
        "plain = floats(3, 4).requires_grad_()",
        "{name} = {head}(floats(3, 4)).pow(2).mean()",
        "{name} = {head}(floats(3, 4)).pow(2).mean() + {l}",
        "{name} = net(batch({B})[0]).mean()",
        "{name} = disc(floats(5, 4)).mean()",
        "{name} = {head}(floats(3, 4)).mean().item()",
        "with torch.no_grad():\n    {name} = {head}(floats(3, 4))",
        "{name} = ({f} @ floats(3, 4).T).mean()",
        "{head}.eval()\n{name} = {head}(floats(3, 4)).detach()\n{head}.train()",
        "{name} = torch.rand(2)",
        "{name} = F.dropout(floats(3, 4), 0.5)",
    ],
    "state": [
        "{m}.eval()",
        "{m}.train()",
        "{name} = copy.deepcopy({m}.state_dict())",
        "{name} = {m}.state_dict()",
        "{name} = saved({m})",
        "{name} = copy.deepcopy({m})",
        "{name} = copy.deepcopy(opt.state_dict())",
        "opt.load_state_dict(copy.deepcopy(opt.state_dict()))",
        "center = floats(4)",
        "center = 0.9 * center + 0.1 * {f}.detach().mean(0)",
        "center.mul_(0.9).add_({f}.detach().mean(0), alpha=0.1)",
        "with torch.no_grad():\n    center.mul_(0.9).add_({f}.mean(0), alpha=0.1)",
        "with torch.no_grad():\n    center += {f}.sum(0)",
        "center.copy_({f}.detach()[0])",
        "ema = copy.deepcopy(head)",
        "with torch.no_grad():\n    for a, b in zip(ema.parameters(), head.parameters()):\n"
        "        a.lerp_(b, 0.5)",
        "ema.load_state_dict(head.state_dict())",
        "with torch.no_grad():\n    {name} = ema({f})",
        "with torch.no_grad():\n    for a, b in zip(ema.buffers(), head.buffers()):\n"
        "        a.copy_(b)",
        "average = AveragedModel(head)",
        "average.update_parameters(head)",
        "{name} = average({f})",
        "{m}.requires_grad_(False)",
        "{m}.requires_grad_(True)",
        "queue = floats(6, 4)",
        "queue = torch.cat([{f}.detach(), queue])[:6]",
        "queue[:2] = {f}.detach()[:2]",
        "{name} = ({f} @ queue.T).logsumexp(-1).mean()",
        "count = torch.zeros(4)",
        "count += F.one_hot(y, 4).sum(0)",
        "count.index_add_(0, y, torch.ones(y.shape[0]))",
        "{name} = [p.grad for p in {m}.parameters()]",
        "{name} = [p.grad.clone() for p in {m}.parameters() if p.grad is not None]",
        "total = 0.0",
        "total += {l}.item()",
        "total = total + {l}",
        "history = []",
        "history.append({f})",
        "history.append({l}.detach())",
        "del {f}",
        "with torch.no_grad():\n    {f}.mul_(0.5)",
        "{f}.data.mul_(0.5)",
        "{f}.detach().mul_(0.5)",
        "{name} = {f}.detach().requires_grad_()\nwith torch.no_grad():\n    {name}.mul_(0.9)",
        "{name} = nn.Parameter({f}.detach())\n{name}.data.add_(0.1)",
        "{name} = {f}.data\n{name}.clamp_(-1, 1)",
        "{name} = {f} * 1\n{name}d = {name}.detach()\n{name}d[0] = 0.5",
        "{f}.add_(0.1)",
        "{f}[0] = 0.0",
        "torch.manual_seed(5)",
        "{name} = torch.get_rng_state()",
        "torch.set_rng_state(torch.get_rng_state())",
    ],
    "gradient": [
        "{name} = torch.autograd.grad({l}, {s}, retain_graph=True)[0]",
        "{name} = torch.autograd.grad({l}, list(net.parameters()), retain_graph=True)",
        "{name} = torch.autograd.grad({l}, list({m}.parameters()), retain_graph=True,"
        " allow_unused=True)",
        "{name} = torch.autograd.grad({l}, {s}, create_graph=True)[0].pow(2).sum()",
        "{name} = (torch.autograd.grad(head({s}).sum(), {s}, create_graph=True)[0].norm(dim=1) - 1)"
        ".pow(2).mean()",
        "{name} = torch.autograd.grad({f}.sum(), {s}, retain_graph=True)[0]",
        "{name} = torch.autograd.grad({l}, list(disc.parameters()), retain_graph=True,"
        " allow_unused=True)",
        "{name} = torch.autograd.grad({f}, {s}, torch.ones_like({f}), retain_graph=True)[0]",
        "{l}.backward(retain_graph=True)",
        "{l}.backward(retain_graph=True)\n{name} = [p.grad.clone() for p in net.parameters()]",
        "{l}.backward(inputs=list(head.parameters()), retain_graph=True)",
        "{f}.backward(torch.ones_like({f}) * 0.1, retain_graph=True)",
    ],
    "backward": [
        "{l}.backward()",
        "{l}.backward()",
        "{l}.backward()",
        "({l} / 2).backward()",
        "{l}.backward(retain_graph=True)\n{k}.backward()",
        "torch.autograd.backward([{l}, {k}])",
        "{l}.backward(torch.tensor(0.5).double())",
        "{l}.backward()\n{name} = {l}.item()",
        "{name} = {l}.item()\n{l}.backward()",
        "{l}.mul({q}).backward()",
        "for p, g in zip(net.parameters(), torch.autograd.grad({l}, list(net.parameters()))):\n"
        "    p.grad = g",
        "with torch.autograd.set_detect_anomaly(True, False):\n    {l}.backward()",
        "{l}.backward()\n{k}.backward()",
        "({l} + {f}.mean()).backward()",
        "{l}.backward(retain_graph=True)\n{l}.backward()",
    ],
    "update": [
        "opt.step()",
        "opt.step()",
        "{name} = nn.utils.clip_grad_norm_(net.parameters(), 0.5)\nopt.step()",
        "nn.utils.clip_grad_value_(net.parameters(), 0.01)\nopt.step()",
        "opt.step()\nopt.zero_grad()",
        "opt.step()\nopt.zero_grad(set_to_none=False)",
        "with torch.no_grad():\n    for p in net.parameters():\n"
        "        if p.grad is not None:\n            p -= 0.1 * p.grad",
        "for g in opt.param_groups:\n    g['lr'] *= 0.5\nopt.step()",
        "opt.step()\nnn.init.constant_(next({m}.parameters()), 0.1)",
        "opt.step()\nwith torch.no_grad():\n    next({m}.parameters()).mul_(0.99)",
        "opt.step()\nfor p in {m}.parameters():\n    p.data.clamp_(-0.5, 0.5)",
        "opt.step()\n{m}.load_state_dict(saved({m}))",
        "pass",
    ],
}

#: How often a line of a kind stands in a step.
WEIGHTS = {
    "value": 9,
    "context": 4,
    "hook": 4,
    "loss": 4,
    "sum of losses": 2,
    "read": 3,
    "plain": 2,
    "state": 7,
    "gradient": 1,
}

_LOSS = "F.cross_entropy(head(net(x)), y)"
#: Whole steps that are written otherwise than line by line.
STEPS = [
    # A GAN: what is real, what is made, and what is made again, now for the one that made it.
    "opt_d = torch.optim.SGD(disc.parameters(), 0.1)\n"
    "fake = head(net(x))\n"
    "ones = torch.ones(y.shape[0], 1).double()\n"
    "real = F.one_hot(y, 4).double()\n"
    "d_loss = F.binary_cross_entropy_with_logits(disc(real), ones)\n"
    "d_loss = d_loss + F.binary_cross_entropy_with_logits(disc(fake.detach()), 0 * ones)\n"
    "opt_d.zero_grad()\n"
    "d_loss.backward()\n"
    "opt_d.step()\n"
    "g_loss = F.binary_cross_entropy_with_logits(disc(fake), ones)\n"
    "opt.zero_grad()\n"
    "g_loss.backward()\n"
    "opt.step()\n"
    "{name} = d_loss.item() + g_loss.item()",
    "opt_d = torch.optim.Adam(disc.parameters(), 0.01, eps=1e-3, fused=True)\n"
    "real = floats(y.shape[0], 4)\n"
    "fake = head(net(x))\n"
    "opt_d.zero_grad()\n"
    "disc(real).mean().neg().backward()\n"
    "disc(fake.detach()).mean().backward()\n"
    "a = torch.rand(y.shape[0], 1).double()\n"
    "between = (a * real + (1 - a) * fake.detach()).requires_grad_()\n"
    "slope = torch.autograd.grad(disc(between).sum(), between, create_graph=True)[0]\n"
    "penalty = (slope.norm(dim=1) - 1).pow(2).mean()\n"
    "penalty.backward()\n"
    "opt_d.step()\n"
    "opt.zero_grad()\n"
    "disc(head(net(x))).mean().neg().backward()\n"
    "opt.step()",
    # Two passes: up to where the loss is worse, and from there.
    f"loss = {_LOSS}\n"
    "loss.backward()\n"
    "moved = []\n"
    "with torch.no_grad():\n"
    "    for p in net.parameters():\n"
    "        step = 0.05 * p.grad / (p.grad.norm() + 0.01)\n"
    "        p.add_(step)\n"
    "        moved.append(step)\n"
    "opt.zero_grad()\n"
    f"{_LOSS}.backward()\n"
    "with torch.no_grad():\n"
    "    for p, step in zip(net.parameters(), moved):\n"
    "        p.sub_(step)\n"
    "opt.step()\n"
    "{name} = loss.item()",
    "lbfgs = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3)\n"
    "def closure():\n"
    "    lbfgs.zero_grad()\n"
    f"    loss = {_LOSS}\n"
    "    loss.backward()\n"
    "    return loss\n"
    "{name} = float(lbfgs.step(closure))",
    # Gradients of several batches, one update.
    "opt.zero_grad()\n"
    "for i in range(3):\n"
    "    a, b = batch({B} + i)\n"
    "    a = lazy(a, batch=1 if a.shape[1] == b.shape[0] and a.shape[0] == 5 else 0)\n"
    "    loss = F.cross_entropy(head(net(a)), lazy(b)) / 3\n"
    "    loss.backward()\n"
    "    {name} = loss.item()\n"
    "opt.step()",
    # Two views of a batch, and a teacher that follows.
    "teacher = copy.deepcopy(net)\n"
    "p1, p2 = head(net(x)), head(net(x * 1))\n"
    "with torch.no_grad():\n"
    "    t1, t2 = teacher(x), teacher(x)\n"
    "loss = -(F.cosine_similarity(p1, t2).mean() + F.cosine_similarity(p2, t1).mean()) / 2\n"
    "opt.zero_grad()\n"
    "loss.backward()\n"
    "opt.step()\n"
    "with torch.no_grad():\n"
    "    for a, b in zip(teacher.parameters(), net.parameters()):\n"
    "        a.mul_(0.9).add_(b, alpha=0.1)\n"
    "{name} = loss.item()",
    # An attack on the batch, then a step on what it made.
    "attacked = x.detach().clone().requires_grad_()\n"
    f"slope = torch.autograd.grad({_LOSS.replace('(x)', '(attacked)')}, attacked)[0]\n"
    "attacked = (attacked + 0.05 * slope.sign()).detach()\n"
    f"loss = {_LOSS.replace('(x)', '(attacked)')}\n"
    "opt.zero_grad()\n"
    "loss.backward()\n"
    "opt.step()",
    # A step, an evaluation, a checkpoint that is gone back to.
    f"loss = {_LOSS}\n"
    "before = copy.deepcopy(net.state_dict())\n"
    "opt.zero_grad()\n"
    "loss.backward()\n"
    "opt.step()\n"
    "net.eval()\n"
    "head.eval()\n"
    "with torch.no_grad():\n"
    "    {name} = (head(net(x)).argmax(-1) == y).double().mean().item()\n"
    "net.train()\n"
    "head.train()\n"
    "net.load_state_dict(before)",
    # A student of several teachers, each of which is read.
    "h = net(x)\n"
    "losses = [F.mse_loss(head(h), teach(h.detach()).detach()) for teach in (head, nn.Tanh())]\n"
    "weights = torch.stack([l.detach() for l in losses]).softmax(0)\n"
    "loss = sum(w * l for w, l in zip(weights, losses))\n"
    "opt.zero_grad()\n"
    "loss.backward()\n"
    "{name} = [l.item() for l in losses]\n"
    "opt.step()",
    # Policy gradients with a baseline.
    "scores = head(net(x))\n"
    "chosen = torch.distributions.Categorical(logits=scores.detach()).sample()\n"
    "reward = (chosen == y).double()\n"
    "log = torch.distributions.Categorical(logits=scores).log_prob(chosen)\n"
    "loss = -(log * (reward - reward.mean())).mean() - 0.01 * (scores.softmax(-1) *"
    " scores.log_softmax(-1)).sum(-1).mean()\n"
    "opt.zero_grad()\n"
    "loss.backward()\n"
    "opt.step()\n"
    "{name} = reward.mean().item()",
    # Gradients by hand, for several tasks.
    "h = net(x)\n"
    "tasks = [F.cross_entropy(head(h), y), h.pow(2).mean(), -h.std(0).mean()]\n"
    "parts = [torch.autograd.grad(t, list(net.parameters()), retain_graph=True) for t in tasks]\n"
    "for i, p in enumerate(net.parameters()):\n"
    "    p.grad = sum(part[i] for part in parts)\n"
    "{name} = [t.item() for t in tasks]\n"
    "opt.step()",
    # A scaler of losses, as for half precision.
    "scale = 8.0\n"
    "with torch.autocast('cpu', torch.bfloat16):\n"
    f"    loss = {_LOSS}\n"
    "opt.zero_grad()\n"
    "(loss * scale).backward()\n"
    "for p in net.parameters():\n"
    "    p.grad /= scale\n"
    "{name} = nn.utils.clip_grad_norm_(net.parameters(), 1.0).item()\n"
    "opt.step()",
]

#: What koila says where it refuses, as its documentation says: which words, what for.
REFUSALS = [
    # Plain torch alone wrote what waiting calls read.
    r"changed in place after it was recorded .* and before the call ran; change it after backward",
    r"changed in place after the value that is differentiated was computed with it",
    r"only the number of this value is left, .* call backward\(\) before that",
    r"which was written through \.data or by a fused optimizer before its backward; write it after",
    # A part of a program that was cut off was asked for what only the whole knows.
    r"run it whole: koila\.config\(chunks=1\)",
    # A second backward through calls that save nothing, which torch allows.
    r"koila keeps no graph behind a value whose backward ran",
    # Torch gives what only the body of a reentrant checkpoint reads no gradient, without a word.
    r"only its function reads gets no gradient",
]
