"""What torch holds beside results while one call runs, forward and backward: in flight.

A formula for a gradient makes tensors on its way (d acos(x) makes five), and a gradient for an
operand that was broadcast is as large as the result until it is summed. So much for each row here,
as measured; a row that is not here holds nothing but its operands, results and gradients.
"""

from __future__ import annotations

import functools
from typing import NamedTuple


class Amount(NamedTuple):
    """Multiples of a call's result, of its first operand, and of one byte for each element of the
    larger of the two."""

    outs: float = 0.0
    ins: float = 0.0
    masks: float = 0.0


class Flight(NamedTuple):
    """In flight for one row: while it runs, and while the gradient of operand 0, 1, ... is made.

    The last entry of `backward` is for all further operands. Where a row `broadcasts`, a gradient
    is made as large as the result, but for operands in `handed_on`: theirs is the result's. Where
    the gradient of the result is laid out otherwise than the result, `turned` is held too. What a
    `is_stepwise` row keeps for backward is made step by step, and does not gather without a graph.
    """

    forward: Amount = Amount()
    backward: tuple[Amount, ...] = (Amount(),)
    broadcasts: bool = False
    handed_on: tuple[int, ...] = ()
    turned: Amount = Amount()
    is_stepwise: bool = False


class Parts(NamedTuple):
    """A reduction as partials.py computes it: what a chunk leaves, as multiples of the result; what
    the graph that combines them keeps of each, and their gradients; and where it is computed
    otherwise than its call, what is kept for backward on the chunk, and what is in flight there."""

    left: float = 1.0
    combined: float = 0.0
    seeds: float = 1.0
    keeps: Amount | None = None
    flight: Flight | None = None


NONE = Amount()
NOTHING = Flight()


def _outs(*amounts: float, masks: float = 0.0, forward: float = 0.0) -> Flight:
    """One operand, or several that all are as the result."""
    return Flight(Amount(forward), tuple(Amount(n, 0.0, masks) for n in amounts))


def _wide(*amounts: float, masks: float = 0.0, handed_on: tuple[int, ...] = ()) -> Flight:
    """Several operands that are broadcast."""
    return Flight(Amount(), tuple(Amount(n, 0.0, masks) for n in amounts), True, handed_on)


def _ins(
    *amounts: float,
    outs: float = 0.0,
    masks: float = 0.0,
    forward: float = 0.0,
    forward_outs: float = 0.0,
) -> Flight:
    """The first operand is the largest: a reduction, or a loss."""
    return Flight(Amount(forward_outs, forward), tuple(Amount(outs, n, masks) for n in amounts))


# They work on a copy with the channels last, and copy the result back.
_UPSAMPLE = "_upsample_nearest_exact2d upsample_bilinear2d upsample_nearest2d"
_UPSAMPLE_BACK = "_upsample_bicubic2d_aa _upsample_bilinear2d_aa"  # on the way back too


