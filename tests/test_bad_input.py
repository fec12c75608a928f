# SPDX-License-Identifier: Apache-2.0
"""What goes wrong says what, where and with which sizes, and leaves everything as it was."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
import re
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.flop_counter import flop_registry

import koila
from limits import there
from oracle import assert_same_story, gradients, split, unchanged
from programs_vision import ConvBatchNorm, DropoutMlp, Mlp
from stories import N_ROWS, each_split, make, rows, train

pytestmark = pytest.mark.sanitize

# What lazy() is given ---------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_batches_that_disagree(nested: bool) -> None:
    """Tensors of different sizes in one call: each is listed with its size."""
    x, y, z = torch.randn(11, 6), torch.zeros(10), torch.zeros(11, 2, 2)
    objs: Any = ({"x": x, "rest": [y, z]},) if nested else (x, y, z)
    with pytest.raises(ValueError, match="11") as caught:
        koila.lazy(*objs)
    assert "10" in str(caught.value)
    if nested:
        assert "x" in str(caught.value)
        assert "rest" in str(caught.value)


@pytest.mark.parametrize("shape", [(4,), (4, 5)])
def test_batch_dim_that_is_not_there(shape: tuple[int, ...]) -> None:
    """A tensor without the dim that holds the rows is refused with its shape."""
    with pytest.raises((ValueError, IndexError), match="batch"):
        koila.lazy(torch.zeros(shape), batch=len(shape))


def test_batch_dim_that_is_no_number() -> None:
    """The dim of the rows is an int."""
    with pytest.raises((TypeError, ValueError), match="batch"):
        koila.lazy(torch.zeros(3), batch="0")


@pytest.mark.parametrize(
    "objs",
    [
        (),
        (5,),
        ("text", None),
        (np.ones((3, 2)),),
        ([],),
        ({"x": [1, 2]},),
        (range(3), np.float64(2)),
    ],
    ids=str,
)
def test_nothing_to_make_lazy(objs: tuple[Any, ...]) -> None:
    """Without a tensor all stays as it is, which is said with the line of the call."""
    with pytest.warns(UserWarning, match="no tensor is in what it was given") as caught:
        made = koila.lazy(*objs)
    assert [warning.filename for warning in caught] == [__file__]
    assert made is objs[0] if len(objs) == 1 else made == objs
    for obj in objs:
        assert type(obj).__name__ in str(caught[0].message)


def test_what_is_beside_a_tensor_passes_through() -> None:
    """Silently: numbers, texts and arrays belong to many batches."""
    x, ids, name = koila.lazy(torch.ones(3), np.arange(3), "train")
    assert koila.is_lazy(x) and type(ids) is np.ndarray and name == "train"
    with koila.off():
        assert koila.lazy(5) == 5


def test_an_int_beside_tensors_is_told_as_a_dim_that_was_meant() -> None:
    with pytest.warns(UserWarning, match="to name the dim of the samples, write batch=1") as caught:
        x, one = koila.lazy(torch.ones(3, 8), 1)
    assert [warning.filename for warning in caught] == [__file__]
    assert koila.is_lazy(x) and one == 1
    assert koila.lazy(torch.ones(3, 8), 2)[1] == 2  # no dim


def test_a_list_of_batches_is_told_how_to_pass_them() -> None:
    batches = [(torch.ones(3, 8), torch.ones(3)), (torch.ones(2, 8), torch.ones(2))]
    with pytest.raises(ValueError, match=r"a list is one batch; of a list of batches, give iter"):
        koila.lazy(batches)
    assert all(koila.is_lazy(x) and koila.is_lazy(y) for x, y in koila.lazy(iter(batches)))


@pytest.mark.parametrize("name", ["explain", "plan"])
@pytest.mark.parametrize("losses", [(), (None,), ("loss",), ([],), ([3.0],)], ids=str)
def test_what_is_no_loss(name: str, losses: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=rf"^koila\.{name}: give it a loss, a lazy tensor"):
        getattr(koila, name)(*losses)


def test_the_type_is_not_called() -> None:
    for args in ((), (torch.ones(3),)):
        with pytest.raises(TypeError, match=r"koila\.lazy\(tensor\) makes a lazy tensor"):
            koila.LazyTensor(*args)


def test_batch_dim_of_numpy() -> None:
    x = torch.ones(2, 5)
    assert koila.explain(koila.lazy(x, batch=np.int64(1)) * 2, full=True).count("5 samples") == 1
    assert koila.is_lazy(koila.lazy([x, x], batch=[np.int32(1), 1])[1])
    for wrong in (True, torch.tensor(0), 0.0, np.float32(0)):
        with pytest.raises(ValueError, match="batch= for input must be an int or None"):
            koila.lazy(x, batch=wrong)


@dataclasses.dataclass
class Batch:
    """What a data pipeline may hand on before a field is set."""

    x: Tensor
    size: int = dataclasses.field(init=False)


def test_a_field_that_is_not_set_yet() -> None:
    made = koila.lazy(Batch(torch.ones(3)))
    assert koila.is_lazy(made.x) and not hasattr(made, "size")
    made.size = 3
    assert koila.lazy(made).size == 3


def quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(rows(6).float(), 0.1, 0, torch.qint8)


def nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [torch.full((n, 3), n + 0.5) for n in (2, 4, 1)]
        return torch.nested.nested_tensor(parts, layout=layout)


class Hundred(Tensor):
    """A tensor whose products are not what torch says."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        return made.add(100) if func in (Tensor.mul, torch.mul) else made


