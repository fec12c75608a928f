# SPDX-License-Identifier: Apache-2.0
"""What real tensors say of themselves: through torch's C ABI the same as through attributes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import koila
from binding_kit import batch, in_a_child, is_pending
from chunked import split
from koila import _core
from test_infer_random import tensors

core: Any = _core

DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()
DTYPES += ["complex64", "complex128"]
OTHER_DTYPES = "uint16 uint32 uint64 float8_e4m3fn float8_e5m2".split()


class Mine(Tensor):
    """A subclass that adds nothing."""


class Wrapped(Tensor):
    """A subclass without memory, as of torch's wrappers."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("nothing is computed for metadata")


def wrapped(*shape: int, requires_grad: bool = False) -> Any:
    make: Any = torch.Tensor._make_wrapper_subclass
    return make(Wrapped, shape, dtype=torch.float32, requires_grad=requires_grad)


def by_attributes(x: Tensor) -> Any:
    return (x.dtype, x.shape, x.stride(), x.requires_grad, 0)


def dense(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


MADE: dict[str, Callable[[], Tensor]] = {
    "no dims": lambda: torch.tensor(1.5),
    "no elements": lambda: dense(3, 0, 2),
    "eight dims": lambda: dense(*(1, 2) * 4),
    "transposed": lambda: dense(3, 5).t(),
    "with gaps": lambda: dense(6, 8)[::2, 1::3],
    "offset": lambda: dense(9)[4:],
    "expanded": lambda: dense(3, 1).expand(3, 4),
    "windows": lambda: dense(9).unfold(0, 3, 1),
    "flipped": lambda: dense(3, 4).flip(0),
    "channels last": lambda: dense(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "as_strided": lambda: dense(20).as_strided((2, 3), (1, 7), 2),
    "leaf": lambda: dense(3).requires_grad_(),
    "graph": lambda: dense(3).requires_grad_() * 2,
    "parameter": lambda: nn.Parameter(dense(3, 2)),
    "frozen": lambda: nn.Parameter(dense(3, 2), requires_grad=False),
    "buffer": lambda: nn.Buffer(dense(3, 2)),
    "conjugated": lambda: dense(3, 2).to(torch.complex128).conj(),
    "negated": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "inference": lambda: inference(),
    "subclass": lambda: dense(3, 2).as_subclass(Mine),
    "subclass with a gradient": lambda: dense(3, 2).requires_grad_().as_subclass(Mine),
    "wrapper": lambda: wrapped(3, 2),
    "wrapper with a gradient": lambda: wrapped(3, 2, requires_grad=True),
    "very large": lambda: torch.zeros(1, dtype=torch.bool).expand(2**40, 3),
}


def inference() -> Tensor:
    with torch.inference_mode():
        return dense(3, 2)


@pytest.mark.parametrize("name", MADE)
def test_tensors_say_what_their_attributes_say(name: str) -> None:
    x = MADE[name]()
    wanted = by_attributes(x)
    assert core.describe(x) == wanted
    assert core.describe(koila.lazy(x)) == wanted
    assert core.describe(x)[2] == x.stride()


@given(tensors())
def test_whatever_the_layout(x: Tensor) -> None:
    assert core.describe(x) == by_attributes(x)


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name: str) -> None:
    dtype = getattr(torch, name)
    x = torch.zeros(4, 3, dtype=dtype)
    assert core.describe(x) == (dtype, torch.Size([4, 3]), (3, 1), False, 0)
    made = koila.lazy(x)[:, 1:]
    assert is_pending(made)
    assert made.dtype == dtype
    assert core.describe(made)[0] == dtype


@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_dtypes_without_a_name_here(name: str) -> None:
    """Nothing is recorded on them: all that reads them runs at once, and is right."""
    dtype = getattr(torch, name)
    x = torch.zeros(4, 3).to(dtype)
    assert core.describe(x) is None
    lazy = koila.lazy(x)
    assert (lazy.dtype, lazy.shape, lazy.requires_grad) == (dtype, (4, 3), False)
    assert not is_pending(lazy[:, 1:])
    assert lazy[:, 1:].dtype == dtype
    assert lazy.to(torch.complex64).tolist() == x.to(torch.complex64).tolist()


def quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(4, 3), 0.5, 0, torch.qint8)


