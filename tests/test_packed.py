# SPDX-License-Identifier: Apache-2.0
"""Packed sequences by rows: a recurrent layer over them is a layer over padded rows and lengths."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close

import koila
from allocations import Allocations
from collector import collector_off
from koila.memory import estimates
from koila.staged.program import Program
from limits import there

SORTED, UNSORTED, EVEN = [9, 8, 8, 5, 3, 3, 1], [3, 9, 1, 5, 8, 8, 3], [6] * 7
V, STEPS = 20, 10


class Net(nn.Module):
    """A recurrent net over packed rows; `read` makes the loss of what it gives."""

    def __init__(self, kind: str, is_batch_first: bool, is_both: bool, read: str, **words: Any):
        super().__init__()
        self.kind, self.is_batch_first, self.read = kind, is_batch_first, read
        self.embed = nn.Embedding(V, 6)
        words = {"num_layers": 2, "batch_first": is_batch_first, "bidirectional": is_both} | words
        self.rnn = getattr(nn, kind)(6, 8, **words)
        self.out = nn.Linear(16 if is_both else 8, V)

    def forward(self, x: Tensor, lengths: Any, hx: Any = None) -> Tensor:
        h = self.embed(x)
        is_sorted = bool((torch.as_tensor(lengths).diff() <= 0).all())
        packed = pack_padded_sequence(h, lengths, self.is_batch_first, enforce_sorted=is_sorted)
        made, last = self.rnn(packed, hx)
        state = last[1] if self.kind == "LSTM" else last
        if self.read == "last":
            return (
                self.out(torch.cat(list(state[-(self.out.in_features // 8) :]), 1)).square().mean()
            )
        if self.read == "data":
            target = pack_padded_sequence(x, lengths, self.is_batch_first, enforce_sorted=is_sorted)
            return F.cross_entropy(self.out(made.data), target.data)
        total = STEPS if self.read == "padded" else None
        value = -1.0 if self.read == "padded" else 0.0
        y, lengths_again = pad_packed_sequence(made, self.is_batch_first, value, total)
        assert lengths_again.tolist() == torch.as_tensor(lengths).tolist()
        return self.out(y).square().mean() + state.square().mean()


def step(net: nn.Module, *batch: Any) -> list[Tensor]:
    net.zero_grad()
    loss = net(*batch)
    loss.backward()
    return [loss.detach() + 0, *(p.grad for p in net.parameters() if p.grad is not None)]


def compare(net: nn.Module, lazy: Callable[[], tuple[Any, ...]], wanted: list[Tensor]) -> Any:
    net.zero_grad()
    loss = net(*lazy())
    loss.backward()
    report = koila.report()
    got = [loss.detach() + 0, *(p.grad for p in net.parameters() if p.grad is not None)]
    for one, other in zip(got, wanted, strict=True):
        assert_close(one + 0, other, rtol=1e-10, atol=1e-12)
    return report


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("lengths", [SORTED, UNSORTED, EVEN], ids=["sorted", "unsorted", "even"])
@pytest.mark.parametrize("is_batch_first", [True, False], ids=["rows-first", "steps-first"])
@pytest.mark.parametrize(
    ("kind", "is_both", "read"),
    [
        ("LSTM", False, "pad"),
        ("LSTM", True, "padded"),
        ("LSTM", False, "last"),
        ("GRU", True, "pad"),
        ("GRU", False, "data"),
        ("RNN", True, "last"),
        ("RNN", False, "padded"),
    ],
)
def test_equal(
    kind: str, is_both: bool, read: str, is_batch_first: bool, lengths: list[int], chunks: int
) -> None:
    torch.manual_seed(0)
    net = Net(kind, is_batch_first, is_both, read).double()
    x = torch.randint(V, (7, STEPS) if is_batch_first else (STEPS, 7))
    wanted = step(net, x, torch.tensor(lengths))

    def lazy() -> tuple[Any, ...]:
        return koila.lazy(x, batch=0 if is_batch_first else 1), torch.tensor(lengths)

    with koila.config(chunks=chunks):
        report = compare(net, lazy, wanted)
    assert report.n_chunks == chunks
    if chunks > 1 and read != "data":
        assert len(report.programs) == 1 and "whole:" not in str(report)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_lengths_of_the_batch_and_first_states(kind: str, chunks: int) -> None:
    torch.manual_seed(0)
    net = Net(kind, True, False, "pad").double()
    x, lengths, state = torch.randint(V, (7, STEPS)), torch.tensor(UNSORTED), torch.randn(7, 8)
    first = nn.Linear(8, 16).double()

    def run(x: Tensor, lengths: Tensor, state: Tensor) -> tuple[Any, ...]:
        hidden = first(state).view(-1, 2, 8).transpose(0, 1).contiguous()
        return x, lengths, (hidden, hidden.tanh()) if kind == "LSTM" else hidden

    def gradients() -> list[Tensor]:
        return [p.grad for p in first.parameters() if p.grad is not None]

    wanted = step(net, *run(x, lengths, state.double()))
    of_first = [g.clone() for g in gradients()]
    first.zero_grad()
    with koila.config(chunks=chunks):
        compare(net, lambda: run(*koila.lazy(x, lengths, state.double())), wanted)
    for one, other in zip(gradients(), of_first, strict=True):
        assert_close(one + 0, other, rtol=1e-10, atol=1e-12)


def test_a_write_after_packing_is_not_seen() -> None:
    """What was packed is what was there then."""
    torch.manual_seed(0)
    rnn = nn.GRU(6, 8, batch_first=True).double()
    x = torch.randn(7, STEPS, 6).double()

    def run(x: Tensor) -> list[Tensor]:
        rnn.zero_grad()
        h = x * 2
        packed = pack_padded_sequence(h, torch.tensor(SORTED), True)
        h.mul_(0)
        loss = pad_packed_sequence(rnn(packed)[0], True)[0].square().mean() + h.sum()
        loss.backward()
        return [loss.detach() + 0, *(p.grad for p in rnn.parameters() if p.grad is not None)]

    wanted = run(x)
    with koila.config(chunks=3):
        for one, other in zip(run(koila.lazy(x)), wanted, strict=True):
            assert_close(one + 0, other, rtol=1e-10, atol=1e-12)


def test_rows_given_back_twice_are_two_tensors() -> None:
    torch.manual_seed(0)
    rnn, x = nn.GRU(6, 8, batch_first=True).double(), torch.randn(7, STEPS, 6).double()

    def run(x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor(UNSORTED), True, enforce_sorted=False)
        made, _ = rnn(packed)
        one, other = pad_packed_sequence(made, True)[0], pad_packed_sequence(made, True)[0]
        one.mul_(3)
        return (one * other.square()).sum()

    wanted = run(x).detach()
    with koila.config(chunks=3):
        assert_close(run(koila.lazy(x)).detach() + 0, wanted, rtol=1e-10, atol=0)


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("lengths", [SORTED, UNSORTED, EVEN], ids=["sorted", "unsorted", "even"])
@pytest.mark.parametrize("is_batch_first", [True, False], ids=["rows-first", "steps-first"])
@pytest.mark.parametrize(
    ("kind", "is_both", "read", "n_layers"),
    [
        ("LSTM", True, "pad", 2),
        ("LSTM", False, "last", 3),
        ("GRU", False, "padded", 2),
        ("GRU", True, "last", 3),
        ("RNN", False, "data", 2),
    ],
)
def test_dropout_between_layers_is_eagers(
    kind: str,
    is_both: bool,
    read: str,
    n_layers: int,
    is_batch_first: bool,
    lengths: list[int],
    chunks: int,
) -> None:
    """Torch draws for the steps of all rows at once, the longest rows first; each chunk gets those
    of its rows. What is drawn later goes on from there."""
    torch.manual_seed(0)
    words: dict[str, Any] = {"dropout": 0.4, "num_layers": n_layers}
    net = Net(kind, is_batch_first, is_both, read, **words).double()
    x = torch.randint(V, (7, STEPS) if is_batch_first else (STEPS, 7))
    torch.manual_seed(1)
    wanted = step(net, x, torch.tensor(lengths))
    later = torch.rand(3)
    torch.manual_seed(1)
    with koila.config(chunks=chunks):
        made = koila.lazy(x, batch=0 if is_batch_first else 1)
        report = compare(net, lambda: (made, torch.tensor(lengths)), wanted)
    assert report.n_chunks == chunks
    assert torch.equal(torch.rand(3), later)
    if chunks > 1 and read != "data":
        assert len(report.programs) == 1 and "whole:" not in str(report)


@pytest.mark.parametrize("setting", [{"chunks": 3}, {"chunks": 7}, {"memory_limit": "8GiB"}])
@pytest.mark.parametrize("lengths", [[5, 2, 5, 5, 1, 2, 5], [5] * 7], ids=["ties", "even"])
def test_dropout_of_rows_of_one_length_is_drawn_in_the_order_of_the_user(
    lengths: list[int], setting: dict[str, Any]
) -> None:
    """Rows of one length may be packed in any order, and their draws are in that one."""
    torch.manual_seed(0)
    rnn, x = nn.GRU(6, 8, 2, batch_first=True, dropout=0.5), torch.randn(7, 5, 6).double()
    rnn.double()
    n_steps = torch.tensor(lengths)
    order = (n_steps * 8 + torch.tensor([3, 0, 6, 1, 2, 5, 4])).argsort(descending=True)

    def run(x: Tensor) -> list[Tensor]:
        torch.manual_seed(1)
        rnn.zero_grad()
        taken = x.index_select(0, order)
        made, last = rnn(pack_padded_sequence(taken, n_steps[order], True))
        padded = pad_packed_sequence(made, True)[0]
        inverse = order.argsort()
        loss = (padded.index_select(0, inverse) * x[:, :, :1]).sum() + last.square().sum()
        loss.backward()
        return [loss.detach() + 0, *(p.grad for p in rnn.parameters() if p.grad is not None)]

    wanted = run(x)
    with koila.config(**setting):
        found = run(koila.lazy(x))
    assert koila.report().n_chunks == setting.get("chunks", 1)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, rtol=1e-10, atol=1e-12)
        assert "chunks" in setting or torch.equal(one, other)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_none_or_all_draws_nothing(p: float) -> None:
    torch.manual_seed(0)
    net = Net("LSTM", True, False, "pad", dropout=p).double()
    x, lengths = torch.randint(V, (7, STEPS)), torch.tensor(UNSORTED)
    wanted = step(net, x, lengths)
    state = torch.get_rng_state()
    with koila.config(chunks=3):
        report = compare(net, lambda: (koila.lazy(x), lengths), wanted)
    assert report.n_chunks == 3 and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("lengths", [SORTED, UNSORTED, EVEN], ids=["sorted", "unsorted", "even"])
def test_whole_under_a_limit_it_is_eagers_bit_for_bit(
    kind: str, lengths: list[int], dropout: float
) -> None:
    torch.manual_seed(0)
    net = Net(kind, True, True, "pad", dropout=dropout)
    x = torch.randint(V, (7, STEPS))
    torch.manual_seed(1)
    wanted = step(net, x, torch.tensor(lengths))
    torch.manual_seed(1)
    with koila.config(memory_limit="8GiB"):
        got = step(net, koila.lazy(x), torch.tensor(lengths))
    assert koila.report().n_chunks == 1
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("setting", [{}, {"memory_limit": "1GiB"}])
@pytest.mark.parametrize("is_batch_first", [True, False])
@pytest.mark.parametrize("lengths", [SORTED, UNSORTED, EVEN, [STEPS, *SORTED[1:]], [STEPS] * 7])
def test_the_gradient_of_what_is_packed_has_the_strides_of_eagers(
    lengths: list[int], is_batch_first: bool, setting: dict[str, Any]
) -> None:
    """Sums over it depend on them in their last bits."""
    x = torch.randn(7, STEPS, 33)

    def run(lazy: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        rnn = nn.LSTM(33, 8, batch_first=is_batch_first)
        first, rest = nn.Sequential(nn.Linear(33, 33), nn.BatchNorm1d(33)), nn.Linear(33, 33)
        given = lazy(x)
        h = torch.cat((first(given[:, 0]).unsqueeze(1), rest(given[:, 1:])), 1)
        h = h if is_batch_first else h.transpose(0, 1)
        is_sorted = lengths != UNSORTED
        made, _ = rnn(pack_padded_sequence(h, lengths, is_batch_first, is_sorted))
        made.data.square().mean().backward()
        return [parameter.grad for one in (first, rest, rnn) for parameter in one.parameters()]

    with koila.config(**setting):
        found = run(koila.lazy)
    assert all(map(torch.equal, found, run(lambda x: x)))


@pytest.mark.filterwarnings("ignore")
def test_precisions_that_are_set_stay() -> None:
    """A chunk whose rows are of one length turns a library's kernels off, and nothing else."""
    torch.manual_seed(0)
    net, x = Net("LSTM", True, False, "pad"), torch.randint(V, (7, STEPS))
    mkldnn: Any = torch.backends.mkldnn
    with mkldnn.flags(enabled=True, fp32_precision="ieee"):
        with koila.config(chunks=7):
            step(net, koila.lazy(x), torch.tensor(SORTED))
        assert koila.report().n_chunks == 7
        assert mkldnn.fp32_precision == "ieee"
        assert mkldnn.enabled