# How a batch is made, and what is done with it.
ODD: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "0-dim": (lambda: torch.tensor(3.0), lambda x: x * 2),
    "no rows": (lambda: rows(6)[:0], lambda x: (x * 2).sum() + x.sum(1).numel()),
    "no features": (lambda: rows(0), lambda x: (x * 2).sum()),
    "sparse": (
        lambda: rows(6).relu().to_sparse(),
        lambda x: torch.sparse.mm(x, torch.ones(6, 2).double()).sum(),
    ),
    "nested": (lambda: nested(torch.strided), lambda x: (x * 2).to_padded_tensor(0.0).sum()),
    "jagged": (lambda: nested(torch.jagged), lambda x: (x * 2).values().sum()),
    "quantized": (quantized, lambda x: x.dequantize().mul(2).sum()),
    "mkldnn": (lambda: rows(6).float().to_mkldnn(), lambda x: x.to_dense().sum()),
    "complex": (lambda: torch.view_as_complex(rows(6, 2)), lambda x: (x * 2).abs().sum()),
    "bool": (lambda: rows(6) > 0, lambda x: x.sum()),
    "float8": (lambda: rows(6).to(torch.float8_e4m3fn), lambda x: x.float().sum()),
    "expanded": (lambda: rows(6)[:1].expand(N_ROWS, 6), lambda x: (x * 2).sum()),
    "of a class of its own": (lambda: rows(6).as_subclass(Hundred), lambda x: (x * 2).sum()),
    "parameter": (lambda: nn.Parameter(rows(6)), lambda x: (x * 2).sum()),
}


