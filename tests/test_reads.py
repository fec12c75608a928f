# SPDX-License-Identifier: Apache-2.0
"""Each way to read a lazy tensor gives what eager gives; `repr` computes nothing."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import operator
import pickle
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn.utils import rnn
from torch.utils.weak import WeakIdKeyDictionary

import koila
from chunked import split
from oracle import assert_seen, eager, is_whole
from small import Smalls

SMALLS = Smalls()

# Numbers and protocols


@SMALLS.add
def numbers(x: Tensor, labels: Tensor) -> Any:
    total, label = x.sum(), labels[1]
    return bool(total > 0), int(total), float(total), complex(total), operator.index(label)


@SMALLS.add
def number_of_the_batch(x: Tensor, labels: Tensor) -> Any:
    return float(x[0, 0]), int(labels[2]), bool(x[1, 1]), x[2, 2].item(), labels.tolist()


@SMALLS.add
def number_before_backward(x: Tensor) -> Any:
    loss = (x * 2).sin().sum()
    return loss.item(), loss * 2, loss.tolist()


@SMALLS.add
def no_number(x: Tensor) -> Any:
    return bool(x * 2)


@SMALLS.add
def no_index(x: Tensor) -> Any:
    return [1, 2, 3][x.sum()]


@SMALLS.add
def condition(x: Tensor) -> Any:
    hidden = x * 2
    if hidden.sum() > 0:
        return hidden.exp()
    return hidden.cos()


@SMALLS.add
def length(x: Tensor) -> Any:
    return len(x), len(x * 2), len(x[0]), x.numel(), x.dim(), x.nelement(), x.element_size()


@SMALLS.add
def length_of_no_dims(x: Tensor) -> Any:
    return len(x.sum())


@SMALLS.add
def iteration(x: Tensor) -> Any:
    first, *others = x * 2
    return first, others, [float(number) for number in x[0]], list(zip(x, x * 3, strict=True))


@SMALLS.add
def contained(x: Tensor, labels: Tensor) -> Any:
    return 2 in labels, 7 in labels, 0.5 in x, labels[0] in labels


@SMALLS.add
def python_numbers(x: Tensor) -> Any:
    total = (x * x).sum()
    return math.sqrt(total), round(float(total), 3), abs(x), -x, max(x[0]), sum(x)


@SMALLS.add
def index_of_a_list(labels: Tensor) -> Any:
    return ["a", "b", "c"][labels[1]], list(range(labels[1])), slice(labels[2]).indices(5)


@SMALLS.add
def comparisons_of_wholes(x: Tensor, z: Tensor) -> Any:
    same = torch.equal(x, x + 0), torch.equal(x, z), torch.allclose(x, x + 1e-12)
    return same, torch.allclose(x, z), torch.is_nonzero(x.sum()), x.is_same_size(z)


@SMALLS.add
def kinds(x: Tensor, labels: Tensor) -> Any:
    answers = torch.result_type(x, labels), torch.is_floating_point(x), x.is_complex()
    return answers, torch.is_tensor(x), isinstance(x, Tensor), x.type(), x.is_contiguous()


# numpy


@SMALLS.add
def numpy_array(x: Tensor) -> Any:
    return torch.from_numpy((x * 2).numpy()), torch.from_numpy(np.asarray(x * 3))


@SMALLS.add
def numpy_detached(x: Tensor) -> Any:
    return torch.from_numpy((x * 2).detach().cpu().numpy()), torch.from_numpy(np.array(x.detach()))


@SMALLS.add
def numpy_ufunc(x: Tensor) -> Any:
    step = (x * 2).detach()
    return torch.as_tensor(np.sin(step)), torch.as_tensor(np.add(step, 1.0)), np.sum(step.numpy())


@SMALLS.add
def numpy_stack(x: Tensor) -> Any:
    step = (x * 2).detach()
    return torch.from_numpy(np.concatenate([step, step])), torch.from_numpy(np.stack(list(step)))


@SMALLS.add
def numpy_shares_memory(x: Tensor) -> Any:
    step = (x * 2).detach()
    before = step[0] * 1
    step.numpy()[0] = 7.0
    return before, step, step + 1


@SMALLS.add
def numpy_shares_the_batch(x: Tensor) -> Any:
    x.detach().numpy()[1] = 5.0
    return x * 2


@SMALLS.add
def data_pointer(x: Tensor) -> Any:
    step = (x * 2).detach()
    return step.data_ptr() == step.data_ptr(), step[1:].data_ptr() - step.data_ptr()


@SMALLS.add
def storage(x: Tensor) -> Any:
    step = (x * 2).detach()
    return step.untyped_storage().nbytes(), list(step.untyped_storage()), step.storage_offset()


# Copies


@SMALLS.add
def pickled(x: Tensor) -> Any:
    return pickle.loads(pickle.dumps((x * 2).detach())), pickle.loads(pickle.dumps(x)).detach()


@SMALLS.add
def deep_copied(x: Tensor) -> Any:
    one, two = copy.deepcopy(((x * 2).detach(), x.detach()))
    return type(one) is Tensor, type(two) is Tensor, one, two


@SMALLS.add
def deep_copied_module(x: Tensor) -> Any:
    module = nn.Linear(3, 3)
    module.register_buffer("seen", (x * 2).detach())
    return copy.deepcopy(module).seen


@SMALLS.add
def shallow_copied(x: Tensor) -> Any:
    return copy.copy((x * 2).detach())


# Shapes that depend on data, and checks of it (torch.compile switches the latter off by default)


@SMALLS.add
def where(x: Tensor) -> Any:
    return torch.where(x > 0), x.nonzero(), torch.nonzero(x > 0.1, as_tuple=True)


@SMALLS.add
def unique(x: Tensor, labels: Tensor) -> Any:
    return torch.unique(labels, return_inverse=True, return_counts=True), torch.unique(x.detach())


@SMALLS.add
def unique_consecutive(labels: Tensor) -> Any:
    return torch.unique_consecutive(labels, return_counts=True), labels.unique(), labels.bincount()


@SMALLS.add
def masked(x: Tensor, z: Tensor) -> Any:
    return x[x > 0], x.masked_select(z > 0), z[x.sum(1) > 0]


@SMALLS.add
def packed(x: Tensor, labels: Tensor) -> Any:
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 5, batch_first=True).double()
    sequences = torch.stack([x, x * 2, x.sin()], 1)
    packed = rnn.pack_padded_sequence(sequences, labels + 1, True, enforce_sorted=False)
    output, (hidden, cell) = lstm(packed)
    return rnn.pad_packed_sequence(output, batch_first=True), hidden, cell


@SMALLS.add
def padded(x: Tensor) -> Any:
    return rnn.pad_sequence([x[0], x[1, :2], x[2, :1]], batch_first=True)


@SMALLS.add
def repeated(x: Tensor, labels: Tensor) -> Any:
    return x.repeat_interleave(labels, 0), x.split(labels[1:].tolist()), x[: labels[1]]


@SMALLS.add
def sampled(x: Tensor, z: Tensor, labels: Tensor) -> Any:
    normal = distributions.Normal(x, z.exp(), validate_args=True)
    choice = distributions.Categorical(logits=x, validate_args=True)
    torch.manual_seed(0)
    draws = normal.rsample(), normal.sample((2,)), choice.sample()
    return draws, normal.log_prob(z), choice.log_prob(labels), choice.entropy()


@SMALLS.add
def divergence(x: Tensor, z: Tensor) -> Any:
    one = distributions.Normal(x, torch.ones_like(x), validate_args=True)
    return distributions.kl_divergence(one, distributions.Normal(z, x.exp(), validate_args=True))


@SMALLS.add
def invalid_parameter(x: Tensor) -> Any:
    return distributions.Normal(x, x, validate_args=True)


# Errors in use


@SMALLS.add
def wrong_shape(x: Tensor) -> Any:
    return (x * 2) @ x


@SMALLS.add
def wrong_view(x: Tensor) -> Any:
    return (x * 2).t().view(12)


@SMALLS.add
def wrong_index(x: Tensor) -> Any:
    return (x * 2)[7]


@SMALLS.add
def wrong_label(x: Tensor, labels: Tensor) -> Any:
    return nn.functional.cross_entropy(x, labels + 2)


@SMALLS.add
def wrong_argument(x: Tensor) -> Any:
    return (x * 2).sum(dimension=1)


@SMALLS.add
def no_such_device(x: Tensor) -> Any:
    return x.to("mps")


@SMALLS.add
def no_cuda(x: Tensor) -> Any:
    return x if torch.cuda.is_available() else x.cuda()


@SMALLS.add
def pinned(x: Tensor) -> Any:
    return x if torch.cuda.is_available() else (x * 2).is_pinned()


@pytest.mark.sanitize
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", SMALLS)
def test_equals_eager(name: str, requires_grad: bool) -> None:
    SMALLS[name].check(requires_grad)


def pending() -> Tensor:
    return koila.lazy(torch.arange(6.0).view(3, 2) / 7) * 3


def known() -> Tensor:
    return torch.arange(6.0).view(3, 2) / 7 * 3


def test_repr_computes_nothing() -> None:
    lazy = pending()
    assert "pending" in repr(lazy)
    assert "pending" in repr([lazy]), "the second time, in a list"
    assert "0.4286" not in repr(lazy)
    lazy.sum().item()
    assert "0.4286" in repr(lazy), "known once it is read"


def test_repr_of_a_frame_computes_nothing() -> None:
    """What a debugger does: show all that is there, locals and attributes."""
    lazy = pending()
    shown = [repr(value) for value in locals().values()]
    assert all("0.4286" not in text for text in shown)
    assert "pending" in repr(lazy)


def test_asking_its_kind_computes_nothing() -> None:
    lazy = pending()
    assert isinstance(lazy, Tensor)
    assert torch.is_tensor(lazy)
    assert koila.is_lazy(lazy)
    assert lazy.shape == (3, 2)
    assert lazy.dtype == torch.float32
    assert lazy.stride() == (2, 1)
    assert not lazy.requires_grad
    assert len(lazy) == 3
    assert hash(lazy) == hash(lazy)
    assert "pending" in repr(lazy)


@pytest.mark.parametrize(
    "move", [lambda x: x.t(), lambda x: x.expand(5, 3, 2).permute(2, 0, 1), lambda x: x[:, :, None]]
)
def test_what_is_read_in_chunks_is_laid_out_as_the_whole(move: Any) -> None:
    """A view that is legal for the whole stays legal, and as_strided sees the same memory."""
    lazy, wanted = move(pending()).exp(), move(known()).exp()
    with split(2):
        lazy.sum().item()
    assert lazy.stride() == wanted.stride()
    indices = wanted.numel() // 2, 1
    assert lazy.as_strided(indices, (2, 1)).tolist() == wanted.as_strided(indices, (2, 1)).tolist()


@pytest.mark.parametrize("show", [str, format, "{}".format, "{:}".format])
def test_text_is_eagers(show: Any) -> None:
    assert show(pending()) == show(known())


def test_print_is_eagers() -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print(pending(), pending().sum())
    assert out.getvalue() == f"{known()!s} {known().sum()!s}\n"


def test_number_in_a_string_is_eagers() -> None:
    total, wanted = pending().sum(), known().sum()
    assert f"{total:.3f} {total:>9.1e}" == f"{wanted:.3f} {wanted:>9.1e}"
    assert f"{total!s}" == f"{wanted!s}"


def test_text_with_a_gradient_shows_the_numbers() -> None:
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    assert "0.4286" in str(koila.lazy(x) * 3 / 7)


def test_keys_attributes_and_weak_references() -> None:
    lazy = pending()
    table = {lazy: "found"}
    assert table[lazy] == "found"
    assert lazy in {lazy}
    lazy.note = "kept"  # type: ignore[attr-defined]
    assert lazy.note == "kept"  # type: ignore[attr-defined]
    assert lazy.__dict__["note"] == "kept"
    assert "pending" in repr(lazy)
    another = lazy * 2
    assert not hasattr(another, "note")
    assert len({lazy, another}) == 2


def test_attributes_die_with_their_tensor() -> None:
    """A lazy made after another died does not take over what hung on it."""
    for _ in range(20):
        lazy = pending()
        assert not hasattr(lazy, "note")
        lazy.note = "mine"  # type: ignore[attr-defined]
        del lazy


def test_weak_reference_dies() -> None:
    lazy = pending()
    deaths: list[Any] = []
    reference = weakref.ref(lazy, deaths.append)
    assert reference() is lazy
    del lazy
    gc.collect()
    assert reference() is None
    assert deaths == [reference]


def test_weak_table() -> None:
    table = WeakIdKeyDictionary()
    lazy = pending()
    table[lazy] = "here"
    assert table[lazy] == "here"
    del lazy
    gc.collect()
    assert not table


def test_copies_are_plain() -> None:
    lazy = pending()
    file = io.BytesIO()
    torch.save({"a": lazy}, file)
    copies = {
        "deepcopy": copy.deepcopy(lazy),
        "pickle": pickle.loads(pickle.dumps(lazy)),
        "save": torch.load(io.BytesIO(file.getvalue()))["a"],
    }
    for name, value in copies.items():
        assert type(value) is Tensor, name
        assert torch.equal(value, known()), name


@pytest.mark.parametrize("chunks", [None, 1, 3])
def test_a_value_with_a_graph_has_no_deep_copy(chunks: int | None) -> None:
    """As in torch: the gradient of its copy would be lost."""
    weight = torch.ones(3, requires_grad=True)
    with koila.config(chunks=chunks):
        value = koila.lazy(torch.randn(7, 3)) * weight
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
                copy.deepcopy([value])
        value.sum().backward()
    assert torch.equal(copy.deepcopy([value.detach()])[0], value.detach())


def test_another_thread_reads() -> None:
    lazy = pending()
    read: list[Any] = []
    thread = threading.Thread(target=lambda: read.extend([lazy.tolist(), (lazy + 1).sum().item()]))
    thread.start()
    thread.join(60)
    assert read == [known().tolist(), (known() + 1).sum().item()]


def test_another_thread_differentiates() -> None:
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    loss = (koila.lazy(x) ** 2).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join(60)
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach())


def test_threads_record_apart() -> None:
    """Eight threads, each with its own lazies, all right."""
    found: dict[int, float] = {}

    def work(number: int) -> None:
        lazy = koila.lazy(torch.full((5, 2), float(number)))
        for _ in range(50):
            lazy = lazy + 1
        found[number] = lazy.sum().item()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {i: 10.0 * (i + 50) for i in range(8)}


def test_threads_take_turns() -> None:
    """Two threads record a call each, in turn, and each goes on where it was."""
    turns = threading.Barrier(2)
    found: dict[int, float] = {}

    def work(number: int) -> None:
        lazy = koila.lazy(torch.full((5, 2), float(number)))
        for turn in range(20):
            turns.wait(60)
            if turn % 2 == number:
                lazy = torch.add(lazy, 1) + 1
        turns.wait(60)
        found[number] = lazy.sum().item()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {i: 10.0 * (i + 20) for i in range(2)}


@pytest.mark.parametrize("chunks", [None, 1, 3])
@pytest.mark.parametrize("by", [copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_require_gradients_as_the_original(by: Any, chunks: int | None) -> None:
    """As in torch a copy is a leaf; one can go on from it."""

    def story(lazy: Any) -> Any:
        torch.manual_seed(0)
        w = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        x = lazy(torch.randn(7, 4, dtype=torch.float64))
        h = x @ w
        made, plain = by(h), by(h.detach())
        made.square().sum().backward()
        flags = [made.requires_grad, made.is_leaf, plain.requires_grad, type(made) is Tensor]
        h.sum().backward()
        return flags, made.grad, w.grad

    want = story(eager)
    with koila.config(chunks=chunks):
        got = story(koila.lazy)
    assert got[0] == want[0]
    assert_seen(got[1:], want[1:], "a copy", exact_bits=is_whole(chunks))


def test_a_tensor_given_twice_is_one_lazy() -> None:
    x, y = torch.ones(4, 2), torch.zeros(4)
    a, b, c = koila.lazy(x, y, x)
    assert a is c and a is not b
    found = koila.lazy({"first": x, "both": [x, y]}, batch=0)
    assert found["first"] is found["both"][0]
    square = torch.ones(4, 4)
    first, second = koila.lazy([square, square], batch=[0, 1])
    assert first is not second
    assert first is not a, "another batch"
