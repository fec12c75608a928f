# SPDX-License-Identifier: Apache-2.0
"""Random programs of factories, writes, views, masks, draws and reads in the middle are eager's."""

from __future__ import annotations

import pytest

import random_writes
from chunked import Watched
from random_writes import Program

pytestmark = pytest.mark.sanitize

#: Programs that were wrong once, in their smallest form.
ONCE_WRONG = {
    "a write through .data of a plain view of what waits to be read": Program(
        (
            "v1 = u[..., -1]",
            "u.mul_(0.25)",
            "v9 = v1[None]",
            "s = u.tolist()[0][0]",
            "d = u * 3",
            "v9.data.mul_(0.25)",
        ),
        n_rows=11,
        n_others=5,
        data=544,
    ),
    "a hook on what was turned after a view was taken": Program(
        (
            "h = z * v",
            "v0 = h.diagonal(0, 0, 1)",
            "h.unsqueeze_(0).mul_(-1.5)",
            "h.register_hook(lambda a: a * 0.5)",
        ),
        n_rows=7,
        n_others=9,
        data=485,
    ),
    "views that torch's graph does not know of": Program(
        (
            "h = z * v",
            "with torch.no_grad():\n"
            "    a = torch.unsafe_split(h, 2, 1)\n"
            "    b = torch.unsafe_chunk(h, 2, 1)[0]\n"
            "    c = torch.unsafe_split_with_sizes(h, [1, 3], 1)[1]",
            "d = a[0]",
        ),
        n_rows=4,
        n_others=4,
        data=530,
    ),
    "dropout in place in inference mode": Program(
        (
            "h = t * w[:, :1]",
            "with torch.inference_mode(): F.dropout(h, 0.5, inplace=True)",
        ),
        n_rows=5,
        n_others=9,
        data=365,
    ),
    "a draw for memory whose layout is not known": Program(
        ("o4 = torch.special.bessel_y1(t)", "o4.T.normal_()"), n_rows=6, n_others=4, data=427
    ),
    "a plain draw beside a draw for memory whose layout is not known": Program(
        ("o4 = torch.special.bessel_y1(t)", "o4.T.normal_()", "r = torch.rand(3, dtype=D)"),
        n_rows=6,
        n_others=4,
        data=427,
    ),
    "a view that waits since a call failed, written by what ran whole": Program(
        (
            "h = x * 1",
            "v = h[:, :2]",
            "k = h[:, 1:]",
            "del h",
            "e = []",
            "try:\n"
            "    e.append(F.embedding(y + 9, w))\n"
            "    e.append(v[:, :1])\n"
            "    e.append(k[:, 0] * 2)\n"
            "    float(e[0].sum())\n"
            "except IndexError: pass",
            "v[0][1] = 0.5",
            "del v",
            "q = p.T",
            "m = y.new_zeros(y.shape)",
        ),
        n_rows=3,
        n_others=5,
        data=949,
    ),
    "a value that waits since a call failed, and a view of it": Program(
        (
            "h = x * 1",
            "e = []",
            "try:\n"
            "    e.append(F.embedding(y + 9, w))\n"
            "    e.append(h.reshape(h.shape))\n"
            "    float(e[0].sum())\n"
            "except IndexError: pass",
            "h[0][1] = 0.5",
            "q = p.T",
            "m = y.new_zeros(y.shape)",
        ),
        n_rows=3,
        n_others=5,
        data=949,
    ),
    "a write of a number beside a view that waits": Program(
        (
            "v0 = o[:, 1:]",
            "r1 = float((t > 0).sum()) / 5",
            "v2 = o.split(2, 0)[0]",
            "with torch.no_grad(): v0[:, torch.tensor([0, 2])] *= 0.5",
        ),
        n_rows=8,
        n_others=5,
        data=846,
    ),
    "a number that is written when what reads it waits": Program(
        (
            "h = z * v",
            "c0 = z * 0.5",
            "with torch.no_grad(): h.index_copy_(0, torch.tensor([1, 0]), c0[:2].clone())",
            "v5 = c0.swapaxes(0, -1)",
            "v5.copy_(v5.mean(0))",
        ),
        n_rows=7,
        n_others=5,
        data=629,
    ),
    "a gradient that lies otherwise": Program(
        ("h = x @ w", "h.swapdims_(0, 1)", "h.squeeze_()"),
        n_rows=4,
        n_others=4,
        data=263,
        needs_input_gradient=True,
    ),
    "the batch is as large as another dim": Program(
        ("h = x * 1", "s = h.T", "s += x @ w", "s[0] = 1"), n_rows=4, n_others=4, data=1
    ),
    "two batches in one weighted mean": Program(
        ("h = ((x @ w).pow(2).sum(1) * o[:, 0]).sum() / o[:, 0].sum()", "g = (h * o).sum() * x"),
        n_rows=6,
        n_others=6,
        data=2,
    ),
    "a plain draw into a lazy's memory while another waits": Program(
        ("d = F.dropout(u.T.contiguous(), 0.4)", "torch.randn(4, 4, dtype=D, out=o)"),
        8,
        4,
        data=541,
    ),
    "made by sizes alone of one batch, and read by another": Program(
        ("c = F.embedding(y, w)", "m = o.new_zeros(6, 4)", "d = torch.randn_like(c[:, :1]) * m"),
        n_rows=6,
        n_others=4,
        data=428,
    ),
    "a view taken again for a call that has no row": Program(
        (
            "h = t * w[:, :1]",
            "v2 = h.hsplit(2)[0]",
            "m4 = torch.full_like(h, -1.5)",
            "v2.T[0] = 0.25",
            "o7 = torch.zeros_like(torch.special.chebyshev_polynomial_u(v2, m4))",
        ),
        n_rows=2,
        n_others=9,
        data=851,
    ),
    "a view of a number with gaps that joins its rows with another dim": Program(
        (
            "h = p * w[0, 0]",
            "a = h.select(-1, 1)",
            "with torch.no_grad(): torch.min(a, 0, keepdim=True, out=(u, y))",
            "with torch.no_grad(): b = a.view(-1)",
        ),
        n_rows=6,
        n_others=9,
        data=456,
    ),
    "the results of a call that failed are held": Program(
        (
            "bad = [x * 2]",
            "try:\n    bad.append(bad[0][y + 99])\n    float(bad[1].sum())\n"
            "except IndexError: pass",
            "x[:, 2] = torch.arange(x.shape[0], dtype=D)",
            "h = bad[0] @ w",
        ),
        n_rows=6,
        n_others=4,
        data=541,
    ),
    "a view is written after a failure that left something to wait": Program(
        (
            "b = x @ w",
            "v = b[:, 0]",
            "u = v.view(-1)",
            "del b",
            "bad = []\ntry:\n    bad.append(F.embedding(y + 9, w))\n    bad.append(x * 3)\n"
            "    float(bad[0].sum())\nexcept IndexError: pass",
            "with torch.no_grad(): v.add_(1)",
            "r = u.sum().item()",
            "with torch.no_grad(): v[:2].fill_(3)",
            "q = u.detach() * 2",
        ),
        n_rows=6,
        n_others=4,
        data=541,
    ),
    "a write through a view that is taken of the whole": Program(
        ("h = x * 1", "v = h.squeeze(0)", "d = h + 1", "v[:, 1:].add_(1.0)"), 11, 9, data=911
    ),
    "a write of its own memory, which in one row is all of it": Program(
        ("h = z * v", "a = h.detach()", "a[torch.arange(6), y] = a[:, 0]"), 6, 4, data=196
    ),
    "attention to values of several batches, whose weights are of none": Program(
        ("h = F.scaled_dot_product_attention(o, z * v, p, dropout_p=0.5)",), 4, 9, data=609
    ),
    "a draw of the whole from what is expanded": Program(
        (
            "h = z * v",
            "a = h.broadcast_to(2, *h.shape)",
            "d = F.dropout(a[:, :2], 0.5)",
        ),
        n_rows=8,
        n_others=5,
        data=734,
    ),
    "a view of read memory is given other memory": Program(
        (
            "h = o",
            "with torch.no_grad(): a = h.squeeze(0)",
            "b = t.reshape(-1, 2)",
            "a[:2] = u[:2].clone()",
            "d = F.dropout(h.to(D), 0.5)",
            "a.set_(b.detach().clone())",
        ),
        n_rows=4,
        n_others=9,
        data=675,
        is_read_first=True,
    ),
    "what ran after a failure, beside a view that waits of what it wrote": Program(
        (
            "h = p * w[0, 0]",
            "bad = []\ntry:\n    bad.append(F.embedding(y + 9, w))\n"
            "    bad.append(h.reshape(h.shape))\n    float(bad[0].sum())\nexcept IndexError: pass",
            "h **= 2",
            "u.detach().expm1_()",
        ),
        n_rows=5,
        n_others=5,
        data=914,
        is_read_first=True,
    ),
    "a gradient of zeros that has no memory": Program(
        ("h = t * w[:, :1]", "h.sgn_()"), 4, 5, data=648, is_read_first=True
    ),
    "a view that a failure left to wait, of one that ran and was written": Program(
        (
            "h = x * 1",
            "v = h.unfold(1, 2, 1)",
            "f = []\ntry:\n    f.append(F.embedding(y + 9, w))\n    f.append(v.reshape(v.shape))\n"
            "    float(f[0].sum())\nexcept IndexError: pass",
            "with torch.no_grad():\n    F.elu(v, inplace=True)\n    b = v.index_select(0, y)\n"
            "    torch.argmax(z, -1, out=y)",
            "r = 0.5 if torch.isfinite(u).all() else 0.1",
        ),
        n_rows=7,
        n_others=7,
        data=155,
    ),
    "rows are gathered where another call asks for their number": Program(
        (
            "h = x * 1",
            "r = float(np.asarray(t.detach()).mean())",
            "v = h.index_select(0, y)",
            "m = h.new_full((h.size(0), 4), 0.5)",
        ),
        n_rows=4,
        n_others=9,
        data=759,
    ),
    "an order without a gradient beside a quantile": Program(
        ("h = x @ w", "i = x.argsort(0)", "g = torch.quantile(h, 0.5)"), 6, 5, data=3
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunks", random_writes.COUNTS)
@pytest.mark.parametrize("name", ONCE_WRONG)
def test_once_wrong(name: str, chunks: int) -> None:
    assert random_writes.failure(ONCE_WRONG[name], chunks) is None


#: A script catches the error of a call whose sizes do not fit, made of one whose index is out of
#: bounds. Eager raises that of the index; here it waits, and raises when something else runs.
KNOWN = {224}


@pytest.mark.rotated
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, 300, 20))
def test_programs(first: int) -> None:
    """More of them: python tests/random_writes.py --count 20000. Many are cut."""
    n_cut = 0
    for seed in sorted({*range(first, first + 20)} - KNOWN):
        program = random_writes.write(seed)
        was_cut = []
        for chunks in random_writes.COUNTS:
            with Watched(chunks).on() as seen:
                found = random_writes.failure(program, chunks)
            is_wrong = found is not None and random_writes.is_persistent(program, chunks)
            assert not is_wrong, f"seed {seed}, {chunks} chunks: {found}\n{program}"
            assert not seen.wrong, f"seed {seed}: {seen.wrong}\n{program}"
            was_cut += [seen.n_cut > 0] * (chunks > 1)
        n_cut += all(was_cut)
    assert n_cut > 5