UNCUT = {
    "0-dim": "it has no rows",
    "no rows": "there are none to cut",
    **dict.fromkeys(("nested", "jagged"), "the core has no words for such a tensor"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
@each_split
def test_odd_batches(chunks: int | None, name: str) -> None:
    """They run as in eager, in chunks where they have rows."""
    make_batch, call = ODD[name]
    batch = make_batch()
    wanted = call(batch).item()
    with split(chunks, whole=UNCUT.get(name, "")):
        made = call(koila.lazy(batch)).item()
    assert math.isclose(made, wanted, rel_tol=1e-6, abs_tol=1e-6)


@each_split
def test_a_batch_that_is_not_a_leaf(chunks: int | None) -> None:
    """Gradients go on through what made it."""

    def story(lazy: Any) -> Any:
        model, x, y = make()
        w = torch.ones(6, dtype=x.dtype, requires_grad=True)
        h = x * w
        F.cross_entropy(model(lazy(h)), y).backward()
        return gradients(model), w.grad

    assert_same_story(story, chunks)


def test_a_meta_batch_stays_without_numbers() -> None:
    made = (koila.lazy(torch.ones(4, 3, device="meta")) * 2).sum()
    assert made.device.type == "meta" and made.shape == ()
    with pytest.raises(RuntimeError, match="meta"):
        made.item()


@pytest.mark.parametrize("gradient", ["text", 5, [1.0]], ids=str)
@each_split
def test_a_gradient_that_is_no_tensor(chunks: int | None, gradient: Any) -> None:
    """torch's own type and text, and the step can still be taken."""
    w = torch.ones(6, dtype=torch.float64, requires_grad=True)
    with pytest.raises(Exception, match=r".") as eagerly:
        (rows(6) * w).sum().backward(gradient)
    with split(chunks, whole="torch refuses it, who has the whole program then"):
        total = (koila.lazy(rows(6)) * w).sum()
        with pytest.raises(type(eagerly.value)) as lazily:
            total.backward(gradient)
        assert str(lazily.value) == str(eagerly.value)
        total.backward()
    assert w.grad is not None


@each_split
def test_what_lazy_refuses_costs_nothing(chunks: int | None) -> None:
    """What was recorded before waits on."""
    model, x, y = make()
    with split(chunks):
        a, b = koila.lazy(x, y)
        loss = F.cross_entropy(model(a), b)
        for objs, batch in (((x, y[1:]), 0), ((x,), 7), ((x,), "0"), (({"x": x},), {"y": 0})):
            with pytest.raises(ValueError, match="lazy: "):
                koila.lazy(*objs, batch=batch)
        with pytest.warns(UserWarning, match="no tensor"):
            koila.lazy(x.numpy())
        with pytest.raises(TypeError, match="give it a loss"):
            koila.explain("text")
        assert koila._core.real(loss) is None
        loss.backward()
    lazily = gradients(model)
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(lazily, gradients(model))


def collate(items: list[Tensor]) -> Tensor:
    made: Tensor = koila.lazy(torch.stack(items))
    return made


@pytest.mark.parametrize("workers", [0, 1])
def test_lazy_in_a_worker_of_a_data_loader(workers: int) -> None:
    """Its tensors come back plain: that is said there, and what to do instead."""
    rows = [torch.full((2,), float(i)) for i in range(4)]
    # A forked worker has this test's filter, which makes an error of a warning.
    start = {"multiprocessing_context": "fork"} if workers else {}
    loader: Any = DataLoader(rows, 2, num_workers=workers, collate_fn=collate, **start)  # type: ignore[arg-type]
    if workers == 0:
        assert [koila.is_lazy(x) for x in loader] == [True, True]
    else:
        with pytest.raises(UserWarning, match=r"call lazy\(\) on the batch in the training loop"):
            list(loader)


def test_lazy_in_a_worker_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(id=0))
    said: list[bool] = []

    def call() -> None:  # in a thread of its own: nothing has been said there
        for _ in range(3):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                koila.lazy(torch.ones(3))
            said.append(bool(caught))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert said == [True, False, False]


@pytest.mark.parametrize(
    "option", [{"chunks": 0}, {"chunks": -1}, {"memory_limit": "lots"}], ids=str
)
def test_bad_configuration(option: dict[str, Any]) -> None:
    """A configuration that cannot be is refused where it is written, and does not stay."""
    with pytest.raises((ValueError, TypeError)):
        koila.config(**option)
    with pytest.raises(TypeError):
        koila.config(chunk=3)
    with koila.config(chunks=3):
        pass


@each_split
def test_empty_batch(chunks: int | None) -> None:
    """No rows at all: a sum is zero and a mean NaN, as in eager."""

    def story(lazy: Any) -> Any:
        model, x, y = make(n_rows=0)
        x, y = lazy(x, y)
        out = model(x)
        loss = out.sum() + F.cross_entropy(out, y, reduction="sum")
        loss.backward()
        return loss, out, F.cross_entropy(model(x), y), gradients(model)

    assert_same_story(story, chunks, whole="there are no rows")


# Errors in the model ----------------------------------------------------------------------------

ILLEGAL: dict[str, Callable[[Mlp, Tensor, Tensor], Any]] = {
    "linear": lambda m, x, y: m.head(x),
    "matmul": lambda m, x, y: x @ torch.zeros(7, 3, dtype=x.dtype),
    "add": lambda m, x, y: x + torch.zeros(4, dtype=x.dtype),
    "add_batch": lambda m, x, y: x + torch.zeros(N_ROWS - 1, 6, dtype=x.dtype),
    "cat": lambda m, x, y: torch.cat([x, m(x)], dim=0),
    "cat_dims": lambda m, x, y: torch.cat([x, x.sum(1)], 1),
    "stack": lambda m, x, y: torch.stack([x, m(x)]),
    "view": lambda m, x, y: x.view(7, -1),
    "view_stride": lambda m, x, y: m.body(x).t().view(-1),
    "reshape": lambda m, x, y: x.reshape(-1, 5),
    "transpose": lambda m, x, y: x.transpose(0, 3),
    "permute": lambda m, x, y: x.permute(0, 2),
    "sum": lambda m, x, y: x.sum(dim=2),
    "softmax": lambda m, x, y: x.softmax(dim=-3),
    "index": lambda m, x, y: x[:, 6],
    "squeeze": lambda m, x, y: x.squeeze(2),
    "expand": lambda m, x, y: x.expand(3, 4),
    "conv2d": lambda m, x, y: F.conv2d(x[:, :, None, None], torch.zeros(2, 3, 1, 1, dtype=x.dtype)),
    "labels": lambda m, x, y: F.cross_entropy(m(x), y[:-1]),
    "label_dtype": lambda m, x, y: F.nll_loss(m(x).log_softmax(-1), y.to(x.dtype)),
    "dtypes": lambda m, x, y: x.float() @ m.body[0].weight.t(),
    "mse": lambda m, x, y: F.binary_cross_entropy_with_logits(m(x), x),
    "embedding": lambda m, x, y: F.embedding(x, m.head.weight),
    "layer_norm": lambda m, x, y: F.layer_norm(x, (5,)),
    "in_place": lambda m, x, y: (x * 1).add_(torch.zeros(2, N_ROWS, 6, dtype=x.dtype)),
    "in_place_dtype": lambda m, x, y: (y * 1).add_(0.5),
    "in_place_leaf": lambda m, x, y: m.head.weight.mul_(x.sum()),
    "logical": lambda m, x, y: ~x,
    "argument": lambda m, x, y: x.sum(dims=1),
    "no_option": lambda m, x, y: F.cross_entropy(m(x), y, reduction="average"),
    "bool": lambda m, x, y: bool(m(x)),
    "item": lambda m, x, y: m(x).item(),
    "numpy": lambda m, x, y: m(x).numpy(),
    "split": lambda m, x, y: x.split([2, 3], dim=1),
    "einsum": lambda m, x, y: torch.einsum("bi,ij->bj", x, torch.zeros(5, 2, dtype=x.dtype)),
    "where": lambda m, x, y: torch.where(x > 0, x, torch.zeros(5, dtype=x.dtype)),
    "gather": lambda m, x, y: x.gather(2, y[:, None]),
    "bmm": lambda m, x, y: torch.bmm(x, x),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", ILLEGAL)
@each_split
def test_illegal_calls(chunks: int | None, name: str) -> None:
    """An illegal call raises torch's own type and text, at the call itself."""
    model, x, y = make()
    with pytest.raises(Exception, match=r".") as eagerly:
        ILLEGAL[name](model, x, y)
    with split(chunks):
        a, b = koila.lazy(x, y)
        with unchanged(model), pytest.raises(type(eagerly.value)) as lazily:
            ILLEGAL[name](model, a, b)
        F.cross_entropy(model(a), b).backward()
    wanted = str(eagerly.value).splitlines()[0]
    assert str(lazily.value).splitlines()[0] == wanted


@each_split
def test_value_that_is_illegal(chunks: int | None) -> None:
    """A label out of bounds is found when it is looked at, in torch's own words."""
    model, x, y = make()
    y[4] = 7

    def step() -> None:
        a, b = koila.lazy(x, y)
        F.cross_entropy(model(a), b).backward()

    with split(chunks), unchanged(model), pytest.raises(IndexError, match="Target 7 is out of"):
        step()


@each_split
def test_gradient_of_what_was_overwritten(chunks: int | None) -> None:
    """A tensor that backward needs and an in-place call changed: torch's own error."""
    model, x, y = make()
    with split(chunks, whole="it is refused before anything runs" if chunks else ""):
        a, b = koila.lazy(x, y)
        h = model.body(a).exp()
        h.mul_(2)
        loss = F.cross_entropy(model.head(h), b)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@each_split
def test_backward_twice(chunks: int | None) -> None:
    """A second backward() without retain_graph is torch's own error, and adds nothing."""
    model, x, y = make()
    with split(chunks, partly="the second backward is torch's own"):
        a, b = koila.lazy(x, y)
        out = model(a)
        loss = F.cross_entropy(out, b)
        loss.backward()
        with unchanged(model), pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        other = out.pow(2).mean()
        with unchanged(model), pytest.raises(RuntimeError, match="second time"):
            other.backward()


@each_split
def test_backward_twice_through_calls_that_save_nothing(chunks: int | None) -> None:
    """Torch goes through such a graph again; koila, in chunks, says that it keeps none."""
    model, x, _ = make()
    with koila.config(chunks=chunks):
        first = model(koila.lazy(x)).sum()
        loss = first + first
        loss.backward()
        if chunks is None or chunks == 1:
            assert torch.autograd.grad(loss, first)[0] == 2
        else:
            with unchanged(model), pytest.raises(koila.KoilaError, match="calls saved nothing"):
                torch.autograd.grad(loss, first)


# Between record and replay ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["body.0.weight", "head.bias"])
@each_split
def test_parameter_changed_before_backward(chunks: int | None, name: str) -> None:
    """A parameter changed in place after it was recorded is named, with both lines."""
    model, x, y = make()
    with split(chunks, whole="it is refused"):
        a, b = koila.lazy(x, y)
        loss = F.cross_entropy(model(a), b)
        parameter = model.get_parameter(name)
        with torch.no_grad():
            torch.ops.aten.mul_(parameter, 2)
        with unchanged(model), pytest.raises(koila.KoilaError) as caught:
            loss.backward()
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert ", ".join(map(str, parameter.shape)) in text
    assert re.search(r"\.py:\d+", text), "the line of the call is named"


@each_split
def test_plain_input_changed_before_backward(chunks: int | None) -> None:
    """So is a plain tensor of the user that the step reads."""
    model, x, y = make()
    scale = torch.rand(N_ROWS, 1, dtype=torch.float64)
    with split(chunks, whole="it is refused"):
        a, b = koila.lazy(x, y)
        loss = F.cross_entropy(model(a) * scale, b)
        torch.ops.aten.zero_(scale)
        with unchanged(model), pytest.raises(koila.KoilaError, match=f"{N_ROWS}, 1"):
            loss.backward()


@each_split
def test_failure_does_not_reach_the_next_step(chunks: int | None) -> None:
    """A step that failed is over, though its exception keeps it alive, as a debugger would."""
    failures = []

    def story(lazy: Any) -> Any:
        model, x, y = make()
        with koila.config(chunks=chunks):  # nothing runs
            a, b = koila.lazy(x, y)
            h = model.body(a)
            loss = F.cross_entropy(model.head(h), b)
            with torch.no_grad():
                torch.ops.aten.mul_(model.body[0].bias, 1.5)
            try:
                loss.backward()
            except koila.KoilaError as failure:
                failures.append((failure, h))
        model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            c, d = lazy(x * 2, y)
            train(model, optimizer, c, d)
        return model

    assert_same_story(story, chunks)


# Memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", ["backward", "item"])
def test_limit_too_small_for_one_row(read: str) -> None:
    """Where one row does not fit the refusal names the operator and its bytes."""
    model = Mlp(n_hidden=64).double()
    x, y = rows(6), torch.randint(0, 5, (N_ROWS,))
    with koila.config(memory_limit="16KiB"), unchanged(model, tensors=(x, y)):
        a, b = koila.lazy(x, y)
        loss = F.cross_entropy(model(a), b)
        words = r"(?s)at least .*: set memory_limit=.*one sample at a time needs .* needs most: \w+"
        with pytest.raises(torch.OutOfMemoryError, match=words) as caught:
            loss.backward() if read == "backward" else loss.item()
    assert isinstance(caught.value, koila.KoilaError)
    assert any(unit in str(caught.value) for unit in ("byte", "KiB", "MiB", " B"))


def test_a_refusal_at_a_call_that_is_not_recorded() -> None:
    """It shows the user's frames alone, and no other exception before it."""
    net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    x, times = koila.lazy(torch.randn(512, 64), torch.randint(1, 4, (512,)))
    limit = koila.config(memory_limit=there() + 2**16)
    with limit, pytest.raises(koila.MemoryLimitError, match="at least") as caught:
        torch.repeat_interleave(net(x), times, dim=0)
    assert paths_of(caught) == [__file__]
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize("read", ["backward", "item"])
def test_an_error_of_torch_hides_koilas_frames(read: str) -> None:
    """The same error, with the user's frames; torch's where it raised, and the line of the call."""
    model, x = Mlp(n_hidden=64), rows(6).float()
    y = torch.randint(0, 5, (N_ROWS,))
    y[-1] = 5
    with koila.config(chunks=3):
        loss = F.cross_entropy(model(koila.lazy(x)), koila.lazy(y))
        with pytest.raises(IndexError, match="out of bounds") as caught:
            loss.backward() if read == "backward" else loss.item()
    assert paths_of(caught) == [__file__]
    assert re.fullmatch(rf"koila: recorded at .*{__file__}:\d+", caught.value.__notes__[0])


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x @ torch.ones(7, 2),
        lambda x: x.view(5, -1, 4),
        lambda x: torch.cat([x, x[:, :2]]),
        lambda x: F.linear(x, torch.ones(2, 3)),
        lambda x: torch.hstack([x, x[:1]]),
        lambda x: torch.dsplit(x, 3),
        lambda x: torch.hsplit(x, 4),
    ],
)
def test_an_illegal_call_shows_the_frames_of_eager(
    call: Callable[[Tensor], Tensor],
) -> None:
    """Its type and text are torch's, and no frame of koila is in its traceback."""
    x = torch.ones(N_ROWS, 6)
    with pytest.raises(RuntimeError) as wanted:
        call(x)
    with pytest.raises(RuntimeError) as caught:
        call(koila.lazy(x))
    assert paths_of(caught) == paths_of(wanted) == [__file__, __file__]
    assert (caught.type, str(caught.value)) == (wanted.type, str(wanted.value))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.linalg.inv(x.T @ x * 0).tolist(),
        lambda x: float(torch.linalg.cholesky(-x.T @ x).sum()),
        lambda x: x.to("nowhere"),
        lambda x: x.cuda(10**3) if torch.cuda.is_available() else x.cuda(),
        lambda x: torch.bernoulli(x * 100).sum().item(),
        lambda x: x[0, 0].item() // torch.zeros(()).int().item(),
        lambda x: x.new_tensor([[1, 2], [3]]),
    ],
)
def test_an_error_of_what_runs_at_once_shows_the_frames_of_eager(
    call: Callable[[Tensor], Tensor],
) -> None:
    x = torch.ones(N_ROWS, 6)
    with pytest.raises(Exception) as wanted:
        call(x)
    with pytest.raises(wanted.type) as caught:
        call(koila.lazy(x))
    assert paths_of(caught) == paths_of(wanted)


