"""Check what the rows say of real calls: shape, dtype, strides, alias, and places by brute force.

The oracle is torch itself. A place is checked without any rule: the inputs are cut as the row says,
torch runs on every chunk, and what comes out is put together as the row says.
"""

from __future__ import annotations

import contextlib
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from koila import _core

Place = tuple[int, int, int, int]  # axis, dim, outer, inner

NAMESPACES = (
    torch.Tensor,
    torch._C.TensorBase,
    torch._C._VariableFunctions,
    torch._C._nn,
    torch._C._linalg,
    torch._C._special,
    torch._C._fft,
)
RANDOM_VALUES = {"empty_like", "new_empty"}  # uninitialised memory
# Composed of kernels that torch chooses by more than the call: what they keep is told from above.
ESTIMATED = set(
    [
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
        "cdist",
        "ctc_loss",
        "scaled_dot_product_attention",
        "cosine_embedding_loss",
        "triplet_margin_loss",
        "poisson_nll_loss",
        "margin_ranking_loss",
    ]
)


def rows_by_callable() -> dict[Any, str]:
    """Map every C-level callable of torch that has a row to the row's name."""
    table: dict[Any, str] = {}
    for row in _core.op_table():
        for name in (row["name"], *row["aliases"]):
            if name.startswith("Tensor_"):
                table[getattr(torch.Tensor, name.removeprefix("Tensor_"))] = row["name"]
                continue
            for space in NAMESPACES:
                found = getattr(space, name, None)
                if found is not None:
                    table.setdefault(found, row["name"])
    for row in _core.op_table():
        if row["name"].startswith("Tensor_"):
            table[getattr(torch.Tensor, row["name"].removeprefix("Tensor_"))] = row["name"]
    return table


