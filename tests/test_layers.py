# SPDX-License-Identifier: Apache-2.0
"""What each layer keeps for backward: as much as torch saves, under the names of the modules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from koila.staged import layers
from koila.staged.program import Program
from limits import there


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.attention = nn.MultiheadAttention(size, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.drop(self.mlp(x))


class Language(nn.Module):
    """Its embedding and its head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten(0, 1)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 50)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.second(x) + x)
        return self.head(x.mean((2, 3)))


Made = tuple[nn.Module, Tensor, Tensor]


def language() -> Made:
    return Language(), torch.randint(0, 50, (7, 16)), torch.randint(0, 50, (7 * 16,))


def images() -> Made:
    return Images(), torch.randn(7, 3, 8, 8), torch.randint(0, 50, (7,))


def bytes_saved(loss: Callable[[], Tensor], given: Iterable[Tensor]) -> int:
    """What torch saves for backward of tensors that were not there before."""
    known = {tensor.untyped_storage()._cdata for tensor in given}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss()
    return sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in known)


@pytest.mark.parametrize("make", [language, images])
def test_as_much_as_torch_saves(make: Callable[[], Made]) -> None:
    model, x, y = make()
    want = bytes_saved(lambda: F.cross_entropy(model(x), y), (*model.parameters(), x, y))
    lazy_x, lazy_y = koila.lazy(x), koila.lazy(y) if len(y) == len(x) else y
    found = layers.of(Program([F.cross_entropy(model(lazy_x), lazy_y)]))
    assert sum(layer.n_bytes for layer in found) == pytest.approx(want, rel=0.01)


def test_calls_are_under_the_names_of_their_modules() -> None:
    model, x, _ = language()
    found = {one.name: one for one in layers.of(Program([model(koila.lazy(x)).sum()]))}
    names = [f"blocks.{i}.{part}" for i in (0, 1) for part in ("norm", "attention", "mlp.0")]
    assert {"embedding", "head", *names} <= set(found), set(found)
    assert found["embedding"].n_calls == 1 and found["embedding"].kind == "Embedding"
    wide = 16 * 4 * 32 * 4  # of one sample: what the first linear makes, and GELU of it
    assert found["blocks.1.mlp.0"].per_sample == found["blocks.1.mlp.1"].per_sample == wide
    assert found["blocks.1.mlp.1"].kind == "GELU"


def test_what_is_made_of_a_models_result_is_no_layer() -> None:
    """Also on the line that calls the model; modules without parameters have their own names."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Flatten(), nn.Dropout(0.5), nn.Tanh(), nn.ReLU())
    found = {
        one.name: one for one in layers.of(Program([model(koila.lazy(torch.ones(7, 6))).exp()]))
    }
    (line,) = (name for name in found if name.startswith(__file__))
    assert set(found) == {"0", "2", "3", "4", line}  # Flatten had nothing to do
    assert found[line].n_calls == 1 and found["3"].kind == "Tanh"


def gated(x: Tensor) -> Tensor:
    return x.sigmoid() * x


class Feed(nn.Module):
    """Its forward() is decorated, and calls a function."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = gated(h)
        h = self.down(h)
        return h.exp()


def test_what_a_layers_functions_keep_is_the_layers() -> None:
    """Of each layer apart, though all call one function: what sigmoid, the product and exp give."""
    model = nn.Sequential(Feed(), Feed())
    out = model(koila.lazy(torch.ones(7, 6)))
    found = {one.name: one for one in layers.of(Program([out]))}
    assert set(found) == {f"{i}{part}" for i in (0, 1) for part in ("", ".up", ".down")}, set(found)
    assert found["0"].per_sample == found["1"].per_sample == 4 * (8 + 8 + 6)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_part_of_the_model_is_traced() -> None:
    """Its modules keep their parameters where no Python object does."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8))
    model.append(torch.jit.trace(nn.Linear(8, 8), torch.ones(2, 8)))
    out = model[:2](koila.lazy(torch.ones(7, 6))).exp()
    found = {one.name for one in layers.of(Program([out]))}
    assert {"0", "1"} <= found, found


def test_two_models_are_told_apart() -> None:
    """Where a program reads several models, the name of a layer begins with its model's class."""
    first, second = Images(), nn.Linear(50, 3)
    loss = second(first(koila.lazy(torch.randn(7, 3, 8, 8)))).exp().sum()
    names = [layer.name for layer in layers.of(Program([loss]))]
    assert {"Images.first", "Images.norm", "Linear"} <= set(names), names
    texts, images = (nn.Sequential(nn.Linear(6, 5), nn.ReLU()) for _ in range(2))
    x = koila.lazy(torch.randn(7, 6))
    names = [layer.name for layer in layers.of(Program([(texts(x) * images(x)).sum()]))]
    assert {"Sequential#1.0", "Sequential#2.0"} <= set(names), names