@pytest.mark.parametrize("error", [koila.KoilaError, koila.StaleError, koila.MemoryLimitError])
def test_an_error_has_the_name_that_scripts_catch(error: type[BaseException]) -> None:
    assert f"{error.__module__}.{error.__qualname__}" == f"koila.{error.__name__}"
    assert type(pickle.loads(pickle.dumps(error("why")))) is error


def test_an_error_of_a_hook_keeps_its_frames() -> None:
    """And those of torch between koila's and the hook's, as in eager."""
    model = Mlp(n_hidden=64)

    def fail(gradient: Tensor) -> Tensor:
        raise StopError(str(F.softmax(gradient, 0).shape))

    next(model.parameters()).register_hook(fail)
    with koila.config(chunks=3):
        loss = model(koila.lazy(rows(6).float())).sum()
        with pytest.raises(StopError) as caught:
            loss.backward()
    assert paths_of(caught) == [__file__, torch.autograd.graph.__file__, __file__]


def test_a_mistake_of_koilas_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(koila.running.replay.Replay, "collect", None)
    with koila.config(chunks=3), pytest.raises(TypeError) as caught:
        koila.lazy(rows(6)).sin().sum().item()
    assert paths_of(caught)[-1] == koila.running.interpret.__file__


def paths_of(caught: pytest.ExceptionInfo[BaseException]) -> list[str]:
    """The files of a traceback, but for torch's on the way in."""
    into = (torch.overrides.__file__, torch._tensor.__file__)
    return [str(frame.path) for frame in caught.traceback if str(frame.path) not in into]


