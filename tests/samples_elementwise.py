# SPDX-License-Identifier: Apache-2.0
"""Calls for the elementwise rows; see samples.py."""

from __future__ import annotations

from collections.abc import Callable

import torch

from samples_kit import Sample, b, call, each, f, i, inf, p


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


SAMPLES: dict[str, Callable[[], list[Sample]]] = {
    # elementwise, one tensor
    **each(
        """abs acos asin atan atanh cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1
        frac i0 lgamma log log10 log1p log2 logit neg positive rad2deg reciprocal rsqrt
        sgn sigmoid sign sin sinc sinh special_entr special_log_ndtr sqrt square tan tanh""",
        unary,
    ),
    **each(
        "asinh celu gelu hardshrink hardsigmoid hardswish log_sigmoid mish relu relu6 selu silu",
        unary,
    ),
    **each("softplus softshrink isinf isnan isneginf isposinf logical_not signbit", unary),
    **each("ceil floor round trunc", rounding),
    "acosh": lambda: [call(f(4, 3).exp() + 1), call(i(4, 3))],
    "bitwise_not": bits,
    **each("elu leaky_relu", scaled),
    "hardtanh": lambda: [call(f(4, 3)), call(f(4, 3), 0, 0.5), call(i(4, 3), 0, 2)],
    "nan_to_num": lambda: [call(f(4, 3) / 0), call(f(4, 3), nan=0.0), call(i(4, 3))],
    "threshold": lambda: [call(f(4, 3), 0.1, 20), call(i(4, 3), 1, 2)],
    # elementwise, two and more
    **each(
        "add div eq ge gt le lt mul ne remainder fmod floor_divide pow rsub sub xlogy", with_numbers
    ),
    "special_xlog1py": with_numbers,
    **each("atan2 copysign fmax fmin hypot logaddexp logaddexp2 maximum minimum", binary),
    **each("complex polar", lambda: [call(f(4, 3), f(4, 3)), call(f(4, 3), f(4, 1))]),
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
    **each(
        "clamp_max clamp_min",
        lambda: [call(f(4, 3), 0.5), call(f(4, 3), p(4, 1)), call(i(4, 3), 1)],
    ),
    "where": lambda: [
        call(b(4, 3), f(4, 3), f(3)),
        call(b(4, 1), 1.0, f(4, 3)),
        call(b(4, 3), i(4, 3), 0.5),
        call(b(1, 3), f(4, 3), torch.tensor(0.0)),
        call(b(4, 3), 1, 2),
    ],
    "Tensor_where": lambda: [
        call(f(4, 3), b(4, 3), f(3)),
        call(f(3), b(4, 1), 0),
        call(b(4), b(4), 1),
    ],
    "masked_fill": lambda: [
        call(f(4, 3), b(4, 3), 0.0),
        call(f(4, 3), b(3), -inf),
        call(f(3), b(4, 1), 1),
        call(f(4, 3), b(4, 3), f()),
        call(f(3, 4).t(), b(4, 3), 0),
    ],
    # elementwise, in place
    **each(
        """abs_ acos_ asin_ asinh_ atan_ atanh_ celu_ cos_ cosh_ deg2rad_ digamma_ erf_
        erfc_ erfinv_ exp2_ exp_ expm1_ frac_ gelu_ hardsigmoid_ hardswish_ hardtanh_
        i0_ lgamma_ log10_ log1p_ log2_ log_ logit_ logical_not_ mish_ nan_to_num_ neg_
        rad2deg_ reciprocal_ relu6_ relu_ rsqrt_ selu_ sgn_ sigmoid_ sign_ silu_ sin_
        sinc_ sinh_ sqrt_ square_ tan_ tanh_ zero_""",
        unary,
    ),
    **each("ceil_ floor_ round_ trunc_", rounding),
    "acosh_": lambda: [call(f(4, 3).exp() + 1)],
    "bitwise_not_": bits,
    **each("elu_ leaky_relu_", scaled),
    "threshold_": lambda: [call(f(4, 3), 0.1, 20), call(i(4, 3), 1, 2)],
    **each(
        "add_ div_ eq_ ge_ gt_ le_ lt_ mul_ ne_ remainder_ fmod_ floor_divide_", written_numbers
    ),
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
    "masked_fill_": lambda: [
        call(f(4, 3), b(4, 3), 0.0),
        call(f(4, 3), b(3), f()),
        call(f(4), b(4), 1),
    ],
}
