# SPDX-License-Identifier: Apache-2.0
"""Calls for the rows that know images: convolutions, pooling, resizing, patches, grids."""

from __future__ import annotations

from samples_kit import Sample, call, f, i
from samples_nn import Make, last, varied


def convs(n: int) -> Make:
    sizes = (5, 4, 5)[:n]

    def make() -> list[Sample]:
        kernel = (3,) * n
        made = [
            call(f(4, 2, *sizes), f(3, 2, *kernel), f(3)),
            call(f(6, 2, *sizes), f(2, 1, *kernel), None, 2, 1, 1, 2),
            call(f(2, *sizes), f(3, 2, *kernel), f(3), padding="same"),
            call(f(4, 2, *sizes), f(3, 2, *(2,) * n), padding="same"),
            call(f(4, 2, *sizes), f(3, 2, *(2,) * n), None, (1,) * n, "valid", 2),
            call(f(4, 1, *(1,) * n), f(2, 1, *(1,) * n)),
            call(f(2, 4, *sizes).transpose(0, 1), f(3, 2, *kernel)),
        ]
        if n == 2:
            made += [
                call(last(4, 2, 5, 4), f(3, 2, 3, 3)),
                call(f(4, 2, 5, 4), last(3, 2, 3, 3)),
                call(last(4, 3, 1, 1), f(2, 3, 1, 1)),
            ]
        return made

    return varied(make)


def transposed_convs(n: int) -> Make:
    def make() -> list[Sample]:
        kernel = (3,) * n
        return [
            call(f(4, 2, *(3,) * n), f(2, 3, *kernel), f(3)),
            call(f(6, 2, *(2,) * n), f(2, 1, *kernel), None, 2, 1, 1, 2),
            call(f(2, *(3,) * n), f(2, 3, *kernel), f(3), dilation=2),
        ]

    return varied(make)


def pools(n: int, *, with_dilation: bool) -> Make:
    def make() -> list[Sample]:
        sizes = (6, 5, 4)[:n]
        made = [
            call(f(4, 2, *sizes), 2),
            call(f(2, *sizes), (2,) * n, []),
            call(f(6, 2, *sizes), 3, 2, 1, ceil_mode=True),
            call(f(4, 2, *sizes), 2, stride=1),
        ]
        if with_dilation:
            made.append(call(f(4, 2, *sizes), 2, 1, 0, 2))
        if n == 2:
            made += [call(last(4, 2, 6, 5), 2), call(f(2, 4, 6, 5).transpose(0, 1), 2)]
        return made

    return varied(make)


def adaptive(n: int) -> Make:
    def make() -> list[Sample]:
        sizes = (6, 5, 4)[:n]
        made = [call(f(4, 2, *sizes), size) for size in (1, 2, [3] * n)]
        return [*made, call(f(2, *sizes), 2), call(f(6, 1, *sizes), output_size=(2,) * n)]

    return varied(make)


def upsampled(n: int, *between: bool) -> Make:
    def make() -> list[Sample]:
        sizes = (4, 3, 2)[:n]
        made = [
            call(f(4, 2, *sizes), [5] * n, *between, None),
            call(f(6, 1, *sizes), None, *between, [2.0] * n),
            call(f(4, 2, *sizes), None, *between, [1.3] * n),
            call(f(4, 2, *sizes), None, *between, [2] * n),
        ]
        return [*made, call(last(4, 2, 4, 3), [5, 5], *between, None)] if n == 2 else made

    return varied(make)


def pads() -> list[Sample]:
    amounts = [
        (1, 1),
        (0, 0),
        (-1, 1),
        (-1, 0),
        (0, 0, 1, 1),
        (0, 0, 0, 0, 1, 2),
        (1, 0, 2, 0, 0, 0, 0, 3),
    ]
    made = [call(f(4, 2, 3, 3), amount) for amount in amounts]
    return [
        *made,
        call(f(2, 4).t(), (-1, 0)),
        call(i(4, 3), (1, 1), "constant", 7),
        call(last(4, 2, 3, 3), (1, 1)),
        *(call(f(4, 3, 5), (1, 2), mode) for mode in ("reflect", "replicate", "circular")),
        *(call(f(4, 2, 3, 3), (1, 1, 0, 2), mode) for mode in ("reflect", "replicate", "circular")),
        call(f(6, 5), (1, 1), mode="reflect"),
    ]


def without_gradients(make: Make) -> Make:
    """Those of the samples that need none: with one, the call is recorded as another."""

    def some() -> list[Sample]:
        return [sample for sample in make() if not sample.args[0].requires_grad]

    return some


IMAGES: dict[str, Make] = {
    **{f"conv{n}d": convs(n) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": transposed_convs(n) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": pools(n, with_dilation=False) for n in (1, 2, 3)},
    "max_pool1d": without_gradients(pools(1, with_dilation=True)),
    **{f"max_pool{n}d": pools(n, with_dilation=True) for n in (2, 3)},
    **{f"max_pool{n}d_with_indices": pools(n, with_dilation=True) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": adaptive(n) for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": adaptive(n) for n in (1, 2, 3)},
    **{f"upsample_nearest{n}d": upsampled(n) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": upsampled(n) for n in (1, 2, 3)},
    "upsample_linear1d": upsampled(1, False),
    "upsample_bilinear2d": upsampled(2, True),
    "upsample_bicubic2d": upsampled(2, False),
    "upsample_trilinear3d": upsampled(3, False),
    "_upsample_bilinear2d_aa": upsampled(2, False),
    "_upsample_bicubic2d_aa": upsampled(2, False),
    "pad": varied(pads),
    "constant_pad_nd": varied(lambda: [call(f(4, 3), (1, 1), 2.5), call(f(4, 3), (0, 0, 1, 0))]),
    "pixel_shuffle": varied(
        lambda: [call(f(4, 8, 2, 3), 2), call(f(4, 2, 3), 2), call(last(4, 8, 2, 3), 2)]
    ),
    "pixel_unshuffle": varied(lambda: [call(f(4, 2, 4, 2), 2), call(f(2, 4, 2), 2)]),
    "channel_shuffle": varied(lambda: [call(f(4, 6, 2, 3), 3), call(f(4, 6, 2), 2)]),
    "im2col": varied(
        lambda: [call(f(*s, 6, 5), (2, 3), (1, 1), (0, 1), (1, 2)) for s in ((4, 2), (2,))]
    ),
    "col2im": varied(
        lambda: [call(f(*s, 20), (6, 5), (2, 2), (1, 1), (0, 0), (1, 1)) for s in ((4, 12), (12,))]
    ),
    "grid_sampler": varied(
        lambda: [
            call(f(4, 2, 3, 3), f(4, 2, 3, 2), 0, 0, False),
            call(f(6, 1, 3, 3), f(6, 2, 2, 2), 2, 1, True),
            call(f(4, 2, 3, 3, 3), f(4, 2, 3, 2, 3), 1, 0, False),
        ]
    ),
    "affine_grid_generator": varied(
        lambda: [call(f(4, 2, 3), [4, 2, 3, 3], False), call(f(6, 3, 4), (6, 2, 3, 3, 2), True)]
    ),
}