# Nothing half done ------------------------------------------------------------------------------


class StopError(Exception):
    """What a user's code raises in the middle of a step."""


class FailAt(TorchDispatchMode):
    """Raise at the nth matrix product or convolution that runs, forward or backward."""

    sees_koila = True

    def __init__(self, n: int, error: type[BaseException]) -> None:
        super().__init__()
        self.left, self.error = n, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in flop_registry:
            self.left -= 1
            if self.left == 0:
                raise self.error("in the middle of a step")
        return func(*args, **(kwargs or {}))


def noisy_vectors() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """Return a model that draws, its input, and a loss with a barrier."""
    return DropoutMlp().double(), rows(6), lambda out: out.pow(2).mean().sqrt()


def normed_images() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """Return a model with statistics, its input, and a loss without a barrier."""
    return ConvBatchNorm().double(), rows(3, 8, 8), lambda out: out.pow(2).mean()


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopError])
@pytest.mark.parametrize("make_model", [noisy_vectors, normed_images])
@pytest.mark.parametrize("chunks", [2, 3])
def test_failure_at_every_product(
    chunks: int, make_model: Callable[..., Any], error: type[BaseException]
) -> None:
    """Wherever a split step is interrupted no gradient, buffer or generator has moved."""

    def recorded() -> tuple[nn.Module, Tensor, Tensor]:
        torch.manual_seed(0)
        model, x, criterion = make_model()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return model, x, criterion(model(koila.lazy(x)))

    def finish(loss: Tensor) -> None:
        loss.backward()

    with split(chunks):
        _, _, loss = recorded()
        with FailAt(0, error) as counter:
            finish(loss)
        assert counter.left < -3, "there are products to fail at"
        for n in range(1, 1 - counter.left):
            model, x, loss = recorded()
            with unchanged(model, tensors=(x,)), pytest.raises(error), FailAt(n, error):
                finish(loss)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("same_loss", [True, False])
