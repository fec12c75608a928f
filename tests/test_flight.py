"""What rows hold in flight, against torch's allocator: backward, for every sample of these rows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils._pytree import tree_leaves

from all_samples import samples_of
from koila import _core, flight
from koila.flight import Amount
from koila.partials import REDUCTIONS
from test_ops import CALLABLES

ROWS = sorted(flight.ROWS)
#: Numbers of no dim, and what a formula makes for a whole operand of a few bytes.
SMALL = 128
#: Composed of other calls where these say so, which keep what is not counted here as in flight.
COMPOSED = {
    "cosine_embedding_loss",
    "hinge_embedding_loss",
    "kl_div",
    "margin_ranking_loss",
    "poisson_nll_loss",
    "rms_norm",
    "scaled_dot_product_attention",
    "triplet_margin_loss",
}
#: Rows in which only some ways of calling hold more than is said, all of them rare.
RARE = {
    **dict.fromkeys("gru lstm rnn_relu rnn_tanh".split(), "free what they keep as they go back"),
    "bilinear": "the products of all features of both sides",
    "cdist": "by matrix products, with a row more for the norms",
    "cosine_similarity": "two operands that are both broadcast",
    "cumprod": "zeros",
    "im2col": "a gradient cut from a larger one",
    "instance_norm": "a weight that is repeated for each row",
    "linalg_vector_norm": "norms other than the second",
    "pairwise_distance": "norms other than the second",
    "pow": "a tensor as exponent, which the row's own rule counts",
    "std": "correction",
}


def test_names_are_rows() -> None:
    """A name that is no row is never looked up."""
    rows = {row["name"] for row in _core.op_table()}
    assert sorted(set(flight.ROWS) - rows) == []
    assert sorted(flight.TURNS - rows) == []
    assert sorted(set(REDUCTIONS) ^ set(flight.PARTS)) == []


def n_bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def measure_back(outs: list[Tensor], wanted: list[Tensor]) -> int:
    """The most bytes of a backward beyond what was there before it."""
    seeds = [torch.randn_like(out) for out in outs]
    with profile(profile_memory=True) as found:
        gradients = torch.autograd.grad(outs, wanted, seeds, allow_unused=True)
    del gradients
    now = peak = 0
    results: Any = found.kineto_results
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def said(amount: Amount, out: Tensor, first: Tensor) -> float:
    larger = max(out.numel(), first.numel())
    return amount.outs * n_bytes(out) + amount.ins * n_bytes(first) + amount.masks * larger


def allowed(
    held: flight.Flight, out: Tensor, operands: list[Tensor], wanted: list[Tensor]
) -> float:
    """Bytes for the gradients and what is in flight, as sweep.py has it."""
    last = len(held.backward) - 1
    wide = more = 0.0
    for k, operand in enumerate(operands):
        if operand.requires_grad:
            more = max(more, said(held.backward[min(k, last)], out, operands[0]))
            is_wide = held.broadcasts and k not in held.handed_on and operand.numel() < out.numel()
            wide += n_bytes(out) if is_wide else 0
    return n_bytes(*wanted) + wide + more + said(held.turned, out, operands[0])


@pytest.mark.parametrize("row", [row for row in ROWS if row not in COMPOSED | set(RARE)])
def test_backward(row: str) -> None:
    """No sample holds more than is said, and one holds half of it at least."""
    held, shares = flight.of(row), [0.0]
    for args, kwargs in samples_of(row):
        operands = [t for t in tree_leaves([args, kwargs]) if isinstance(t, Tensor)]
        wanted = [t for t in operands if t.requires_grad]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outs = [
                t for t in tree_leaves([CALLABLES[row](*args, **kwargs)]) if isinstance(t, Tensor)
            ]
        outs = [out for out in outs if out.requires_grad]
        if not wanted or not outs:
            continue
        most = allowed(held, outs[0], operands, wanted)
        used = measure_back(outs, wanted)
        assert used <= most + SMALL, f"{[tuple(t.shape) for t in operands]} {kwargs}"
        shares.append(used / max(most, 1.0))
    assert max(shares) >= 0.5 or all(amount == flight.NONE for amount in held.backward)
