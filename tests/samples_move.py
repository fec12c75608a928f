# SPDX-License-Identifier: Apache-2.0
"""Calls for the rows of ops_move.def; see samples.py."""

from __future__ import annotations

from collections.abc import Callable

import torch

from samples_kit import Sample, b, call, each, f, i


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
    return [
        call(f(4, 3), (4, 2)),
        call(f(4, 3), 4, 2),
        call(f(4), (), dtype=torch.bool),
        call(f(4), 4),
    ]


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
    return [
        call(f(4, 3, 2), 0, 1),
        call(f(4, 3, 2), -1, 1),
        call(f(4, 3), 0, 0),
        call(f(3, 4), 0, -1),
    ]


def gathers() -> list[Sample]:
    return [
        call(f(4, 5), 1, i(4, 3)),
        call(f(6, 5), 1, i(4, 3)),
        call(f(4, 5), 0, i(4, 5)),
        call(f(5, 3), 0, i(4, 3)),
        call(f(4, 5, 2), dim=-2, index=i(4, 3, 2)),
        call(f(1, 5), 1, i(1, 3)),
        call(f(4, 5), 1, i(4, 0)),
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


def scatters_reduced() -> list[Sample]:
    names = ("sum", "prod", "mean", "amax", "amin")
    made = [
        call(*sample.args, **sample.kwargs, reduce=name, include_self=name != "amin")
        for name in names
        for sample in scatters()
    ]
    return [*made, call(f(4, 5), 1, i(4, 3), f(4, 3), "mean")]


def indices_reduced() -> list[Sample]:
    return [
        call(*sample.args, **sample.kwargs, reduce=name, include_self=name != "amin")
        for name in ("prod", "mean", "amax", "amin")
        for sample in index_adds()
    ]


def index_fills() -> list[Sample]:
    return [call(f(4, 5), 1, i(3), 2.0), call(f(4, 5), 0, i(2), 1), call(f(4, 5), -1, i(3), f())]


def c(*shape: int) -> torch.Tensor:
    """Complex numbers."""
    return f(*shape, dtype=torch.complex128)


def parts() -> list[Sample]:
    return [call(c(4, 3)), call(c(3, 4).t()), call(c(4)), call(f(4, 3).to(torch.complex64))]


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
        call(f(8, 5), (torch.arange(8), i(8))),
        call(f(8, 6), (torch.arange(8)[:, None, None, None], torch.arange(6))),
        call(f(8, 5, 3), (torch.arange(8), slice(1, 3), i(8, high=3))),
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
        call(f(1, 5), (torch.arange(1), i(1))),
        call(f(1, 5), slice(0, 1)),
        call(f(4, 5), i(4, 3).to(torch.int32)),
    ]


def assignments() -> list[Sample]:
    rows = torch.arange(4)
    return [
        call(f(4, 5), (slice(None), 0), f(4)),
        call(f(4, 5, 3), (slice(None), slice(1, 3)), f(4, 2, 3)),
        call(f(8, 5), (torch.arange(8), i(8)), f(8)),
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
        call(f(4, 5, 3), b(4, 5), f(3)),
        call(f(4, 5, 3), b(4), f(5, 1)),
        call(f(5, 4), b(5), f(4)),
        call(f(6, 5), i(4), f(4, 5)),
        call(f(4, 5), (..., 1), f(4)),
        call(f(5, 4), (2, ...), f(4)),
        call(f(4, 5), (slice(None), [0, 2]), f(4, 2)),
    ]


