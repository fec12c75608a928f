# SPDX-License-Identifier: Apache-2.0
"""What torch does not hand to a tensor subclass comes out as in eager, or fails loudly; never else.

Here: whatever takes a tensor's memory, or its place in a transform, without asking. Functions with
a backward of their own are in `test_functions`, reads in `test_reads`, writes in `test_writes`.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.fx.experimental import proxy_tensor
from torch.utils import dlpack
from torch.utils.data import DataLoader, TensorDataset, default_collate

import koila
from oracle import Lazy, assert_same_story
from small import Smalls, linear, ones

SMALLS = Smalls()

# Constructors


@SMALLS.add
def tensor(x: Tensor) -> Any:
    return torch.tensor(x * 2)


@SMALLS.add
def tensor_of_numbers(x: Tensor) -> Any:
    return torch.tensor([x.sum(), x[0, 0], 1.0])


@SMALLS.add
def tensor_of_nested_numbers(x: Tensor) -> Any:
    return torch.tensor([[x[0, 0], 1.0], [2.0, x[1, 1]]], dtype=torch.float32)


@SMALLS.add
def as_tensor(x: Tensor) -> Any:
    return torch.as_tensor(x * 2)


@SMALLS.add
def as_tensor_of_another_dtype(x: Tensor) -> Any:
    return torch.as_tensor(x * 2, dtype=torch.float32)


@SMALLS.add
def asarray(x: Tensor) -> Any:
    return torch.asarray(x * 2)


@SMALLS.add
def asarray_copied(x: Tensor) -> Any:
    return torch.asarray(x * 2, dtype=torch.float32, copy=True)


@SMALLS.add
def new_tensor(x: Tensor) -> Any:
    return x.new_tensor([1.0, 2.0]), x.new_zeros(2), x.new_full((2, 3), 4)


@SMALLS.add_refusable
def new_tensor_of_lazy(x: Tensor) -> Any:
    return x.new_tensor(x * 2), torch.zeros(1).new_tensor(x)


@SMALLS.add_refusable
def legacy_constructor(x: Tensor) -> Any:
    return torch.DoubleTensor(x), torch.Tensor(x.float())


@SMALLS.add
def sparse(x: Tensor) -> Any:
    index, h = torch.arange(4), x[:, 0] * 2
    coo = torch.sparse_coo_tensor(torch.stack([index, index % 3]), h, (4, 3))
    csr = torch.sparse_csr_tensor(torch.arange(5), index % 3, h, (4, 3))
    return coo.to_dense(), csr.to_dense()


@SMALLS.add
def parameters(x: Tensor) -> Any:
    made = [nn.Parameter(one) for one in (x * 2, (x * 2)[0], x.sum().detach())]
    loss = sum((one * x).sum() for one in made)
    assert isinstance(loss, Tensor)
    loss.backward()
    return [*made, *(one.grad for one in made), x.detach()]


@SMALLS.add
def load_state_dict(x: Tensor) -> Any:
    layers = [linear(), linear(), nn.BatchNorm1d(3).double().eval()]
    state = {"weight": x[:2] * 2, "bias": x[0, :2] * 1}
    layers[0].load_state_dict(state)
    layers[1].load_state_dict(state, assign=True)
    statistics = {**layers[2].state_dict(), "running_mean": x.mean(0)}
    layers[2].load_state_dict(statistics, assign=True)
    return [layer(ones(4, 3)) for layer in layers]


@SMALLS.add
def check_of_gradients(x: Tensor) -> Any:
    leaf = (x * 1).detach().requires_grad_()
    return torch.autograd.gradcheck(lambda a: (a * x.detach()).sin(), (leaf,))


@SMALLS.add
def to_dlpack(x: Tensor) -> Any:
    return dlpack.from_dlpack(dlpack.to_dlpack(x * 2))


@SMALLS.add
def to_dlpack_of_the_batch(x: Tensor) -> Any:
    return dlpack.from_dlpack(dlpack.to_dlpack(x))


@SMALLS.add
def dlpack_method(x: Tensor) -> Any:
    return torch.from_dlpack((x * 2).__dlpack__())


@SMALLS.add
def from_dlpack(x: Tensor) -> Any:
    return torch.from_dlpack(x * 2)


@SMALLS.add_refusable
def full(x: Tensor) -> Any:
    return torch.full((2,), x.sum())


@SMALLS.add_refusable
def full_of_the_batch(x: Tensor) -> Any:
    return torch.full((2,), x[0, 0])


@SMALLS.add_refusable
def arange(labels: Tensor) -> Any:
    return torch.arange(labels.max())


@SMALLS.add_refusable
def scalar_argument(x: Tensor) -> Any:
    return torch.ones(4).clamp(x.min(), x.max()), torch.ones(3) * x.sum().item()


@SMALLS.add_refusable
def int_argument(x: Tensor, labels: Tensor) -> Any:
    return x.sum(dim=labels.argmin()), torch.zeros(3, 3).select(0, labels[1])


@SMALLS.add
def zeros_of_its_shape(x: Tensor) -> Any:
    return torch.zeros(x.shape[0], x.size(1), dtype=x.dtype, device=x.device) + x


@SMALLS.add
def zeros_like(x: Tensor) -> Any:
    return torch.zeros_like(x), torch.full_like(x, 3), torch.rand_like(x)


@SMALLS.add_refusable
def pybind_argument(x: Tensor) -> Any:
    pointer = torch._C._aoti.unsafe_alloc_void_ptr_from_tensor((x * 2).detach())
    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(pointer)


# Transforms


def energy(x: Tensor) -> Tensor:
    return (x.sin() * x).sum()


@SMALLS.add_refusable
def func_grad(x: Tensor) -> Any:
    return torch.func.grad(energy)(x)


@SMALLS.add_refusable
def func_grad_of_a_step(x: Tensor) -> Any:
    return torch.func.grad_and_value(energy)(x * 2)


@SMALLS.add_refusable
def func_grad_over_a_lazy(x: Tensor) -> Any:
    return torch.func.grad(lambda weight: (x * weight).sum())(torch.ones(3, dtype=x.dtype))


@SMALLS.add_refusable
def func_vjp(x: Tensor) -> Any:
    value, pull = torch.func.vjp(torch.sin, x)
    return value, pull(torch.ones_like(value))


@SMALLS.add_refusable
def func_jvp(x: Tensor, z: Tensor) -> Any:
    return torch.func.jvp(torch.sin, (x,), (z,))


@SMALLS.add_refusable
def func_jacrev(x: Tensor) -> Any:
    return torch.func.jacrev(lambda row: row.sin())(x[0])


@SMALLS.add_refusable
def func_jacfwd(x: Tensor) -> Any:
    return torch.func.jacfwd(lambda row: row.sin())(x[0])


@SMALLS.add_refusable
def func_hessian(x: Tensor) -> Any:
    return torch.func.hessian(energy)(x[0])


@SMALLS.add_refusable
def vmap(x: Tensor) -> Any:
    return torch.vmap(lambda row: row.sin() / row.sum())(x)


@SMALLS.add_refusable
def vmap_of_two(x: Tensor, z: Tensor) -> Any:
    return torch.vmap(torch.dot)(x, z * 2)


@SMALLS.add_refusable
def vmap_over_columns(x: Tensor) -> Any:
    return torch.vmap(torch.cumsum, in_dims=(1, None), out_dims=1)(x, 0)


@SMALLS.add
def vmap_over_a_lazy(x: Tensor) -> Any:
    return torch.vmap(lambda number: x.sin() * number)(torch.arange(2.0, dtype=x.dtype))


@SMALLS.add
def transforms_around_a_lazy(x: Tensor) -> Any:
    """The lazy is no input of what is transformed, and was recorded on before."""
    step, weight = x * 2, ones(3)

    def product(weight: Tensor) -> Tensor:
        return ((weight * step) ** 2).sum(1)

    return [
        torch.func.grad(lambda weight: product(weight).sum())(weight),
        torch.func.vjp(product, weight)[0],
        torch.func.jvp(product, (weight,), (weight,)),
        torch.func.jacrev(product)(weight),
        torch.func.jacfwd(product)(weight),
        torch.func.hessian(lambda weight: product(weight).sum())(weight),
        torch.func.linearize(product, weight)[0],
        torch.func.functionalize(product)(weight),
        step,
    ]


@SMALLS.add_refusable
def vmap_of_grad(x: Tensor) -> Any:
    return torch.vmap(torch.func.grad(energy))(x)


@SMALLS.add
def functional_call(x: Tensor) -> Any:
    torch.manual_seed(0)
    linear = nn.Linear(3, 2).double()
    weights = {name: value.detach() * 2 for name, value in linear.named_parameters()}
    return torch.func.functional_call(linear, weights, (x,))


@SMALLS.add
def functional_call_with_lazy_weights(x: Tensor) -> Any:
    linear = nn.Linear(3, 4).double()
    weights = {"weight": x.sin(), "bias": x[:, 0]}
    return torch.func.functional_call(linear, weights, (torch.ones(2, 3).double(),))


@SMALLS.add_refusable
def autograd_functional(x: Tensor) -> Any:
    return torch.autograd.functional.jacobian(lambda row: row.sin(), x[0])


@SMALLS.add_refusable
def forward_mode(x: Tensor, z: Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, z)
        return torch.autograd.forward_ad.unpack_dual(dual.sin())


# Compilers


def scripted_body(x: Tensor) -> Tensor:
    return x.sin() * 2 + x.sum()


class ScriptedModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cos() + 1


@SMALLS.add_refusable
def jit_script(x: Tensor) -> Any:
    return torch.jit.script(scripted_body)(x)


@SMALLS.add_refusable
def jit_script_of_a_step(x: Tensor) -> Any:
    return torch.jit.script(scripted_body)(x * 2)


@SMALLS.add_refusable
def jit_script_module(x: Tensor) -> Any:
    return torch.jit.script(ScriptedModule())(x)


# What a tracer makes is called with another tensor, which shows whether it kept the example.


@SMALLS.add
def jit_trace(x: Tensor) -> Any:
    return torch.jit.trace(scripted_body, (x,), check_trace=False)(x[:2] + 1)


@SMALLS.add
def jit_trace_on_a_step(x: Tensor, z: Tensor) -> Any:
    return torch.jit.trace(scripted_body, (x * 2,))(z)


@SMALLS.add
def jit_trace_by_name(x: Tensor) -> Any:
    return torch.jit.trace(scripted_body, example_kwarg_inputs={"x": x})(x + 1)


@SMALLS.add
def jit_trace_of_a_module(x: Tensor, z: Tensor) -> Any:
    return torch.jit.trace(linear(), (x,))(z[1:])


@SMALLS.add_refusable
def jit_trace_around_a_lazy(x: Tensor) -> Any:
    return torch.jit.trace(lambda plain: plain * x, (ones(4, 3),), check_trace=False)(ones(4, 3))


@SMALLS.add_refusable
def jit_traced_before(x: Tensor) -> Any:
    traced = torch.jit.trace(scripted_body, (torch.ones(2, 3).double(),), check_trace=False)
    return traced(x)


@SMALLS.add
def make_fx(x: Tensor, z: Tensor) -> Any:
    return proxy_tensor.make_fx(scripted_body)(x)(z)


@SMALLS.add
def compiled_module(x: Tensor) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    return torch.compile(module, backend="eager")(x)


@SMALLS.add
def compiled_function(x: Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(scripted_body, backend="eager")(x * 2)


# Data, savers, collators


@SMALLS.add
def collate(x: Tensor, labels: Tensor) -> Any:
    return default_collate([{"x": x[i], "label": labels[i]} for i in range(4)])


@SMALLS.add
def data_loader(x: Tensor, labels: Tensor) -> Any:
    return list(DataLoader(TensorDataset(x, labels), batch_size=3))


@SMALLS.add
def save(x: Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"x": (x * 2).detach()}, file)
    return torch.load(io.BytesIO(file.getvalue()))["x"]


# The whole


@pytest.mark.sanitize
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", SMALLS)
def test_equals_eager(name: str, requires_grad: bool) -> None:
    SMALLS[name].check(requires_grad)


def test_swapping_a_lazy_is_refused() -> None:
    x = koila.lazy(torch.ones(4, 3))
    with pytest.raises(koila.KoilaError, match=r"test_not_intercepted.py:\d+\) cannot swap"):
        torch.utils.swap_tensors(torch.ones(4, 3), x * 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("chunks", [None, 1, 2, 3, 7])
def test_nested_tensors(chunks: int | None) -> None:
    """torch does not know the size of a nested tensor's gradient before backward."""

    def story(lazy: Lazy) -> Any:
        model = linear()
        h = model(lazy(torch.linspace(-1, 1, 21, dtype=torch.float64).view(7, 3)))
        nested = torch.nested.as_nested_tensor([h[:3], h[3:]])
        out = (nested * 2).to_padded_tensor(0.0)
        out.sin().sum().backward()
        return out, [p.grad for p in model.parameters()]

    assert_same_story(story, chunks, partly="a backward" if (chunks or 1) > 1 else "")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("chunks", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["parts", "rows", "offsets"])
