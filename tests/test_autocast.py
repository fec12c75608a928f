# SPDX-License-Identifier: Apache-2.0
"""Under autocast a call is recorded with the dtypes that torch's casts give it, and is split."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

import koila
import opcalls
from all_samples import SAMPLES, samples_of
from chunked import split
from koila import _core
from test_ops import CALLABLES, TABLE

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


def cast(tree: Any, dtypes: list[torch.dtype]) -> Any:
    """Give floating tensors these dtypes, one after another."""
    n = 0

    def change(leaf: Any) -> Any:
        nonlocal n
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            return leaf
        n += 1
        dtype = dtypes[(n - 1) % len(dtypes)]
        return leaf.detach().clone().to(dtype).requires_grad_(leaf.requires_grad)

    return tree_map(change, tree)


MIXTURES = {
    "float32": [torch.float32],
    "bfloat16": [torch.bfloat16],
    "float16": [torch.float16],
    "mixed": [torch.bfloat16, torch.float32],
    "float64": [torch.float64],
}


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("row", sorted(set(SAMPLES) & set(TABLE)))
def test_dtypes_are_torchs(row: str, lower: torch.dtype) -> None:
    """What a row says of a call under autocast is what torch does; or it declines."""
    for sample in samples_of(row):
        for mixture in MIXTURES.values():
            args, kwargs = cast(sample, mixture)
            with torch.autocast("cpu", dtype=lower):
                said = _core.infer(row, args, kwargs)
                if said["status"] != "OK":
                    continue
                try:
                    outs = opcalls.tensors(CALLABLES[row](*args, **kwargs)) or [args[0]]
                except (RuntimeError, NotImplementedError):
                    continue  # no kernel for that dtype: it runs live, and raises there too
            names = [str(out.dtype).removeprefix("torch.") for out in outs]
            text = opcalls.describe(row, args, kwargs)
            assert [str(out[0]).removeprefix("torch.") for out in said["outs"]] == names, text
            assert [out[3] for out in said["outs"]] == [out.requires_grad for out in outs], text


def test_float32_calls_are_not_declined() -> None:
    """The common case, float32 under bfloat16, is recorded for every row that is without it.

    Packed layers run as torch runs them: which kernels take bfloat16 depends on the machine.
    """
    for row in sorted(set(SAMPLES) & set(TABLE)):
        for sample in samples_of(row):
            args, kwargs = cast(sample, [torch.float32])
            plain = _core.infer(row, args, kwargs)["status"]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                lowered = _core.infer(row, args, kwargs)["status"]
            is_known = row.startswith(("packed_", "gradient_of"))
            is_known = is_known or (row == "einsum" and len(args[1]) > 2)
            assert lowered == plain or is_known, (row, args)


class Net(nn.Module):
    """Convolution, attention, normalisation and a recurrent layer: ops of every list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        # torch hands an LSTM of bfloat16 to oneDNN, which has none for CPUs without AVX-512
        has_lstm = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.rnn = (nn.LSTM if has_lstm else nn.GRU)(8, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).transpose(1, 2)
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        h, _ = self.rnn(h.float())
        out: Tensor = self.head(F.gelu(h).mean(1))
        return out


def step(lazy: Any, dtype: torch.dtype, inside: bool) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    model = Net()
    x, y = lazy(torch.randn(11, 3, 6), torch.randint(0, 5, (11,)))
    with torch.autocast("cpu", dtype=dtype):
        loss = F.cross_entropy(model(x), y)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    gradients = [p.grad for p in model.parameters()]
    return loss.detach() + 0, [g for g in gradients if g is not None]


def exact() -> list[Tensor]:
    """The step in float64, without autocast."""
    torch.manual_seed(0)
    model = Net()
    x, y = torch.randn(11, 3, 6), torch.randint(0, 5, (11,))
    model.double()
    h = model.conv(x.double()).transpose(1, 2)
    h = model.norm(h + model.attention(h, h, h, need_weights=False)[0])
    loss = F.cross_entropy(model.head(F.gelu(model.rnn(h)[0]).mean(1)), y)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def flat(gradients: list[Tensor]) -> Tensor:
    return torch.cat([gradient.double().flatten() for gradient in gradients])


@pytest.mark.parametrize("inside", [False, True], ids=["left before backward", "inside"])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 11])
def test_steps_under_autocast_are_split(chunks: int, inside: bool) -> None:
    """As near to float64 as eager is, times 1.5; in one chunk bit for bit; and it is split."""
    dtype = torch.bfloat16
    loss, gradients = step(lambda *batch: batch, dtype, inside)
    with split(chunks):
        got_loss, got = step(koila.lazy, dtype, inside)
    assert got_loss.dtype == loss.dtype
    if chunks == 1:
        assert torch.equal(got_loss, loss)
        assert all(torch.equal(a, b) for a, b in zip(got, gradients, strict=True))
        return
    truth = flat(exact())
    assert [g.dtype for g in got] == [g.dtype for g in gradients]
    far = (flat(gradients) - truth).norm()
    assert (flat(got) - truth).norm() <= 1.5 * far


@pytest.mark.parametrize("chunks", [2, 3])
def test_the_body_is_split_under_autocast(chunks: int) -> None:
    """Nothing of the model runs on the whole batch."""
    seen: list[int] = []
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        sees_koila = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func is torch.ops.aten.addmm.default:
                seen.append(args[1].shape[0])
            return func(*args, **(kwargs or {}))

    with split(chunks):
        x, y = koila.lazy(torch.randn(12, 6), torch.randint(0, 5, (12,)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        with Watch():
            loss.backward()
    assert seen == [12 // chunks] * (2 * chunks)


@pytest.fixture
def cuda_autocast() -> Iterator[None]:
    """autocast for CUDA without CUDA: fake tensors are dispatched by the device they say."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


#: Fake tensors run these through the CPU's kernels, or not at all.
UNFAKED = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


@pytest.mark.parametrize("row", sorted((set(SAMPLES) & set(TABLE)) - UNFAKED))
def test_dtypes_on_cuda_are_torchs(row: str, cuda_autocast: None) -> None:
    """The lists of CUDA are not the CPU's; what torch does is asked of fake tensors."""
    for sample in samples_of(row):
        for name in ("float32", "bfloat16"):
            plain = cast(sample, MIXTURES[name])
            with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                args, kwargs = tree_map(lambda x: on_cuda(x), plain)
                try:
                    said = _core.infer(row, args, kwargs)
                except (TypeError, RuntimeError):
                    continue
                if said["status"] != "OK":
                    continue
                try:
                    outs = opcalls.tensors(CALLABLES[row](*args, **kwargs)) or [args[0]]
                except Exception:  # what a fake tensor cannot do is not the matter here
                    continue
            names = [str(out.dtype).removeprefix("torch.") for out in outs]
            text = opcalls.describe(row, *plain)
            assert [str(out[0]).removeprefix("torch.") for out in said["outs"]] == names, text


def on_cuda(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # Without gradients: autograd would ask the driver for a stream.
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cuda")