def test_step_after_a_failure(chunks: int, same_loss: bool) -> None:
    """After a failure the same loss, or the same step, gives eager's numbers."""

    def story(lazy: Any) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        loss = F.cross_entropy(model(x), y)
        if lazy is koila.lazy:
            with pytest.raises(StopError), FailAt(4, StopError):
                loss.backward()
            if not same_loss:
                loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_failed_program_is_left_alone(chunks: int) -> None:
    """It is still held, and must not run again in another; asked for by name, it raises again."""
    weight = torch.ones(3, 3, dtype=torch.float64, requires_grad=True)
    with split(chunks):
        x, y = koila.lazy(torch.ones(5, 3, dtype=torch.float64), torch.full((5,), 7))
        loss = torch.nn.functional.cross_entropy(x @ weight, y)
        with pytest.raises(IndexError):
            loss.backward()
        z = koila.lazy(torch.ones(5, 3, dtype=torch.float64))
        kept = z @ weight
        assert kept[kept > 1].sum().item() == 45
        kept.sum().backward()
        assert weight.grad is not None and weight.grad.eq(5).all()
        for _ in range(2):
            with pytest.raises(IndexError):
                loss.item()
            with pytest.raises(IndexError):
                (loss * 2).item()


def test_a_wrong_dim_is_told_with_what_to_write() -> None:
    """And what it says to write works."""
    x, y, z = torch.ones(3, 8), torch.ones(8), torch.ones(8, 20)
    for wrong in (0, 1):
        with pytest.raises(ValueError, match=r"if the batch has 8 samples, write batch=\(1, 0\)"):
            koila.lazy(x, y, batch=wrong)
    assert all(map(koila.is_lazy, koila.lazy(x, y, batch=(1, 0))))
    for wrong_dims in (1, (1, 0)):
        with pytest.raises(ValueError, match=r"if the batch has 8 samples, write batch=0$"):
            koila.lazy(z, y, batch=wrong_dims)
    with pytest.raises(ValueError, match="give as many samples of each"):
        koila.lazy(x, y[:7])


def test_the_default_dim_has_a_name_in_docs() -> None:
    assert "batch: Any = DIM_0" in inspect.getsource(koila.lazy)
    assert inspect.signature(koila.lazy).parameters["batch"].default == 0