def test_a_line_of_the_script_is_told() -> None:
    x = koila.lazy(torch.randn(7, 3).requires_grad_())
    loss = x.exp().sum()
    (layer,) = layers.of(Program([loss]))
    assert layer.name.startswith(f"{__file__}:") and not layer.kind
    assert layer.n_bytes == 7 * 3 * 4


def test_after_the_run_the_report_has_them() -> None:
    """Of the last training step, though an evaluation came after it."""
    model = Images()
    x, y = torch.randn(64, 3, 8, 8), torch.randint(0, 50, (64,))
    with koila.config(memory_limit=there() + 2**19):
        lazy_x, lazy_y = koila.lazy(x, y)
        F.cross_entropy(model(lazy_x), lazy_y).backward()
        report = koila.report()
        assert report.n_chunks > 1 and report.is_training
        with torch.no_grad():
            model(koila.lazy(x)).argmax(1).tolist()
        after = koila.report()
    assert [layer.name for layer in report.layers][:3] == ["first", "norm", "second"]
    assert not after.is_training and after.training is not None
    assert after.layers == report.layers
    assert "the last training step before it: backward()" in str(after)
    assert "second (Conv2d)" in str(after)


def test_the_report_has_them_also_where_the_number_of_chunks_is_set() -> None:
    model, x = (
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4)),
        torch.randn(2000, 64),
    )
    with koila.config(chunks=3):
        model(koila.lazy(x)).pow(2).mean().backward()
    assert {layer.name for layer in koila.report().layers} >= {"0", "2"}


def test_explain_runs_nothing() -> None:
    """Not even where a norm's statistics wait to be written, which watch who reads them."""
    model = Images()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = koila.lazy(torch.randn(64, 3, 8, 8), torch.randint(0, 50, (64,)))
    with koila.config(memory_limit=there() + 2**21):
        for _ in range(3):
            loss = F.cross_entropy(model(x), y)
            before = koila.report()
            assert "norm (BatchNorm2d)" in koila.explain(loss)
            assert koila._core.real(loss) is None
            assert str(koila.report()) == str(before)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_refusal_names_an_output_that_the_script_holds() -> None:
    """Chunks do not shrink it: without it the step runs."""
    head = nn.Linear(4, 2000, bias=False)
    with koila.config(memory_limit=there() + 2**19):
        scores = head(koila.lazy(torch.randn(256, 4)))
        loss = scores.square().mean()
        with pytest.raises(koila.MemoryLimitError, match=r"too large: .* as your script holds it"):
            loss.backward()
        del scores
        loss.backward()


def test_a_refusal_names_layers_and_hides_koilas_frames() -> None:
    model = Images()
    x, y = koila.lazy(torch.randn(64, 3, 8, 8), torch.randint(0, 50, (64,)))
    with koila.config(memory_limit=there() + 2**16):
        loss = F.cross_entropy(model(x), y)
        with pytest.raises(
            koila.MemoryLimitError, match=r"of layer '(first|norm|second)'"
        ) as raised:
            loss.backward()
    text = str(raised.value)
    assert "too large: the output of layer 'first' (conv2d, " in text
    assert "the limit is" in text and "of which parameters" in text
    own = koila.__path__[0] + os.sep
    assert not [frame for frame in raised.traceback if str(frame.path).startswith(own)]


@pytest.mark.parametrize("make", [language, images])
def test_cards(make: Callable[[], Made]) -> None:
    """HTML of at most 50 KB, without a script, in which nothing of the user's is markup."""
    model, x, _ = make()
    model.add_module("<b>", nn.Sequential(nn.Linear(50, 50), nn.Sigmoid()))
    loss = model.get_submodule("<b>")(model(koila.lazy(x))).exp().sum()
    explained = koila.explain(loss, full=True)
    loss.backward()
    for card in (explained._repr_html_(), koila.report()._repr_html_()):
        assert len(card.encode()) <= 50 * 2**10 and "koila" in card
        assert "<script" not in card and "<b>" not in card
    assert "head (Linear)" in explained._repr_html_()
    assert "&lt;b&gt;.1 (Sigmoid)" in explained._repr_html_()


def test_a_smaller_batch_keeps_less() -> None:
    """Layers are looked for in the first of some batches, and told for the samples of each."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    with koila.config(memory_limit=there() + 2**21):
        found = []
        for n in (960, 320):
            x, y = koila.lazy(torch.randn(n, 64), torch.randint(10, (n,)))
            F.cross_entropy(model(x), y).backward()
            (relu,) = (one for one in koila.report().layers if one.kind == "ReLU")
            found.append(relu)
    assert found[0].per_sample == found[1].per_sample == 1024
    assert [one.n_bytes for one in found] == [960 * 1024, 320 * 1024]