class Calls(TorchFunctionMode):
    """Enter Python functions, and hand every call of a C function to `check` before it runs."""

    def __init__(self, check: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.check = check
        self.entered: list[tuple[Any, int]] = []

    def __torch_function__(
        self, func: Any, types_: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mark = (func, len(args))
        if isinstance(func, types.FunctionType) and self.entered[-1:] != [mark]:
            self.entered.append(mark)
            try:
                with self:
                    return torch.overrides.redispatch_function(func, types_, args, kwargs)
            finally:
                self.entered.pop()
        return self.check(func, args, kwargs)


def leaves(x: Any) -> Iterator[Any]:
    """Yield what containers hold, depth first."""
    if isinstance(x, (list, tuple)):
        for item in x:
            yield from leaves(item)
    elif isinstance(x, dict):
        for item in x.values():
            yield from leaves(item)
    else:
        yield x


def tensors(x: Any) -> list[torch.Tensor]:
    return [t for t in leaves(x) if isinstance(t, torch.Tensor)]


def like_in_memory(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Copy `part` densely, its dims in memory in the order of `whole`'s."""
    order = sorted(range(part.dim()), key=lambda d: (-whole.stride(d), d))
    dense = part.detach().permute(order).contiguous().clone()
    back = [order.index(d) for d in range(part.dim())]
    return dense.permute(back).requires_grad_(whole.requires_grad and part.is_floating_point())


def cut(whole: torch.Tensor, place: Place, rows: int, start: int, stop: int) -> torch.Tensor:
    """Return rows start .. stop - 1 of a value."""
    _, dim, outer, inner = place
    assert whole.shape[dim] == outer * rows * inner
    split = whole.detach().unflatten(dim, (outer, rows, inner)).narrow(dim + 1, start, stop - start)
    return like_in_memory(split.flatten(dim, dim + 2), whole)


def join(parts: Sequence[torch.Tensor], place: Place, sizes: Sequence[int]) -> torch.Tensor:
    """Put the chunks of a value together."""
    _, dim, outer, inner = place
    split = [p.unflatten(dim, (outer, n, inner)) for p, n in zip(parts, sizes, strict=True)]
    return torch.cat(split, dim + 1).flatten(dim, dim + 2)


def put(args: list[Any], kwargs: dict[str, Any], where: Any, entry: Any, change: Any) -> None:
    """Replace one argument, or one entry of it, by `change` of it."""
    place: Any = args if isinstance(where, int) else kwargs
    if entry is None:
        place[where] = change(place[where])
    else:
        items = list(place[where])
        items[entry] = change(items[entry])
        place[where] = tuple(items) if isinstance(place[where], tuple) else items


def rewritten(part: str | None, value: int) -> Callable[[Any], Any]:
    def change(old: Any) -> Any:
        if part == "start":
            return slice(value, old.stop, old.step)
        if part == "stop":
            return slice(old.start, value, old.step)
        return value

    return change


def run_chunk(
    func: Any, args: Any, kwargs: Any, said: dict[str, Any], rows: int, start: int, stop: int
) -> Any:
    """Run `func` on rows start .. stop - 1, as the row says it is to be called there."""
    new_args, new_kwargs = list(args), dict(kwargs)
    for (where, entry, is_range), place in zip(said["inputs"], said["in_places"], strict=True):
        first, last = (0, stop - start) if is_range else (start, stop)

        def change(whole: Any, place: Any = place, first: int = first, last: int = last) -> Any:
            if place is None:
                return whole.detach().clone()
            return cut(whole, place, rows, first, last)

        put(new_args, new_kwargs, where, entry, change)
    for where, entry, part, scale in said["rewrites"]:
        put(new_args, new_kwargs, where, entry, rewritten(part, scale * (stop - start)))
    result = func(*new_args, **new_kwargs)
    return new_args[0] if result is None else result


def assert_same(actual: Any, expected: Any, what: str) -> None:
    is_short = expected.dtype in (torch.float16, torch.bfloat16)
    tolerance = 3e-2 if is_short else 1e-5
    torch.testing.assert_close(
        actual,
        expected,
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        msg=lambda m: f"{what}\n{m}",
    )


def combine(
    said: dict[str, Any], parts: list[torch.Tensor], sizes: list[int], kwargs: Any
) -> torch.Tensor | None:
    """Combine a REDUCE node's partial results the plain way; None: not checked here."""
    both = torch.stack(parts)
    kind = said["reduce"]
    if kind in ("SUM", "COUNT"):
        return both.sum(0)
    if kind == "MEAN":
        weights = torch.tensor(sizes, dtype=torch.float64).view(-1, *[1] * (both.dim() - 1))
        return (both * weights / sum(sizes)).sum(0).to(both.dtype)
    if kind == "PROD":
        return both.prod(0).to(both.dtype)
    if kind == "ALL":
        return both.bool().all(0).to(both.dtype)
    if kind == "ANY":
        return both.bool().any(0).to(both.dtype)
    if kind == "LOGSUMEXP":
        return both.logsumexp(0)
    return None


def describe(name: str, args: Any, kwargs: Any, places: Any = None) -> str:
    def show(x: Any) -> str:
        if isinstance(x, torch.Tensor):
            return f"<{str(x.dtype)[6:]} {tuple(x.shape)} {x.stride()}{' grad' * x.requires_grad}>"
        if isinstance(x, (list, tuple)):
            return f"({', '.join(map(show, x))})"
        return repr(x)

    words = [show(a) for a in args] + [f"{k}={show(v)}" for k, v in kwargs.items()]
    return f"{name}({', '.join(words)}) places={places}"


class Kept:
    """A tensor that torch keeps for backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Checker:
    """Check calls against torch, and count what was seen."""

    def __init__(self, check_places: bool = True) -> None:
        self.table = rows_by_callable()
        self.check_places = check_places
        self.seen: set[str] = set()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.reasons: Counter[tuple[str, str]] = Counter()

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = self.table.get(func)
        if name is None:
            return func(*args, **kwargs)
        key = describe(name, args, kwargs) + str(torch.is_grad_enabled())
        if key in self.seen:
            return func(*args, **kwargs)
        self.seen.add(key)
        return self.check(name, func, args, kwargs)

    def check(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        said = _core.infer(name, tuple(args), kwargs)
        self.counts[name, said["status"]] += 1
        text = describe(name, args, kwargs)
        before = [(t, t.detach().clone()) for t in tensors((args, kwargs))]
        packed: list[weakref.ref[Kept]] = []

        def pack(tensor: torch.Tensor) -> Kept:
            kept = Kept(tensor)
            packed.append(weakref.ref(kept))
            return kept

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
                result = func(*args, **kwargs)
        except Exception as error:
            # A call that torch refuses must not be taken for legal unless only its values tell.
            self.counts[name, f"raises {type(error).__name__}, said {said['status']}"] += 1
            raise
        if said["status"] == "DECLINED":
            return result
        assert said["status"] == "OK", f"{text}: legal, but {said}"
        self.check_outs(name, text, said, args, kwargs, result)
        # A node that nothing leads to any more has let go again of what it kept.
        saved = [kept.tensor for one in packed if (kept := one()) is not None]
        self.check_saves(name, text, said, args, kwargs, result, saved)
        if self.check_places and not any(t.numel() > 4000 for t, _ in before):
            values = {id(t): old for t, old in before}
            self.check_all_places(name, func, values, args, kwargs, result)
        return result

    def check_outs(
        self, name: str, text: str, said: dict[str, Any], args: Any, kwargs: Any, result: Any
    ) -> None:
        outs = [args[0]] if result is None else tensors(result)
        assert len(outs) == len(said["outs"]), f"{text}: {len(outs)} outputs, said {said}"
        kind, alias_input = said["alias"]
        inputs = [self.input(args, kwargs, where, entry) for where, entry, _ in said["inputs"]]
        for number, (out, (dtype, shape, strides, grad, _)) in enumerate(
            zip(outs, said["outs"], strict=True)
        ):
            what = f"{text}: output {number}, said {said['outs'][number]} {said['alias']}"
            assert str(out.dtype) == f"torch.{dtype}", f"{what}, is {out.dtype}"
            assert tuple(out.shape) == shape, f"{what}, is {tuple(out.shape)}"
            assert out.requires_grad == grad, f"{what}, is {out.requires_grad}"
            if strides is not None:
                assert out.stride() == strides, f"{what}, strides are {out.stride()}"
            source = inputs[number if alias_input is None else alias_input]
            memory = [t.untyped_storage()._cdata for t in inputs]
            if kind == "SAME":
                assert out is source, what
            elif kind == "VIEW":
                assert out is not source, what
                assert out.untyped_storage()._cdata == source.untyped_storage()._cdata, what
            elif kind == "NONE":
                assert out.untyped_storage()._cdata not in memory, what
            self.counts[name, "strides" if strides is not None else "no strides"] += 1

    @staticmethod
    def input(args: Any, kwargs: Any, where: Any, entry: Any) -> torch.Tensor:
        value = args[where] if isinstance(where, int) else kwargs[where]
        return value if entry is None else value[entry]

    def check_saves(
        self,
        name: str,
        text: str,
        said: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        saved: list[torch.Tensor],
    ) -> None:
        """Compare what the row says with what torch kept for backward, storage by storage."""
        inputs = [self.input(args, kwargs, where, entry) for where, entry, _ in said["inputs"]]
        outs = [args[0]] if result is None else tensors(result)
        own = {t.untyped_storage()._cdata for t in (*inputs, *outs)}
        kept = {t.untyped_storage()._cdata: t.numel() * t.element_size() for t in saved}

        def storages(values: list[torch.Tensor], mask: int) -> set[int]:
            chosen = [t for i, t in enumerate(values) if mask >> i & 1]
            return {t.untyped_storage()._cdata for t in chosen}

        told = storages(inputs, said["saves"]["inputs"]) | storages(outs, said["saves"]["outputs"])
        extra = sum(n for cdata, n in kept.items() if cdata not in own)
        names = {t.untyped_storage()._cdata: f"in{i}" for i, t in enumerate(inputs)}
        names |= {t.untyped_storage()._cdata: f"out{i}" for i, t in enumerate(outs)}
        actual = sorted(names[c] for c in kept if c in own)
        if name in ESTIMATED:
            assert set(kept) & own <= told and extra <= said["saves"]["bytes_extra"], (
                f"SAVES {text}: keeps {actual} and {extra} bytes, said {said['saves']}"
            )
            return
        assert (set(kept) & own, extra) == (told, said["saves"]["bytes_extra"]), (
            f"SAVES {text}: keeps {actual} and {extra} bytes, said {said['saves']}"
        )

    def check_all_places(
        self, name: str, func: Any, values: Any, args: Any, kwargs: Any, result: Any
    ) -> None:
        def old(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return values[id(x)].requires_grad_(x.requires_grad)
            if isinstance(x, (list, tuple)):
                return type(x)(map(old, x)) if type(x) in (list, tuple) else x
            return x

        old_args = tuple(map(old, args))
        old_kwargs = {k: old(v) for k, v in kwargs.items()}
        said = _core.infer(name, old_args, old_kwargs)
        inputs = [self.input(old_args, old_kwargs, w, e) for w, e, _ in said["inputs"]]
        outs = [args[0]] if result is None else tensors(result)
        outs = [t.detach().clone() for t in outs]
        for places, rows in assignments(inputs):
            self.check_place(name, func, old_args, old_kwargs, outs, places, rows)

    def check_place(
        self,
        name: str,
        func: Any,
        args: Any,
        kwargs: Any,
        outs: list[torch.Tensor],
        places: list[Place | None],
        rows: int,
    ) -> None:
        said = _core.infer(name, args, kwargs, places, [rows])
        text = describe(name, args, kwargs, places)
        assert said["status"] == "OK", f"{text}: {said}"
        self.counts[name, said["mode"]] += 1
        if said["mode"] == "ONCE":
            assert said["reason"], text
            assert not said["rewrites"] and not any(said["in_places"]), text
            self.reasons[name, said["reason"]] += 1
            return
        is_random = name in RANDOM_VALUES or said["random"]
        for sizes in partitions(rows):
            parts: list[list[torch.Tensor]] = []
            start = 0
            for n in sizes:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # std of a single row
                    try:
                        chunk = run_chunk(func, args, kwargs, said, rows, start, start + n)
                    except Exception as error:
                        raise AssertionError(
                            f"{text}: {said}: chunk {start}+{n}: {error}"
                        ) from error
                parts.append(tensors(chunk) if not isinstance(chunk, torch.Tensor) else [chunk])
                start += n
            for number, whole in enumerate(outs):
                what = f"{text}: output {number} in chunks of {sizes}, said {said}"
                mine = [p[number] for p in parts]
                place = said["outs"][number][4]
                if said["mode"] == "REDUCE":
                    assert place is None, what
                    combined = combine(said, mine, sizes, kwargs)
                    assert mine[0].shape == whole.shape, what
                    if combined is not None:
                        assert_same(combined, whole, what)
                elif place is None:
                    for one in mine:
                        assert_same(one, whole, what) if not is_random else None
                elif is_random:
                    assert join(mine, place, sizes).shape == whole.shape, what
                else:
                    assert_same(join(mine, place, sizes), whole, what)


def partitions(rows: int) -> Iterator[list[int]]:
    """Divide the rows: one by one, and unevenly."""
    yield [1] * rows
    if rows > 2:
        yield [rows - 1, 1]
        yield [2, rows - 2] if rows > 3 else [1, 2]


def digits(size: int) -> Iterator[tuple[int, int, int]]:
    """Ways to write a size as outer * rows * inner."""
    yield 1, size, 1
    for factor in (2, 3):
        if size % factor == 0:
            yield factor, size // factor, 1
            yield 1, size // factor, factor


def assignments(inputs: Sequence[torch.Tensor]) -> Iterator[tuple[list[Place | None], int]]:
    """Yield places for the inputs: rows in a dim of one of them, others aligned with it or not."""
    seen = set()
    for number, first in enumerate(inputs[:3]):
        for dim, size in enumerate(first.shape):
            if size == 0 or size > 12:
                continue
            for outer, rows, inner in digits(size):
                for align in ("right", "left", "no"):
                    places: list[Place | None] = [None] * len(inputs)
                    places[number] = (0, dim, outer, inner)
                    for k, other in enumerate(inputs):
                        at = dim if align == "left" else dim + other.dim() - first.dim()
                        is_there = k != number and align != "no" and 0 <= at < other.dim()
                        if is_there and other.shape[at] == size:
                            places[k] = (0, at, outer, inner)
                    key = (tuple(places), rows)
                    if key not in seen:
                        seen.add(key)
                        yield places, rows


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Give a tensor the memory order of its transpose, same values."""
    if x.dim() < 2 or x.layout != torch.strided:
        return x
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 4 or x.layout != torch.strided:
        return x
    return x.contiguous(memory_format=torch.channels_last)


def strided(x: torch.Tensor) -> torch.Tensor:
    """Give a tensor holes in memory."""
    if x.dim() < 1 or x.layout != torch.strided or x.numel() == 0:
        return x
    return torch.stack([x] * 2, -1)[..., 0]


LAYOUTS = (lambda x: x, transposed, channels_last, strided)


def changed(x: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to every tensor of plain containers."""
    if isinstance(x, torch.Tensor):
        return change(x)
    if type(x) in (list, tuple):
        return type(x)(changed(item, change) for item in x)
    if type(x) is dict:
        return {k: changed(v, change) for k, v in x.items()}
    return x


@contextlib.contextmanager
def checking(checker: Checker) -> Iterator[None]:
    with Calls(checker):
        yield
