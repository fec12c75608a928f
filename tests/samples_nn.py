# SPDX-License-Identifier: Apache-2.0
"""Calls for the rows of ops_nn.def, as samples.py has them for the others.

Every tensor that needs a gradient is tried with and without, because torch keeps an input only for
a gradient that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from koila.memory import uneven
from koila.running import derived
from samples_kit import Sample, call, f, i, p

Make = Callable[[], list[Sample]]


def plain(*shape: int) -> torch.Tensor:
    """Numbers that need no gradient."""
    return torch.rand(shape, dtype=torch.float64) + 0.5


def last(*shape: int) -> torch.Tensor:
    """An image stored as NHWC."""
    return f(*shape).contiguous(memory_format=torch.channels_last)


def wanting(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x] if x.requires_grad else []
    return [t for item in x for t in wanting(item)] if isinstance(x, (list, tuple)) else []


def without(x: Any, kept: Iterable[torch.Tensor]) -> Any:
    """Detach every tensor but those in `kept`."""
    if isinstance(x, torch.Tensor):
        return x if any(x is t for t in kept) else x.detach().clone()
    return type(x)(without(item, kept) for item in x) if isinstance(x, (list, tuple)) else x


def varied(make: Make) -> Make:
    """Each sample as it is, with one gradient wanted at a time, and with none."""

    def make_all() -> list[Sample]:
        return [variant for sample in make() for variant in variants(sample)]

    return make_all


def variants(sample: Sample) -> Iterator[Sample]:
    yield sample
    tensors = wanting([*sample.args, *sample.kwargs.values()])
    sets: list[list[torch.Tensor]] = [[]] if len(tensors) == 1 else [[], *([t] for t in tensors)]
    for kept in sets if tensors else []:
        kwargs = {k: without(v, kept) for k, v in sample.kwargs.items()}
        yield Sample(without(sample.args, kept), kwargs)


def each(names: str, make: Make) -> dict[str, Make]:
    return dict.fromkeys(names.split(), varied(make))


# --- products ------------------------------------------------------------------------------------


def matmuls() -> list[Sample]:
    shapes = [
        ((4,), (4,)),
        ((4, 3), (3,)),
        ((4,), (4, 3)),
        ((4, 3), (3, 2)),
        ((2, 4, 3), (3,)),
        ((6, 2, 3), (3, 2)),
        ((4,), (2, 4, 3)),
        ((2, 4), (3, 4, 2)),
        ((3, 4), (2, 4, 1)),
        ((6, 2, 3), (6, 3, 2)),
        ((4, 2, 3), (1, 3, 2)),
        ((1, 2, 3), (4, 3, 2)),
        ((2, 1, 2, 3), (4, 3, 2)),
        ((4, 2, 2, 3), (4, 2, 3, 2)),
        ((4, 4), (4, 4)),
    ]
    made = [call(f(*left), f(*right)) for left, right in shapes]
    return [
        *made,
        call(f(3, 4, 2).transpose(0, 1), f(2, 3)),
        call(f(3, 2, 4).mT.transpose(0, 1), f(2, 5)),
        call(f(4, 3, 2, 2).transpose(1, 2), f(4, 3, 2, 2).transpose(1, 2).mT),
        call(f(4, 6)[:, ::2], f(2, 3, 4)),
        call(i(4, 3), i(3, 4)),
    ]


def linears() -> list[Sample]:
    inputs = [(3,), (4, 3), (6, 2, 3), (2, 4, 2, 3)]
    made = [call(f(*shape), f(2, 3), bias) for shape in inputs for bias in (f(2), None)]
    turned = f(2, 4, 3).transpose(0, 1)
    return [*made, call(turned, f(2, 3), f(2)), call(turned, f(2, 3)), call(f(4, 3), f(3, 2).t())]


def added(*shapes: tuple[int, ...]) -> Callable[..., list[Sample]]:
    def make(*addends: tuple[int, ...]) -> list[Sample]:
        return [call(f(*addend), *(f(*s) for s in shapes)) for addend in addends]

    return make


def einsums() -> list[Sample]:
    equations: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
        ("bij,bjk->bik", (4, 2, 3), (4, 3, 2)),
        ("bij,bjk->bki", (4, 2, 3), (4, 3, 2)),
        ("bi,bj->ij", (6, 3), (6, 2)),
        ("bhqd,bhkd->bhqk", (4, 2, 3, 2), (4, 2, 5, 2)),
        ("bhqk,bkhd->bqhd", (4, 2, 3, 5), (4, 5, 2, 3)),
        ("bi,bi->b", (4, 3), (4, 3)),
        ("bi,bi->bi", (4, 3), (1, 3)),
        ("bi,j->bij", (4, 3), (2,)),
        ("b i, b j", (4, 3), (4, 2)),
        ("...i,ij->...j", (2, 4, 3), (3, 2)),
        ("i...,i->...", (4, 2, 3), (4,)),
        ("bij,b->i", (4, 2, 3), (4,)),
        ("bb,bc->c", (4, 4), (4, 3)),
        ("ba,cb->ca", (4, 3), (5, 4)),
    ]
    made = [call(text, [f(*left), f(*right)]) for text, left, right in equations]
    turned = [
        call(text, [f(*x[::-1]).mT if len(x) == 2 else f(*x), f(*y)]) for text, x, y in equations
    ]
    return [*made, *turned]


# --- norms, softmax, tables, attention -----------------------------------------------------------


def weights(n: int) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    return [(f(n), f(n)), (None, None), (f(n), None), (None, f(n))]


def layer_norms() -> list[Sample]:
    shapes = [(4, 3), (6, 2, 3), (3,)]
    made = [call(f(*shape), (3,), w, b, 1e-5) for shape in shapes for w, b in weights(3)]
    return [*made, call(f(3, 4).t(), (3,)), call(f(4, 2, 3), (2, 3), f(2, 3), f(2, 3))]


def group_norms() -> list[Sample]:
    made = [call(f(*shape), 2, w, b, 1e-5) for shape in ((4, 4, 3), (6, 4)) for w, b in weights(4)]
    return [*made, call(last(4, 4, 2, 3), 2), call(f(4, 4, 3).transpose(0, 1), 2)]


def batch_norms() -> list[Sample]:
    options = (0.1, 1e-5, True)
    made = [
        call(f(*shape), w, b, plain(3), plain(3), is_training, *options)
        for shape in ((4, 3), (6, 3, 2), (4, 3, 2, 2))
        for w, b in weights(3)[:2]
        for is_training in (True, False)
    ]
    given = [
        call(f(4, 3, 2), w, b, plain(3), plain(3), True, *options, plain(3).abs() + 1, plain(3))
        for w, b in weights(3)
    ]
    return [
        *made,
        *given,
        call(f(4, 3, 2), f(3), f(3), None, None, True, *options),
        call(last(4, 3, 2, 2), f(3), f(3), plain(3), plain(3), False, *options),
        call(f(3, 4, 2).transpose(0, 1), f(3), f(3), plain(3), plain(3), False, *options),
    ]


def instance_norms() -> list[Sample]:
    options = (0.1, 1e-5, True)
    made = [call(f(4, 3, 2), w, b, None, None, True, *options) for w, b in weights(3)]
    return [
        *made,
        call(f(3, 6, 2).transpose(0, 1), None, None, None, None, True, *options),
        call(f(4, 3, 2), f(3), f(3), plain(3), plain(3), True, *options),
    ]


def attentions() -> list[Sample]:
    def qkv(*lead: int, s: int = 5) -> list[torch.Tensor]:
        return [f(*lead, 3, 2), f(*lead, s, 2), f(*lead, s, 2)]

    mask = torch.rand(4, 1, 3, 5) > 0.3
    return [
        call(*qkv(4, 2)),
        call(*qkv(6, 1), scale=0.3),
        call(*qkv(4, 2, s=3), is_causal=True),
        call(*qkv(4, 2), plain(3, 5)),
        call(*qkv(4, 2), mask),
        call(*qkv(4, 2), attn_mask=plain(1, 2, 3, 5)),
        call(*qkv(4, 2), plain(4, 1, 1, 5)),
        call(f(4, 4, 3, 2), f(4, 2, 5, 2), f(4, 2, 5, 2), enable_gqa=True),
        call(
            f(4, 3, 2, 2).transpose(1, 2),
            f(4, 5, 2, 2).transpose(1, 2),
            f(4, 5, 2, 2).transpose(1, 2),
        ),
        call(*(part.transpose(1, 2) for part in f(4, 3, 2, 6).chunk(3, -1))),
        call(*(part.permute(1, 2, 0, 3) for part in f(3, 4, 2, 6).chunk(3, -1))),
        call(*qkv(4, 2)[:2], f(4, 2, 2, 5).mT),
        call(f(4, 3, 2, 2).transpose(1, 2), *qkv(4, 2)[1:], plain(5, 3).T),
        call(*qkv(4)),
        call(*qkv(4), plain(4, 3, 5)),
        call(*qkv(4, 2), None, 0.5),
        call(*qkv()),
    ]


LAYERS: dict[str, Make] = {
    "layer_norm": varied(layer_norms),
    "rms_norm": varied(
        lambda: [call(f(*s), (3,), w) for s in ((4, 3), (6, 2, 3)) for w in (f(3), None)]
    ),
    "group_norm": varied(group_norms),
    "batch_norm": varied(batch_norms),
    "instance_norm": varied(instance_norms),
    **each(
        "softmax log_softmax",
        lambda: [call(f(4, 3), 1), call(f(4, 3), 0), call(f(2, 4, 3).mT, -1), call(f(), 0)],
    ),
    "linalg_cross": varied(
        lambda: [
            call(f(4, 3), f(4, 3)),
            call(f(4, 1, 3), f(1, 2, 3)),
            call(f(3, 4), f(3, 4), dim=0),
            call(f(4, 3, 2), f(1, 3, 2), dim=1),
        ]
    ),
    "cosine_similarity": varied(
        lambda: [
            call(f(4, 3), f(4, 3)),
            call(f(4, 1, 3), f(1, 2, 3), -1),
            call(f(4, 3), f(3), dim=0),
        ]
    ),
    "pairwise_distance": varied(
        lambda: [call(f(4, 3), f(4, 3)), call(f(4, 3), f(3), 1.0, 1e-6, True)]
    ),
    "cdist": varied(
        lambda: [
            call(f(4, 3), f(5, 3), 2.0, None),
            call(f(4, 2, 3), f(4, 5, 3), 1.0, None),
            call(f(26, 2), f(4, 2), 2.0, None),
        ]
    ),
    "glu": varied(
        lambda: [call(f(4, 6)), call(f(4, 2, 3), 1), call(f(4, 3), 0), call(f(6, 4).t())]
    ),
    "prelu": varied(
        lambda: [call(f(4, 3), f(3)), call(f(4, 3), f(1)), call(f(4), f(1)), call(f(6, 2, 3), f(2))]
    ),
    "embedding": varied(
        lambda: [
            call(f(5, 2), i(4, 3)),
            call(f(5, 2), i(6), 1, False, False),
            call(f(5, 2), i(3, 4).t()),
            call(f(5, 2), i(4), -1, True),
        ]
    ),
    "embedding_bag": varied(
        lambda: [
            call(i(4, 3), f(5, 2)),
            call(i(4, 3), f(5, 2), mode="sum", padding_idx=1),
            call(i(4, 3), f(5, 2), mode="max"),
            call(i(4, 3), f(5, 2), mode="sum", sparse=True),
            call(i(4, 3), f(5, 2), mode="sum", per_sample_weights=f(4, 3)),
            call(i(3, 4).t(), f(5, 2), None, None, 2.0, False, "mean", False, None, True),
        ]
    ),
    "embedding_renorm_": lambda: [call(plain(5, 2), i(4), 1.0, 2.0)],
    "one_hot": lambda: [call(i(4), 5), call(i(6, 2), num_classes=4)],
    "scaled_dot_product_attention": varied(attentions),
}


# --- draws, recurrent layers ---------------------------------------------------------------------


def dropouts() -> list[Sample]:
    made = [call(f(4, 3, 2), *how) for how in ((0.5, True), (0.5, False), (0.0, True), (1.0, True))]
    return [
        *made,
        call(f(2, 3, 4).permute(2, 1, 0), 0.5, True),
        call(f(6, 2, 4)[..., ::2], 0.5, True),
    ]


def likes() -> list[Sample]:
    return [call(f(4, 3)), call(f(3, 4).t()), call(f(4, 3), dtype=torch.float32)]


def filled(*args: Any) -> Make:
    return lambda: [call(f(4, 3), *args), call(f(3, 6).t(), *args), call(f(4, 3).detach(), *args)]


def recurrent(n_gates: int, *, is_lstm: bool = False) -> Make:
    def make() -> list[Sample]:
        made = []
        for layers, both, biases, first in (
            (1, False, True, False),
            (2, True, True, True),
            (1, False, False, True),
        ):
            directions = 2 if both else 1
            params = []
            for layer in range(layers):
                width = 3 if layer == 0 else 2 * directions
                for _ in range(directions):
                    params += [f(2 * n_gates, width), f(2 * n_gates, 2)]
                    params += [f(2 * n_gates), f(2 * n_gates)] if biases else []
            state = f(layers * directions, 4, 2)
            hx = (state, f(layers * directions, 4, 2)) if is_lstm else state
            x = f(4, 5, 3) if first else f(5, 4, 3)
            made.append(call(x, hx, params, biases, layers, 0.0, True, both, first))
        return made

    return make


def packed(n_gates: int, *, is_lstm: bool = False) -> Make:
    """The same of rows of several lengths, in the order of these or not."""

    def make() -> list[Sample]:
        made = []
        for args, kwargs in recurrent(n_gates, is_lstm=is_lstm)():
            for lengths in ([5, 5, 4, 2], [2, 5, 4, 5]):
                is_sorted = lengths == sorted(lengths, reverse=True)
                n_steps, states = torch.tensor(lengths), args[1] if is_lstm else (args[1],)
                kind = n_gates, args[4], args[7], args[8], is_sorted
                needs = uneven.needs(args[0], states, n_steps, *kind)
                made.append(call(args[0], n_steps, *args[1:], is_sorted, needs, **kwargs))
        return made

    return make


def cells(n_gates: int, *, is_lstm: bool = False) -> Make:
    def make() -> list[Sample]:
        made = []
        for biases in ([f(2 * n_gates), f(2 * n_gates)], []):
            state = f(4, 2)
            hx = (state, f(4, 2)) if is_lstm else state
            made.append(call(f(4, 3), hx, f(2 * n_gates, 3), f(2 * n_gates, 2), *biases))
        return made

    return make


class Square(derived.Recipe):
    """What `derived.py` has recorded of (x * x) @ w."""

    def __init__(self) -> None:
        derived._recipes[0] = self

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        read: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        return tuple(2 * x * (gradients[0] @ read[0].t()) for x in inputs)


SQUARE = Square()


def gradients() -> list[Sample]:
    given = (f(4, 2),), (f(4, 2),), (f(3, 2),), 0, 384, 768
    return [call((f(4, 3),), *given), call((f(4, 3), f(4, 3)), *given)]


DRAWS: dict[str, Make] = {
    "gradient_of": gradients,
    **each("dropout alpha_dropout feature_dropout feature_alpha_dropout", dropouts),
    **dict.fromkeys(
        ["dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_"], dropouts
    ),
    "native_dropout": varied(
        lambda: [call(f(4, 3), 0.5, True), call(f(3, 6).t(), 0.5, None), call(f(4, 3), 0.5, False)]
    ),
    **each("bernoulli", lambda: [call(p(4, 3)), call(p(3, 6).t()), call(p(4, 3), 0.3)]),
    "normal": varied(
        lambda: [call(f(4, 3)), call(f(4, 3), 0.5), call(f(4, 1), p(3)), call(0.0, p(4, 3))]
    ),
    "multinomial": lambda: [call(p(4, 3), 2), call(p(6, 3), 5, True), call(p(4), 2)],
    **dict.fromkeys(["rand_like", "randn_like"], likes),
    "randint_like": lambda: [
        call(f(4, 3), 5),
        call(f(4, 3), 1, 5),
        call(i(4, 3), 5, dtype=torch.int32),
    ],
    "rrelu": varied(
        lambda: [call(f(4, 3), 0.1, 0.3), call(f(4, 3)), call(f(3, 6).t(), 0.1, 0.3, False)]
    ),
    "bernoulli_": lambda: [
        *filled(0.3)(),
        *filled()(),
        call(f(4, 3), plain(3) - 0.5),
        call(f(4, 1), plain(4, 1) - 0.5),
    ],
    **{
        name: filled()
        for name in ("cauchy_", "exponential_", "log_normal_", "normal_", "random_", "uniform_")
    },
    "geometric_": filled(0.5),
    "lstm": recurrent(4, is_lstm=True),
    "gru": recurrent(3),
    **dict.fromkeys(["rnn_tanh", "rnn_relu"], recurrent(1)),
    "packed_lstm": packed(4, is_lstm=True),
    "packed_gru": packed(3),
    **dict.fromkeys(["packed_rnn_tanh", "packed_rnn_relu"], packed(1)),
    "lstm_cell": cells(4, is_lstm=True),
    "gru_cell": cells(3),
    **dict.fromkeys(["rnn_tanh_cell", "rnn_relu_cell"], cells(1)),
}

PRODUCTS: dict[str, Make] = {
    "matmul": varied(matmuls),
    "linear": varied(linears),
    "einsum": varied(einsums),
    "mm": varied(
        lambda: [call(f(4, 3), f(3, 2)), call(f(3, 4).t(), f(2, 3).t()), call(f(3, 6), f(6, 3))]
    ),
    "bmm": varied(
        lambda: [call(f(4, 2, 3), f(4, 3, 2)), call(f(2, 6, 3).transpose(0, 1), f(6, 3, 2))]
    ),
    "_grouped_mm": lambda: [
        call(
            f(6, 4, dtype=torch.float32),
            f(2, 4, 8, dtype=torch.float32),
            torch.tensor([4, 6], dtype=torch.int32),
        )
    ],
    "mv": varied(lambda: [call(f(4, 3), f(3)), call(f(3, 4).t(), f(3)), call(f(3, 6), f(6))]),
    "dot": varied(lambda: [call(f(4), f(4)), call(f(6), f(6))]),
    "vdot": varied(lambda: [call(f(4), f(4)), call(f(6), f(6))]),
    **each(
        "addmm",
        lambda: [
            *added((4, 3), (3, 2))((4, 2), (2,), (4, 1)),
            call(f(2, 4).t(), f(4, 3), f(3, 2), beta=2),
        ],
    ),
    **each("addmv", lambda: added((4, 3), (3,))((4,), (1,), ())),
    **each("addr", lambda: added((4,), (3,))((4, 3), (3,))),
    **each("baddbmm", lambda: added((4, 2, 3), (4, 3, 2))((4, 2, 2), (2,), (4, 1, 1))),
    **each("addbmm", lambda: added((4, 2, 3), (4, 3, 2))((2, 2), (2,))),
    **each("addmm_", lambda: added((4, 3), (3, 2))((4, 2))),
    **each("addmv_", lambda: added((4, 3), (3,))((4,))),
    **each("addr_", lambda: added((4,), (3,))((4, 3))),
    **each("baddbmm_", lambda: added((4, 2, 3), (4, 3, 2))((4, 2, 2))),
    "bilinear": varied(
        lambda: [
            call(f(*s, 3), f(*s, 2), f(2, 3, 2), b) for s in ((4,), (6, 2)) for b in (f(2), None)
        ]
    ),
}
