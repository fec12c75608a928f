"""Calls for every row of ops.def, small enough to be cut in every way. A row without one fails test_ops.

The first dim is the batch: 4 rows, a number that no other size shares where it matters, and 6 where it is merged
with others. A sample is made anew for each use, because in-place ops write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

nan, inf = float("nan"), float("inf")


class Sample(NamedTuple):
    """One call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Sample:
    return Sample(args, kwargs)


def f(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers that need a gradient; not a leaf, so that they may be written."""
    return torch.randn(shape, dtype=dtype, requires_grad=True) * 1.0


def p(*shape: int) -> torch.Tensor:
    """Numbers within (0, 1)."""
    return torch.rand(shape, dtype=torch.float64, requires_grad=True) * 0.8 + 0.1


def i(*shape: int, high: int = 4) -> torch.Tensor:
    return torch.randint(0, high, shape)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.5


def each(names: str, make: Callable[[], list[Sample]]) -> dict[str, Callable[[], list[Sample]]]:
    return dict.fromkeys(names.split(), make)


def unary() -> list[Sample]:
    return [call(p(4, 3)), call(p(2, 4, 3).transpose(0, 2)), call(p(4)), call(p(1, 3)), call(p())]


def rounding() -> list[Sample]:
    return [call(f(4, 3)), call(i(4, 3)), call(f(4, 1))]


def bits() -> list[Sample]:
    return [call(i(4, 3)), call(b(4, 3))]


def binary() -> list[Sample]:
    return [
        call(p(4, 3), p(4, 3)),
        call(p(4, 3), p(3)),
        call(p(3), p(4, 3)),
        call(p(4, 1, 3), p(1, 5, 3)),
        call(p(4, 3), p(4, 1)),
        call(p(2, 3, 4).permute(2, 0, 1), p(4, 2, 1)),
        call(p(4, 3), torch.tensor(0.5)),
        call(p(1, 3), p(4, 1)),
        call(p(4, 3).detach(), p(4, 3)),
        call(p(4, 3), p(4, 3).detach()),
    ]


def with_numbers() -> list[Sample]:
    return [*binary(), call(p(4, 3), 2), call(p(4, 3), 0.5), call(i(4, 3) + 1, 2), call(p(1, 3), 2)]


def binary_bits() -> list[Sample]:
    return [call(i(4, 3), i(3)), call(b(4, 3), b(4, 1)), call(i(4, 3), 1)]


def shifts() -> list[Sample]:
    return [call(i(4, 3), i(3)), call(i(4, 3), 1)]


def written() -> list[Sample]:
    """First input as large as the result."""
    return [
        call(p(4, 3), p(4, 3)),
        call(p(4, 3), p(3)),
        call(p(4, 3), p(4, 1)),
        call(p(4, 3), torch.tensor(0.5)),
        call(p(2, 4).t(), p(4, 2)),
        call(p(4, 3).detach(), p(4, 3)),
    ]


def written_numbers() -> list[Sample]:
    return [*written(), call(p(4, 3), 2), call(p(4, 3), 0.5)]


def scaled() -> list[Sample]:
    return [call(p(4, 3)), call(p(4, 3), 0.5), call(p(3, 4).t())]


def thirds() -> list[Sample]:
    return [
        call(p(4, 3), p(4, 3), p(4, 3)),
        call(p(4, 3), p(3), p(4, 1)),
        call(p(4, 3), p(4, 3), torch.tensor(0.5, dtype=torch.float64)),
    ]


def casts() -> list[Sample]:
    return [
        call(f(4, 3)),
        call(i(4, 3)),
        call(f(3, 4).t()),
        call(f(4, 3, dtype=torch.float32)),
        call(b(4, 3)),
        call(f(4, 3), memory_format=torch.preserve_format),
    ]


def likes() -> list[Sample]:
    return [
        call(f(4, 3)),
        call(f(3, 4).t(), dtype=torch.int64),
        call(f(4, 3, 2, 2), memory_format=torch.channels_last),
        call(f(4, 3), device="cpu"),
        call(f(4, 6)[:, ::2]),
    ]


def news() -> list[Sample]:
    return [call(f(4, 3), (4, 2)), call(f(4, 3), 4, 2), call(f(4), (), dtype=torch.bool), call(f(4), 4)]


def reductions() -> list[Sample]:
    return [
        call(f(4, 3)),
        call(f(4, 3, 2), 1),
        call(f(4, 3, 2), 0),
        call(f(4, 3, 2), (0, 2)),
        call(f(4, 3, 2), dim=-1, keepdim=True),
        call(f(4, 3, 2), dim=(0,), keepdim=True),
        call(f(3, 4).t(), 1),
        call(f(4, 6), axis=1),
    ]


def one_dim() -> list[Sample]:
    return [
        call(f(4, 3)),
        call(f(4, 3, 2), 1),
        call(f(4, 3, 2), 0),
        call(f(4, 3, 2), dim=-1, keepdim=True),
        call(f(4), 0),
    ]


def along() -> list[Sample]:
    return [call(f(4, 3, 2), 1), call(f(4, 3, 2), 0), call(f(4, 3, 2), dim=-1), call(f(3, 4).t(), 1)]


def variances() -> list[Sample]:
    return [
        call(f(4, 3)),
        call(f(4, 3), False),
        call(f(4, 3, 2), 1),
        call(f(4, 3, 2), (0, 1), unbiased=False),
        call(f(4, 3, 2), dim=-1, correction=0, keepdim=True),
        call(f(4, 3, 2), [1, 2], True, True),
    ]


def sorts() -> list[Sample]:
    return [call(f(4, 3)), call(f(4, 3, 2), 1, True), call(f(4, 3, 2), dim=0), call(f(4, 3), stable=True)]


def triangles() -> list[Sample]:
    return [call(f(4, 3, 3)), call(f(4, 3, 2), 1), call(f(4, 3), diagonal=-1)]


def splits() -> list[Sample]:
    return [
        call(f(4, 6), [2, 4], 1),
        call(f(8, 3), [4, 4]),
        call(f(12, 3), [4, 8], dim=0),
        call(f(4, 3), [1, 3]),
    ]


def swaps() -> list[Sample]:
    return [call(f(4, 3, 2), 0, 1), call(f(4, 3, 2), -1, 1), call(f(4, 3), 0, 0), call(f(3, 4), 0, -1)]


def gathers() -> list[Sample]:
    return [
        call(f(4, 5), 1, i(4, 3)),
        call(f(6, 5), 1, i(4, 3)),
        call(f(4, 5), 0, i(4, 5)),
        call(f(5, 3), 0, i(4, 3)),
        call(f(4, 5, 2), dim=-2, index=i(4, 3, 2)),
        call(f(1, 5), 1, i(1, 3)),
    ]


def scatters() -> list[Sample]:
    return [
        call(f(4, 5), 1, i(4, 3), f(4, 3)),
        call(f(4, 5), 1, i(4, 3), f(4, 5)),
        call(f(6, 5), 1, i(4, 3), f(4, 3)),
        call(f(5, 3), 0, i(4, 3), f(4, 3)),
        call(f(4, 5, 2), dim=1, index=i(4, 3, 2), src=f(4, 3, 2)),
    ]


def scatters_values() -> list[Sample]:
    return [*scatters(), call(f(4, 5), 1, i(4, 3), 1.5), call(f(4, 5), 1, i(4, 1), value=0)]


def index_adds() -> list[Sample]:
    return [
        call(f(4, 5), 1, i(3), f(4, 3)),
        call(f(5, 3), 0, i(4), f(4, 3)),
        call(f(4, 5, 2), dim=-2, index=torch.tensor([0, 2]), source=f(4, 2, 2)),
    ]


def index_fills() -> list[Sample]:
    return [call(f(4, 5), 1, i(3), 2.0), call(f(4, 5), 0, i(2), 1), call(f(4, 5), -1, i(3), f())]


def items() -> list[Sample]:
    rows = torch.arange(4)
    return [
        call(f(4, 5), slice(None)),
        call(f(4, 5), (slice(None), 0)),
        call(f(4, 5, 3), (slice(None), slice(1, -1), None)),
        call(f(4, 5), (slice(0, 4), slice(None, None, 2))),
        call(f(4, 5), slice(None, 4)),
        call(f(8, 5), slice(None, 4)),
        call(f(8, 5), slice(4, None)),
        call(f(8, 5), slice(-4, None)),
        call(f(8, 5), slice(0, 100)),
        call(f(4, 5), slice(None, 2)),
        call(f(4, 5), 0),
        call(f(4, 5), None),
        call(f(4, 5, 3), (..., -1)),
        call(f(4, 5, 3), (..., None, slice(2), 0)),
        call(f(4, 5), ()),
        call(f(4, 5), (rows, i(4))),
        call(f(4, 5, 3), (rows, i(4))),
        call(f(4, 5, 3), (rows[:, None], i(4, 2))),
        call(f(4, 5, 3), (rows[:, None], i(2))),
        call(f(4, 5, 3), (rows, slice(1, 3), i(4, high=3))),
        call(f(4, 5, 3), (rows, -1)),
        call(f(4, 6), (rows[:, None, None, None], torch.arange(6))),
        call(f(4, 5), (torch.tensor([3, 2, 1, 0]), i(4))),
        call(f(5, 3), i(4)),
        call(f(5, 3), i(4, 2)),
        call(f(4, 5), (slice(None), i(4))),
        call(f(4, 5), (slice(None), [0, 2])),
        call(f(4, 5), ([0, 1, 2, 3], i(4))),
        call(f(4, 5), [1, 0]),
        call(f(4, 5, 3, 2), (slice(None), i(4), slice(None), i(4, high=2))),
        call(f(4, 5, 3, 2), (slice(None), i(4), i(4, high=3))),
        call(f(4, 5, 3).permute(2, 0, 1), (slice(None), slice(None), i(2))),
        call(f(4, 5), (slice(None), torch.tensor(1))),
        call(f(1, 5), (torch.arange(1), i(1))),
        call(f(1, 5), slice(0, 1)),
        call(f(4, 5), i(4, 3).to(torch.int32)),
    ]


def assignments() -> list[Sample]:
    rows = torch.arange(4)
    return [
        call(f(4, 5), (slice(None), 0), f(4)),
        call(f(4, 5, 3), (slice(None), slice(1, 3)), f(4, 2, 3)),
        call(f(4, 5, 3), (slice(None), 2), f(3)),
        call(f(4, 5), (slice(None), 2), 0.5),
        call(f(4, 5), slice(None), f(4, 1)),
        call(f(4, 5), slice(0, 4), f(4, 5)),
        call(f(8, 5), slice(4, None), f(4, 5)),
        call(f(8, 5), slice(0, 4), f(4, 5)),
        call(f(4, 5), (rows, i(4)), f(4)),
        call(f(4, 5), (rows, i(4)), 1.0),
        call(f(4, 5), 0, f(5)),
        call(f(4, 5), b(4, 5), 0.0),
        call(f(4, 5), b(4), 0.0),
        call(f(6, 5), i(4), f(4, 5)),
        call(f(4, 5), (..., 1), f(4)),
        call(f(5, 4), (2, ...), f(4)),
        call(f(4, 5), (slice(None), [0, 2]), f(4, 2)),
    ]


SAMPLES: dict[str, Callable[[], list[Sample]]] = {
    # elementwise, one tensor
    **each(
        """abs acos asin atan atanh cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 frac i0 lgamma log
        log10 log1p log2 logit neg positive rad2deg reciprocal rsqrt sgn sigmoid sign sin sinc sinh sqrt
        square tan tanh""",
        unary,
    ),
    **each("asinh celu gelu hardshrink hardsigmoid hardswish log_sigmoid mish relu relu6 selu silu", unary),
    **each("softplus softshrink isfinite isinf isnan isneginf isposinf logical_not signbit", unary),
    **each("ceil floor round trunc", rounding),
    "acosh": lambda: [call(f(4, 3).exp() + 1), call(i(4, 3))],
    "bitwise_not": bits,
    **each("elu leaky_relu", scaled),
    "hardtanh": lambda: [call(f(4, 3)), call(f(4, 3), 0, 0.5), call(i(4, 3), 0, 2)],
    "nan_to_num": lambda: [call(f(4, 3) / 0), call(f(4, 3), nan=0.0), call(i(4, 3))],
    "threshold": lambda: [call(f(4, 3), 0.1, 20), call(i(4, 3), 1, 2)],
    # elementwise, two and more
    **each("add div eq ge gt le lt mul ne remainder fmod floor_divide pow rsub sub xlogy", with_numbers),
    **each("atan2 copysign fmax fmin hypot logaddexp maximum minimum", binary),
    **each("logical_and logical_or logical_xor", binary),
    **each("bitwise_and bitwise_or bitwise_xor", binary_bits),
    **each("bitwise_left_shift bitwise_right_shift", shifts),
    **each("addcdiv addcmul", lambda: [*thirds(), call(p(4, 3), p(3), p(4, 3), value=2)]),
    "lerp": lambda: [*thirds(), call(p(4, 3), p(4, 3), 0.3)],
    "clamp": lambda: [
        call(f(4, 3), 0, 1),
        call(f(4, 3), min=-0.5),
        call(f(4, 3), p(3), p(4, 3)),
        call(i(4, 3), 0.5),
    ],
    **each("clamp_max clamp_min", lambda: [call(f(4, 3), 0.5), call(f(4, 3), p(4, 1)), call(i(4, 3), 1)]),
    "where": lambda: [
        call(b(4, 3), f(4, 3), f(3)),
        call(b(4, 1), 1.0, f(4, 3)),
        call(b(4, 3), i(4, 3), 0.5),
        call(b(1, 3), f(4, 3), torch.tensor(0.0)),
        call(b(4, 3), 1, 2),
    ],
    "Tensor_where": lambda: [call(f(4, 3), b(4, 3), f(3)), call(f(3), b(4, 1), 0), call(b(4), b(4), 1)],
    "masked_fill": lambda: [
        call(f(4, 3), b(4, 3), 0.0),
        call(f(4, 3), b(3), -inf),
        call(f(3), b(4, 1), 1),
        call(f(4, 3), b(4, 3), f()),
        call(f(3, 4).t(), b(4, 3), 0),
    ],
    # elementwise, in place
    **each(
        """abs_ acos_ asin_ asinh_ atan_ atanh_ celu_ cos_ cosh_ deg2rad_ digamma_ erf_ erfc_ erfinv_ exp2_ exp_
        expm1_ frac_ gelu_ hardsigmoid_ hardswish_ hardtanh_ i0_ lgamma_ log10_ log1p_ log2_ log_ logit_
        logical_not_ mish_ nan_to_num_ neg_ rad2deg_ reciprocal_ relu6_ relu_ rsqrt_ selu_ sgn_ sigmoid_ sign_
        silu_ sin_ sinc_ sinh_ sqrt_ square_ tan_ tanh_ zero_""",
        unary,
    ),
    **each("ceil_ floor_ round_ trunc_", rounding),
    "acosh_": lambda: [call(f(4, 3).exp() + 1)],
    "bitwise_not_": bits,
    **each("elu_ leaky_relu_", scaled),
    "threshold_": lambda: [call(f(4, 3), 0.1, 20), call(i(4, 3), 1, 2)],
    **each("add_ div_ eq_ ge_ gt_ le_ lt_ mul_ ne_ remainder_ fmod_ floor_divide_", written_numbers),
    **each("pow_ sub_ xlogy_", written_numbers),
    **each("atan2_ copysign_ hypot_ logical_and_ logical_or_ logical_xor_", written),
    **each("bitwise_and_ bitwise_or_ bitwise_xor_ __iand__ __ior__ __ixor__", binary_bits),
    **each("bitwise_left_shift_ bitwise_right_shift_", shifts),
    **each("addcdiv_ addcmul_", lambda: [*thirds(), call(p(4, 3), p(3), p(4, 3), value=2)]),
    "lerp_": lambda: [*thirds(), call(p(4, 3), p(4, 3), 0.3)],
    "clamp_": lambda: [call(f(4, 3), 0, 1), call(f(4, 3), min=-0.5), call(f(4, 3), p(3), p(4, 3))],
    **each("clamp_max_ clamp_min_", lambda: [call(f(4, 3), 0.5), call(f(4, 3), p(4, 1))]),
    "copy_": lambda: [call(f(4, 3), f(4, 3)), call(f(4, 3), f(3)), call(i(4, 3), f(4, 1))],
    "fill_": lambda: [call(f(4, 3), 2), call(f(4, 3), f()), call(i(4, 3), 1)],
    "masked_fill_": lambda: [call(f(4, 3), b(4, 3), 0.0), call(f(4, 3), b(3), f()), call(f(4), b(4), 1)],
    **each("tril_ triu_", triangles),
    # casts and copies
    **each("bfloat16 bool byte char double float half int long short", casts),
    "clone": lambda: [
        call(f(4, 3)),
        call(f(3, 4).t()),
        call(f(3, 4).t(), memory_format=torch.contiguous_format),
        call(f(4, 6)[:, ::2]),
        call(f(4, 3, 2, 2), memory_format=torch.channels_last),
        call(f(4, 1).expand(4, 3)),
    ],
    "contiguous": lambda: [
        call(f(4, 3)),
        call(f(3, 4).t()),
        call(f(4, 1, 3)[:, :, ::2]),
        call(f(4, 3, 2, 2), memory_format=torch.channels_last),
        call(f(4, 3, 2, 2).to(memory_format=torch.channels_last), memory_format=torch.channels_last),
    ],
    "to": lambda: [
        call(f(4, 3), torch.float64),
        call(f(4, 3), torch.float32),
        call(f(4, 3), "cpu"),
        call(f(4, 3), torch.device("cpu"), torch.int64),
        call(f(4, 3), torch.float64, False, True),
        call(f(4, 3), f(2, dtype=torch.float32)),
        call(i(4, 3), f(4, 3)),
        call(f(4, 3), dtype=torch.bool, copy=True),
        call(f(4, 3), device="cpu", non_blocking=True),
        call(f(4, 3, 2, 2), memory_format=torch.channels_last),
    ],
    "type": lambda: [call(f(4, 3), torch.float64), call(f(4, 3), torch.int32)],
    "type_as": lambda: [call(f(4, 3), f(4, 3)), call(i(4, 3), f(7)), call(f(2), f(4, dtype=torch.float32))],
    # new values from old
    **each("empty_like ones_like zeros_like", likes),
    "full_like": lambda: [call(f(4, 3), 2), call(i(4, 3), 0.5, dtype=torch.float64), call(f(3, 4).t(), 1.0)],
    **each("new_empty new_ones new_zeros", news),
    "new_full": lambda: [call(f(4, 3), (4, 2), 1.5), call(i(4), (), 2, dtype=torch.float64)],
    # views
    "broadcast_tensors": lambda: [
        call([f(4, 3), f(3)]),
        call([f(4, 1), f(1, 3)]),
        call([f(4, 3), i(4, 3)]),
        call([f(4, 1, 3), i(5, 3), f()]),
    ],
    "detach": lambda: [call(f(4, 3)), call(i(4)), call(f(3, 4).t())],
    "diagonal": lambda: [call(f(4, 3, 3), 0, 1, 2), call(f(4, 3)), call(f(4, 3, 2), offset=-1, dim1=-2, dim2=2)],
    "expand": lambda: [
        call(f(4, 1), 4, 3),
        call(f(4, 1), -1, 3),
        call(f(4, 1), (2, 4, 3)),
        call(f(1, 3), 4, 3),
        call(f(1, 3), 1, -1),
        call(f(3), 4, 3),
        call(f(), 4),
        call(f(4, 1, 2), (4, 5, 2)),
        call(f(8, 1), 8, 3),
    ],
    "expand_as": lambda: [call(f(4, 1), f(4, 3)), call(f(3), f(4, 3)), call(f(1, 3), i(4, 3))],
    "flatten": lambda: [
        call(f(4, 3, 2)),
        call(f(4, 3, 2), 1),
        call(f(4, 3, 2), 0, 1),
        call(f(3, 4, 2), end_dim=-2),
        call(f(4), 0),
        call(f(4, 3), 1),
        call(f(3, 4).t()),
        call(f()),
    ],
    "movedim": lambda: [call(f(4, 3, 2), 0, -1), call(f(4, 3, 2), (0, 2), (1, 0)), call(f(4, 3, 2), [], [])],
    "narrow": lambda: [
        call(f(4, 6), 1, 2, 3),
        call(f(4, 6), 0, 1, 2),
        call(f(8, 3), 0, 4, 4),
        call(f(8, 3), 0, 0, 4),
        call(f(4, 6), -1, -3, 2),
        call(f(4, 6), dim=0, start=0, length=4),
    ],
    "permute": lambda: [
        call(f(4, 3, 2), 2, 0, 1),
        call(f(4, 3, 2), (0, 2, 1)),
        call(f(4, 3), (-1, 0)),
        call(f(4, 3), dims=(0, 1)),
    ],
    "ravel": lambda: [call(f(4, 3)), call(f(3, 4).t()), call(f(4, 6)[:, ::2]), call(f())],
    **each(
        "reshape view",
        lambda: [
            call(f(4, 6), 4, 2, 3),
            call(f(4, 6), -1, 3),
            call(f(4, 6), (24,)),
            call(f(4, 6), 8, 3),
            call(f(4, 6), 2, 2, 6),
            call(f(4, 6), (4, -1)),
            call(f(4, 6), 4, -1, 2),
            call(f(3, 4, 2), -1, 2),
            call(f(3, 4, 2), 12, 2),
            call(f(4, 2, 3, 2), 8, 6),
            call(f(1, 6), 1, 2, 3),
            call(f(1, 6), 6),
            call(f(4, 6), torch.Size([4, 6])),
            call(f(6, 4), 2, 3, 4),
            call(f(4), 4),
            call(f(4), (2, 2)),
        ],
    ),
    **each(
        "reshape_as view_as",
        lambda: [call(f(4, 6), f(8, 3)), call(f(4, 6), i(24)), call(f(4, 6), f(4, 2, 3)), call(f(1, 6), f(6))],
    ),
    "select": lambda: [call(f(4, 3), 1, 0), call(f(4, 3), 0, -1), call(f(4, 3, 2), dim=-1, index=1)],
    "squeeze": lambda: [
        call(f(4, 1, 3)),
        call(f(4, 1, 3), 1),
        call(f(4, 1, 3), 0),
        call(f(4, 1, 3, 1), (1, 3)),
        call(f(1, 3)),
        call(f(4, 3), -1),
        call(f(4, 1), dim=(0, 1)),
    ],
    **each("swapaxes swapdims transpose", swaps),
    "t": lambda: [call(f(4, 3)), call(f(4)), call(f())],
    "unflatten": lambda: [
        call(f(4, 6), 1, (2, 3)),
        call(f(8, 3), 0, (4, 2)),
        call(f(8, 3), 0, (2, 4)),
        call(f(8, 3), 0, (-1, 2)),
        call(f(8, 3), 0, (4, -1)),
        call(f(4, 6), -1, [3, -1]),
    ],
    "unfold": lambda: [call(f(4, 6), 1, 3, 2), call(f(4, 6), 0, 2, 2), call(f(3, 4, 5), -1, 5, 1)],
    "unsqueeze": lambda: [call(f(4, 3), 0), call(f(4, 3), -1), call(f(4, 3), dim=1), call(f(3, 4).t(), 2)],
    # joining, parting, repeating
    "cat": lambda: [
        call([f(4, 3), f(4, 2)], 1),
        call([f(4, 3), f(4, 3)]),
        call((f(4, 3), f(8, 3)), dim=0),
        call([f(4, 3), f(1, 3)]),
        call([f(4, 3), i(4, 2)], -1),
        call([f(3, 4).t(), f(4, 2)], 1),
        call([f(4, 2, 3)], axis=1),
    ],
    "stack": lambda: [
        call([f(4, 3), f(4, 3)]),
        call([f(4, 3), f(4, 3)], 1),
        call([f(4), i(4), f(4)], dim=-1),
        call([f(3, 4).t(), f(4, 3)], 2),
    ],
    "split": lambda: [
        *splits(),
        call(f(4, 6), 2, 1),
        call(f(8, 3), 4),
        call(f(4, 3), 4),
        call(f(4, 3), 100),
        call(f(4, 3), 3),
        call(f(12, 3), 8, dim=0),
    ],
    "split_with_sizes": splits,
    "chunk": lambda: [call(f(4, 6), 2, 1), call(f(4, 5), 3, dim=-1), call(f(8, 3), 2), call(f(4, 3), 3)],
    "unbind": lambda: [call(f(4, 3), 1), call(f(4, 3)), call(f(4, 2, 3), dim=-2)],
    "repeat": lambda: [call(f(4, 3), 1, 2), call(f(4, 3), 2, 1), call(f(4, 3), (3, 1, 2)), call(f(4), 2)],
    "tile": lambda: [call(f(4, 3), (2,)), call(f(4, 3), (2, 1)), call(f(4, 3), dims=(2, 1, 1))],
    "repeat_interleave": lambda: [
        call(f(4, 3), 2, 0),
        call(f(4, 3), 2, dim=1),
        call(f(4, 3), 3),
        call(f(2, 4).t(), 2, 0),
    ],
    "roll": lambda: [call(f(4, 3), 1, 1), call(f(4, 3), 1, 0), call(f(4, 3), 1), call(f(4, 3, 2), (1, 2), (1, 2))],
    "flip": lambda: [call(f(4, 3), 1), call(f(4, 3), (0,)), call(f(4, 3, 2), [1, 2]), call(f(3, 4).t(), 1)],
    **each("tril triu", triangles),
    # reductions
    "sum": lambda: [*reductions(), call(i(4, 3)), call(b(4, 3), 1), call(f(4, 3), dtype=torch.float32)],
    "nansum": reductions,
    "mean": lambda: [*reductions(), call(i(4, 3), 1, dtype=torch.float64)],
    "amax": lambda: [*reductions(), call(i(4, 3), 1)],
    "amin": reductions,
    "prod": lambda: [*one_dim(), call(i(4, 3) + 1)],
    **each("max min", lambda: [*one_dim(), call(f(4, 3), f(3)), call(i(4, 3), other=i(4, 1))]),
    **each("all any", lambda: [call(b(4, 3)), call(b(4, 3), 1), call(f(4, 3), 0, True), call(b(4, 3, 2), (1, 2))]),
    "count_nonzero": lambda: [call(i(4, 3)), call(i(4, 3), 1), call(b(4, 3, 2), dim=(0, 1))],
    **each("argmax argmin", lambda: [call(f(4, 3)), call(f(4, 3), 1), call(f(4, 3), 0), call(f(4, 3), -1, True)]),
    "logsumexp": lambda: [call(f(4, 3), 1), call(f(4, 3), 0), call(f(4, 3, 2), (0, 2), True)],
    **each("std std_mean var var_mean", variances),
    "linalg_vector_norm": lambda: [
        call(f(4, 3)),
        call(f(4, 3), 2, 1),
        call(f(4, 3), 1, 0),
        call(f(4, 3), inf, -1, True),
        call(f(4, 3), inf, 0),
        call(f(4, 3), 0),
    ],
    **each("median nanmedian", one_dim),
    "kthvalue": lambda: [call(f(4, 3), 2), call(f(4, 3), 1, 0), call(f(4, 3), 2, dim=1, keepdim=True)],
    "mode": lambda: [call(f(4, 3)), call(f(4, 3), 0), call(i(4, 3), 1, True)],
    # along a dim
    **each("cummax cummin cumprod cumsum logcumsumexp", along),
    **each("argsort sort", sorts),
    "topk": lambda: [call(f(4, 3), 2), call(f(4, 3), 2, 0), call(f(4, 3, 2), k=1, dim=1, largest=False)],
    # indexing
    "__getitem__": items,
    "__setitem__": assignments,
    "gather": gathers,
    **each("scatter scatter_", scatters_values),
    **each("scatter_add scatter_add_", scatters),
    "index_select": lambda: [call(f(4, 5), 1, i(3)), call(f(5, 3), 0, i(4)), call(f(4, 5, 2), dim=-2, index=i(6))],
    **each("index_add index_add_", index_adds),
    **each(
        "index_copy index_copy_",
        lambda: [call(f(4, 5), 1, torch.tensor([0, 2]), f(4, 2)), call(f(5, 3), 0, torch.tensor([1, 0]), f(2, 3))],
    ),
    **each("index_fill index_fill_", index_fills),
    "take_along_dim": lambda: [
        call(f(4, 5), i(4, 3), 1),
        call(f(4, 5), i(1, 3), 1),
        call(f(1, 5), i(4, 3), dim=1),
        call(f(5, 3), i(4, 1), 0),
    ],
}


def samples_of(row: str) -> Iterator[Sample]:
    """Make the calls of a row."""
    yield from SAMPLES[row]()