def sparse_csr() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return batch().to_sparse_csr()


UNDESCRIBED: dict[str, Callable[[], Tensor]] = {
    "nine dims": lambda: dense(*(1,) * 9),
    "sparse": lambda: batch().to_sparse(),
    "sparse rows": sparse_csr,
    "mkldnn": lambda: batch().float().to_mkldnn(),
    "quantized": quantized,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
}


@pytest.mark.parametrize("name", UNDESCRIBED)
def test_tensors_without_a_description(name: str) -> None:
    x = UNDESCRIBED[name]()
    assert core.describe(x) is None
    assert core.leaves_of(x) == []


@pytest.mark.parametrize("name", ["nine dims", "sparse"])
def test_a_call_that_reads_one_runs_at_once(name: str) -> None:
    other = UNDESCRIBED[name]()
    use: Callable[[Any], Any] = {
        "nine dims": lambda x: x * other,
        "sparse": lambda x: x @ other.t(),
    }[name]
    made = use(koila.lazy(batch()) * 2)
    assert not is_pending(made)
    assert made.tolist() == use(batch() * 2).tolist()


@pytest.mark.parametrize("name", ["conjugated", "negated"])
def test_bits_that_no_metadata_says(name: str) -> None:
    """The numbers are the tensor's; in chunks, too."""
    x = torch.view_as_complex(batch()[:, :2].contiguous()).conj()
    if name == "negated":
        x = x.imag
    assert x.is_neg() if name == "negated" else x.is_conj()
    for chunks in (1, 2):
        with split(chunks):
            lazy = koila.lazy(x)
            assert (lazy * 2 + x).tolist() == (x * 2 + x).tolist()
            assert lazy.sum().tolist() == pytest.approx(x.sum().tolist(), rel=1e-6)
            assert lazy.tolist() == x.tolist()


def test_the_gradient_flag_is_the_one_of_now() -> None:
    x = dense(3)
    for flag in (True, False, True):
        x.requires_grad_(flag)
        assert core.describe(x)[3] is flag
    with torch.no_grad():
        assert core.describe(x)[3] is True
        assert core.describe(x * 2)[3] is False


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_default_dtype_is_the_one_of_now(dtype: torch.dtype) -> None:
    """Where ints become floats."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        x = torch.arange(12).view(4, 3)
        made = koila.lazy(x) / 2
        assert is_pending(made)
        assert made.dtype == (x / 2).dtype == dtype
        assert made.tolist() == (x / 2).tolist()
        assert (koila.lazy(x) * 1.5).dtype == dtype
    finally:
        torch.set_default_dtype(before)


def test_devices_are_numbered_as_they_are_met() -> None:
    """The CPU is number 0; all others come by and by, and keep their number."""

    def work() -> None:
        x = dense(3, 2).to("meta")
        number = core.describe(x)[4]
        assert number > 0
        assert core.describe(dense(3))[4] == 0
        assert core.describe(x * 2) == (x.dtype, x.shape, x.stride(), False, number)
        lazy = koila.lazy(x) * 2
        assert lazy.device.type == "meta"
        assert koila.lazy(dense(3, 2)).to("meta").device == x.device
        assert (koila.lazy(dense(3, 2)) * 2).device == torch.device("cpu")

    in_a_child(work)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_devices_by_name(device: Any) -> None:
    made = (koila.lazy(batch()) * 2).to(device)
    wanted = (batch() * 2).to(device)
    assert made.device == wanted.device
    assert made.tolist() == wanted.tolist()


def test_no_such_device() -> None:
    """Nor is there an accelerator of that number: it is not the CPU."""
    for device in ("nowhere", "cuda:x", 10**6):
        with pytest.raises(Exception, match=r".") as eagerly:
            batch().to(device)
        with pytest.raises(type(eagerly.value)):
            koila.lazy(batch()).to(device)