class Tagger(nn.Module):
    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(V, 64), nn.Linear(128, V)
        self.rnn = getattr(nn, kind)(64, 128, 2, batch_first=True, dropout=dropout)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(x), lengths, True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.rnn(packed)[0], True)
        loss: Tensor = self.out(y).square().mean()
        return loss


@pytest.mark.parametrize("share", [0.5, 0.3])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_memory(kind: str, dropout: float, share: float) -> None:
    torch.manual_seed(0)
    net, x = Tagger(kind, dropout), torch.randint(V, (64, 64))
    lengths = torch.randint(32, 65, (64,))
    lengths[0], lengths[1] = 64, 63

    def run(x: Tensor) -> int:
        net.zero_grad(set_to_none=True)
        memory = Allocations()
        with memory:
            loss = net(x, lengths)
        with memory:
            loss.backward()
        return memory.peak

    plain = run(x)
    of_parameters = sum(p.nbytes for p in net.parameters())
    allowed = of_parameters + int(share * (plain - of_parameters))
    with koila.config(memory_limit=there() + allowed):
        peak = run(koila.lazy(x))
    assert re.search(r"in \d+ chunks of \d+ samples", str(koila.report()))
    assert peak <= 1.02 * allowed + 2**16, (peak, allowed, plain)


def test_where_pieces_of_a_sample_are_looked_for_the_lengths_are_not_read() -> None:
    """Under limits that are too low for whole samples the numbers are right, or it is refused."""
    torch.manual_seed(0)
    embed, lstm, out = nn.Embedding(500, 32), nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 500)
    net = nn.ModuleList([embed, lstm, out]).double()
    x, lengths = torch.randint(500, (6, 24)), torch.tensor([24, 3, 9, 24, 7, 2])

    def loss(x: Tensor) -> Tensor:
        packed = pack_padded_sequence(embed(x), lengths, True, enforce_sorted=False)
        y, _ = pad_packed_sequence(lstm(packed)[0], True)
        return F.cross_entropy(out(y).flatten(0, 1), x.flatten())

    net.zero_grad()
    loss(x).backward()
    wanted = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    before, n_refused = there(), 0
    for n_kib in (1600, 1200, 1000, 900, 800, 700, 600, 500):
        net.zero_grad(set_to_none=False)
        with koila.config(memory_limit=before + n_kib * 1024):
            try:
                loss(koila.lazy(x)).backward()
            except koila.MemoryLimitError:
                n_refused += 1
                continue
        for p, gradient in zip(net.parameters(), wanted, strict=True):
            assert_close(p.grad, gradient, rtol=1e-10, atol=1e-12)
    assert 0 < n_refused < 8


def test_an_estimate_does_not_keep_its_program() -> None:
    """The program keeps its estimates: of rows of many lengths they are made when they are asked
    for. A cycle would hold a step's tensors until the collector runs."""
    layer = nn.LSTM(5, 3, batch_first=True)
    with koila.config(chunks=2):
        x = koila.lazy(torch.ones(6, 4, 5), batch=0)
        packed = pack_padded_sequence(x, [4, 4, 3, 2, 2, 1], batch_first=True)
        loss = layer(packed)[0].data.sum()
        program = Program([loss])
        estimate, alive = estimates.estimate(program, True), weakref.ref(program)
    assert estimate.again is not None
    with collector_off():
        del program
        assert alive() is None