ROWS: dict[str, Flight] = {
    # elementwise, one tensor
    **dict.fromkeys("abs cosh digamma exp2 expm1 i0 lgamma log10 log1p log2".split(), _outs(1)),
    **dict.fromkeys("sin sinh sqrt".split(), _outs(1)),
    "isfinite": _ins(0, forward=1, forward_outs=2),
    "isinf": _ins(0, forward=1),
    "native_dropout": _outs(1, forward=1),
    **dict.fromkeys("atan cos reciprocal rsqrt square tan cumsum".split(), _outs(2)),
    **dict.fromkeys("acosh asinh atanh".split(), _outs(3)),
    **dict.fromkeys("asin erf erfc erfinv cumprod".split(), _outs(4)),
    "acos": _outs(5),
    "logcumsumexp": _outs(7),
    "nan_to_num": _outs(1, masks=1),
    "sinc": _outs(7),
    # elementwise, several
    "Tensor_where": _wide(0),
    "add": _wide(0, handed_on=(0, 1)),
    "addcdiv": _wide(0, 1, 3),
    "addcmul": _wide(0, handed_on=(0,)),
    "atan2": _wide(5),
    "clamp": _wide(0, masks=3),
    "clamp_max": _wide(0, masks=2),
    "clamp_min": _wide(0, masks=2),
    "copysign": _wide(1),
    "div": _wide(0, 3),
    "fmax": _wide(0, masks=2),
    "fmin": _wide(0, masks=2),
    "fmod": _wide(0, 2),
    "hypot": _wide(1),
    "lerp": _wide(1),
    "logaddexp": _wide(3),
    "masked_fill": _wide(0, 1),
    "maximum": _wide(1, masks=2),
    "minimum": _wide(1, masks=2),
    "mul": _wide(0),
    "outer": _wide(0),
    "pow": _wide(2, 4, masks=2),
    "prelu": _wide(1),
    "remainder": _wide(0, 2),
    "rsub": _wide(0, handed_on=(1,)),
    "sub": _wide(0, handed_on=(0,)),
    "where": _wide(0),
    "xlogy": _wide(1, masks=3),
    # losses
    "binary_cross_entropy_with_logits": _ins(3, forward=2),
    "cosine_embedding_loss": _ins(1, forward=3),
    "hinge_embedding_loss": _ins(2, forward=5),
    "huber_loss": _ins(0, forward=1),
    "kl_div": _ins(1, 2, forward=3),
    "l1_loss": _ins(2, forward=1),
    "margin_ranking_loss": _ins(2, forward=2),
    "mse_loss": _ins(0, forward=1),
    "poisson_nll_loss": _ins(2, forward=2),
    "smooth_l1_loss": _ins(0, forward=1),
    "soft_margin_loss": _ins(2, forward=1),
    "triplet_margin_loss": _ins(1, forward=2),
    # layers
    **dict.fromkeys(_UPSAMPLE.split(), _ins(0, forward=1, forward_outs=1)),
    **dict.fromkeys(_UPSAMPLE_BACK.split(), _ins(1, outs=1, forward=1, forward_outs=1)),
    "batch_norm": _outs(1),
    "bilinear": _outs(0, forward=1),
    "affine_grid_generator": _outs(1.5, forward=1.5),
    "col2im": _outs(1),
    "grid_sampler": _outs(2),
    "index_fill": _outs(0, 0, 1),
    "repeat": _ins(2),
    **dict.fromkeys("rnn_relu_cell rnn_tanh_cell".split(), _outs(1, forward=2)),
    "gru_cell": _outs(6, forward=3),
    "lstm_cell": _outs(7, forward=1),
    "upsample_bicubic2d": _outs(1),
    "gelu": Flight(turned=Amount(2)),
    "layer_norm": Flight(turned=Amount(1)),
    "cdist": _ins(2, outs=2),
    "cosine_similarity": _ins(2, forward=1),
    "im2col": _ins(0, outs=1, forward=1),
    "instance_norm": _outs(1),
    "pairwise_distance": _ins(1, forward=1),
    "rms_norm": _outs(4),
    "roll": _outs(1, forward=1),
    "scaled_dot_product_attention": _outs(1),
    **dict.fromkeys("gru lstm rnn_relu rnn_tanh".split(), Flight(is_stepwise=True)),
    # reductions
    "amax": _ins(1, outs=2, masks=1),
    "amin": _ins(1, outs=2, masks=1),
    "argsort": _ins(0, forward=1),
    "kthvalue": _ins(0, forward=2),
    "linalg_vector_norm": _ins(1),
    "logsumexp": _ins(2, forward=1),
    "max": Flight(Amount(), (Amount(0, 1, 2),), True),
    "median": _ins(1, masks=1, forward=1),
    "min": Flight(Amount(), (Amount(0, 1, 2),), True),
    "nanmedian": _ins(1, masks=1, forward=1),
    "nansum": _ins(1, masks=2),
    "prod": _ins(1, outs=2),
    "std": _ins(1, outs=3),
    "std_mean": _ins(2, outs=1),
    "var": _ins(1, outs=2),
    "var_mean": _ins(2),
}


# By the name of the reduction.
PARTS = {
    **dict.fromkeys("SUM MEAN ALL ANY CROSS_ENTROPY LOSS COUNT".split(), Parts()),
    **dict.fromkeys(("NORM", "PROD"), Parts(1, 1, 1)),
    "VAR": Parts(2, 1, 2, Amount(0, 1), Flight(Amount(0, 1), (Amount(0, 1),))),
    "AMAX": Parts(2, 4, 1, None, Flight(Amount(0, 0, 11), (Amount(2, 1, 1),))),
    "LOGSUMEXP": Parts(2, 3, 1, Amount(0, 1), Flight(Amount(0, 1))),
}


#: The statistics of batch_norm: only the input is kept, and its gradient is made in one go.
_MOMENTS = Parts(2, 1, 2, None, Flight())


def parts_of(reduction: str, is_for_chunks: bool) -> Parts:
    """What a reduction by that name of KlReduce leaves and holds; of what only chunks run."""
    return _MOMENTS if is_for_chunks else PARTS[reduction]


# What reads a value and sends back a gradient that is laid out otherwise.
TURNS = frozenset("einsum movedim permute swapaxes swapdims t transpose".split())


@functools.cache
def of(row: str | None) -> Flight:
    """What a row holds in flight; a write holds what the call without the write does."""
    if row is None:
        return NOTHING
    return ROWS.get(row) or ROWS.get(row.removesuffix("_"), NOTHING)