SAMPLES: dict[str, Callable[[], list[Sample]]] = {
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
        call(
            f(4, 3, 2, 2).to(memory_format=torch.channels_last), memory_format=torch.channels_last
        ),
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
    "to_dense": lambda: [call(f(4, 3)), call(f(4, 3), torch.float32), call(i(4, 3), dtype=None)],
    "type": lambda: [call(f(4, 3), torch.float64), call(f(4, 3), torch.int32)],
    "type_as": lambda: [
        call(f(4, 3), f(4, 3)),
        call(i(4, 3), f(7)),
        call(f(2), f(4, dtype=torch.float32)),
    ],
    # new values from old
    **each("empty_like ones_like zeros_like", likes),
    "full_like": lambda: [
        call(f(4, 3), 2),
        call(i(4, 3), 0.5, dtype=torch.float64),
        call(f(3, 4).t(), 1.0),
    ],
    **each("new_empty new_ones new_zeros", news),
    "new_full": lambda: [call(f(4, 3), (4, 2), 1.5), call(i(4), (), 2, dtype=torch.float64)],
    # views
    **each("conj real", lambda: [*parts(), call(f(4, 3))]),
    "imag": parts,
    "view_as_real": parts,
    "view_as_complex": lambda: [
        call(f(4, 3, 2)),
        call(f(4, 2)),
        call(f(4, 5, 6)[:, :, 2:4]),
        call(f(4, 2, dtype=torch.float32)),
        call(f(3, 2)),
    ],
    "as_leaf": lambda: [call(f(4, 3)), call(f(3, 4).t())],
    "detach": lambda: [call(f(4, 3)), call(i(4)), call(f(3, 4).t())],
    "diagonal": lambda: [
        call(f(4, 3, 3), 0, 1, 2),
        call(f(4, 3)),
        call(f(4, 3, 2), offset=-1, dim1=-2, dim2=2),
    ],
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
        lambda: [
            call(f(4, 6), f(8, 3)),
            call(f(4, 6), i(24)),
            call(f(4, 6), f(4, 2, 3)),
            call(f(1, 6), f(6)),
        ],
    ),
    "select": lambda: [
        call(f(4, 3), 1, 0),
        call(f(4, 3), 0, -1),
        call(f(4, 3, 2), dim=-1, index=1),
    ],
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
    "unsqueeze": lambda: [
        call(f(4, 3), 0),
        call(f(4, 3), -1),
        call(f(4, 3), dim=1),
        call(f(3, 4).t(), 2),
    ],
    # joining, parting, repeating
    "cat": lambda: [
        call([f(4, 3), f(4, 2)], 1),
        call([f(4, 3), f(4, 3)]),
        call((f(4, 3), f(8, 3)), dim=0),
        call([f(4, 3), f(1, 3)]),
        call([f(4, 3), i(4, 2)], -1),
        call([f(3, 4).t(), f(4, 2)], 1),
        call([f(4, 2, 3)], axis=1),
        call([f(0), f(4, 2, 3)], -2),
        call([f(4, 3), torch.tensor([]), f(4, 2)], 1),
        call([torch.tensor([]), f(4, 3), f(4, 3)]),
        call([f(0), f(4)]),
        call([f(4, 3), torch.tensor([]), f(4, 3)], 1),
        call([f(0, dtype=torch.float64), f(4, 3, dtype=torch.float32)], 1),
        call([f(0), f(4, 3, 2, 2).to(memory_format=torch.channels_last)], 1),
        call([torch.tensor([]), i(4, 3)], 1),
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
    "chunk": lambda: [
        call(f(4, 6), 2, 1),
        call(f(4, 5), 3, dim=-1),
        call(f(8, 3), 2),
        call(f(4, 3), 3),
    ],
    "unbind": lambda: [call(f(4, 3), 1), call(f(4, 3)), call(f(4, 2, 3), dim=-2)],
    "unsafe_chunk": lambda: [call(f(4, 6), 3, 1), call(f(4, 5), 2, -1), call(f(4, 3), 2)],
    "unsafe_split": lambda: [call(f(4, 6), 2, 1), call(f(4, 5), 2, dim=-1), call(f(4, 3), 2)],
    "unsafe_split_with_sizes": lambda: [call(f(4, 6), [2, 4], 1), call(f(4, 3), [1, 3])],
    "repeat": lambda: [
        call(f(4, 3), 1, 2),
        call(f(4, 3), 2, 1),
        call(f(4, 3), (3, 1, 2)),
        call(f(4), 2),
    ],
    "repeat_interleave": lambda: [
        call(f(4, 3), 2, 0),
        call(f(4, 3), 2, dim=1),
        call(f(4, 3), 3),
        call(f(2, 4).t(), 2, 0),
    ],
    "roll": lambda: [
        call(f(4, 3), 1, 1),
        call(f(4, 3), 1, 0),
        call(f(4, 3), 1),
        call(f(4, 3, 2), (1, 2), (1, 2)),
    ],
    "flip": lambda: [
        call(f(4, 3), 1),
        call(f(4, 3), (0,)),
        call(f(4, 3, 2), [1, 2]),
        call(f(3, 4).t(), 1),
    ],
    **each("tril tril_ triu triu_", triangles),
    # indexing
    "__getitem__": items,
    "__setitem__": assignments,
    "select_masked": lambda: [
        call(f(4, 4), ~torch.eye(4, dtype=torch.bool), 3),
        call(f(4, 3, 2), torch.tensor([[True, False, True]] * 3 + [[True, True, False]]), 2),
        call(f(4, 3, 2), f(4, 3, 1).argsort(1).argsort(1).expand(4, 3, 2) == 0, 2),
        call(f(4, 3), torch.ones(4, 3, dtype=torch.bool), 3),
    ],
    "searchsorted": lambda: [
        call(f(4, 5).sort(1).values, f(4, 3)),
        call(f(4, 5).sort(1).values, f(4, 3), right=True),
        call(f(2, 4, 5).sort(2).values, f(2, 4, 3), side="left"),
        call(f(5).sort().values, f(4, 3)),
        call(f(5).sort().values, f(4), out_int32=True),
        call(f(4).sort().values, f(3)),
        call(f(4).sort().values, f()),
    ],
    "gather": gathers,
    **each("scatter scatter_", scatters_values),
    **each("scatter_add scatter_add_", scatters),
    **each("scatter_reduce scatter_reduce_", scatters_reduced),
    "index_select": lambda: [
        call(f(4, 5), 1, i(3)),
        call(f(5, 3), 0, i(4)),
        call(f(4, 5, 2), dim=-2, index=i(6)),
    ],
    **each("index_add index_add_", index_adds),
    **each("index_reduce index_reduce_", indices_reduced),
    **each(
        "index_copy index_copy_",
        lambda: [
            call(f(4, 5), 1, torch.tensor([0, 2]), f(4, 2)),
            call(f(5, 3), 0, torch.tensor([1, 0]), f(2, 3)),
        ],
    ),
    **each("index_fill index_fill_", index_fills),
}