def test_jagged_tensors(kind: str, chunks: int | None) -> None:
    def story(lazy: Lazy) -> Any:
        model = linear()
        h = model(lazy(torch.linspace(-1, 1, 21, dtype=torch.float64).view(7, 3)))
        if kind == "parts":
            nested = torch.nested.as_nested_tensor([h[:3], h[3:]], layout=torch.jagged)
        elif kind == "rows":
            nested = torch.nested.as_nested_tensor(h.view(7, 1, -1), layout=torch.jagged)
        else:
            nested = torch.nested.nested_tensor_from_jagged(h, torch.tensor([0, 3, 7]))
        out = (nested * 2).values()
        out.sin().sum().backward()
        return out, [p.grad for p in model.parameters()]

    assert_same_story(story, chunks)


def test_transformer_in_eval_takes_eagers_path() -> None:
    """torch's own fast path, which another kind of tensor switches off, gives other numbers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[False, False, True]] * 2 + [[False] * 3] * 2)
    body = torch.linspace(-1, 1, 8, dtype=torch.float64)

    def encode(x: Tensor) -> Any:
        with torch.no_grad():
            return model(x[..., None] * body, src_key_padding_mask=padding)

    smalls = Smalls()
    smalls.add(encode)
    smalls["encode"].check(requires_grad=False)


@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
@pytest.mark.parametrize("n_rows", [6, 3, 12])
def test_other_memory_is_set(n_rows: int, chunks: int) -> None:
    """Of a lazy, which then shows what is written there; and a lazy's own, of a plain tensor."""

    def story(lazy: Lazy) -> Any:
        x = lazy(torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4))
        w = torch.eye(4, dtype=torch.float64).requires_grad_()
        plain, made = torch.ones(n_rows, 4, dtype=torch.float64), x * 1
        before = made[:2]
        made.set_(plain)
        plain.add_(1)
        loss = (made @ w).pow(2).sum() + (x @ w).exp().sum()
        loss.backward()
        taken = torch.zeros(1, dtype=torch.float64)
        taken.set_(x * 2)
        return loss, made, before, taken, w.grad

    assert_same_story(story, chunks)


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_variables_stay_lazy(chunks: int) -> None:
    """The constructor of a Variable, which scripts of before torch 0.4 call, detaches its argument:
    an input as it is, labels of another dtype, and values that still wait."""

    def story(lazy: Lazy) -> list[Any]:
        model, critic = linear(), linear()
        x, y = lazy((ones(7, 3).cumsum(0), torch.arange(7) % 2))
        out = model(Variable(x.type(torch.DoubleTensor)))
        loss = nn.functional.cross_entropy(out, Variable(y.type(torch.LongTensor)))
        loss.backward()
        fake = Variable(model(x).repeat(1, 2).data[:, :3], requires_grad=True)
        score = critic(fake)
        (slope,) = torch.autograd.grad(score.sum(), fake, create_graph=True)
        ((slope.norm(2, 1) - 1) ** 2).mean().backward()
        score_of_data = critic(Variable(data=fake, requires_grad=False)).mean()
        weights = [*model.parameters(), *critic.parameters()]
        assert koila.is_lazy(fake) == koila.is_lazy(x)
        return [loss, score_of_data, [p.grad for p in weights]]

    assert_same_story(story, chunks)


def test_variables_take_what_torch_takes() -> None:
    """Other arguments of a Variable's constructor are checked by torch."""
    x = koila.lazy(ones(4, 3))
    made = Variable(x * 2, True)
    assert koila.is_lazy(made) and made.is_leaf and made.requires_grad
    assert type(Variable(ones(2, 3), requires_grad=True)) is Tensor
    for wrong in (
        lambda: Variable(x.long(), requires_grad=True),
        lambda: Variable(x, data=x),
        lambda: Variable(x, nam="x"),
    ):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            wrong()
        assert not isinstance(caught.value, koila.KoilaError)
    with pytest.warns(UserWarning, match="volatile was removed"):
        Variable(x, volatile=True)
