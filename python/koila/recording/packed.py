# SPDX-License-Identifier: Apache-2.0
"""Run packed sequences in chunks of rows.

`pack_padded_sequence` puts the steps of all rows into one tensor, so no dim of a packed sequence
has rows. So the tensor that was packed is remembered (`_packed`). A recurrent layer over the
sequence is recorded as a layer over the padded rows and their lengths: on each chunk it packs the
chunk's rows, calls torch's layer, and pads the result. `data` of a packed sequence is recorded as
an index into the padded rows, which is computed only if something reads it.

Rows that torch sorts by length (`enforce_sorted=False`) are recorded in the user's order:
`_selected` remembers the input of each `index_select`, and selecting with the inverse of its index
returns that input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from koila import _core
from koila.basics import config, packing, table
from koila.basics.enter import call_with_lazies
from koila.basics.table import Args, Func, Words, words_of
from koila.memory import uneven
from koila.random import noise_drawn
from koila.reporting import reports

LazyTensor = _core.LazyTensor
_VF: Any = torch._C._VariableFunctions


@dataclass
class _Selected:
    """The input of an `index_select`, by its result; valid while neither tensor was written."""

    source: Tensor
    source_id: int | None
    id: int | None
    dim: int
    index: Tensor
    is_own: bool  # no user has the source: it may be returned


@dataclass
class _Packed:
    """The padded rows of a packed sequence, in the order of `lengths`."""

    padded: Tensor
    padded_id: int | None
    id: int | None
    lengths: Tensor  # [n_rows] int64, plain
    order: Tensor | None  # [n_rows] the rows by their lengths; None: they are sorted
    is_batch_first: bool
    is_result: bool  # of a recurrent layer: `padded` is 0 beyond the lengths
    is_handed_out: bool = False  # the user has `padded`
    index: tuple[Tensor, ...] = ()  # of its steps in `padded`


_selected = WeakIdKeyDictionary()
_packed = WeakIdKeyDictionary()


def _number_of(tensor: Tensor) -> Tensor:
    """Return a plain tensor; read it if it is lazy."""
    if type(tensor) is not LazyTensor:
        return tensor
    with reports.Asking("pack_padded_sequence()"):
        return _core.read(tensor).detach()


def _lookup(table: Any, tensor: Any) -> Any:
    """Return the entry of a lazy in a table, if neither it nor its source was written since."""
    found = table.get(tensor) if type(tensor) is LazyTensor else None
    if found is None or found.id is None or _core.id(tensor) != found.id:
        return None
    source = found.source if isinstance(found, _Selected) else found.padded
    wanted = found.source_id if isinstance(found, _Selected) else found.padded_id
    return found if wanted is not None and _core.id(source) == wanted else None


# Rows in another order ----------------------------------------------------------------------------


def select_index(input: Tensor, dim: Any, index: Tensor, **words: Any) -> Tensor:
    """Call torch.index_select; recorded in its place."""
    return torch.index_select(input, dim, index, **words)


def _select(x: Tensor, dim: int, index: Tensor, is_own: bool) -> Tensor:
    made: Tensor = call_with_lazies(select_index, (x,), x, dim, index)
    if type(made) is LazyTensor:
        _selected[made] = _Selected(x, _core.id(x), _core.id(made), dim, index, is_own)
    return made


def index_select(func: Func, args: Args, kwargs: Words) -> Any:
    """Record index_select and remember its input, unless torch is to raise its own error. If it
    undoes an earlier one of torch's own, return the input of that."""
    words = words_of(("input", "dim", "index"), args, kwargs)
    x: Any = words.get("input")
    dim, index = words.get("dim"), words.get("index")
    is_known = len(words) == 3 and isinstance(x, LazyTensor)
    n_dims = x.dim() if is_known else 0
    if not isinstance(index, Tensor) or not isinstance(dim, int) or not -n_dims <= dim < n_dims:
        tensors = tuple(arg for arg in args if isinstance(arg, Tensor))
        return call_with_lazies(select_index, tensors, *args, **kwargs)
    dim %= n_dims
    before = _lookup(_selected, x)
    if before is not None and before.is_own and before.dim == dim and _undoes(before.index, index):
        before.is_own = False  # only once: a second call must not return the same tensor
        return before.source
    return _select(x, dim, index, False)


def _undoes(first: Tensor, second: Tensor) -> bool:
    first, second = _number_of(first), _number_of(second)
    is_index = first.dim() == second.dim() == 1 and first.shape == second.shape
    return is_index and torch.equal(first[second].cpu(), torch.arange(first.numel()))


# The calls ----------------------------------------------------------------------------------------


def _gather(made_of: _Packed) -> Tensor:
    """Record `data` of the packed sequence as an index into the padded rows."""
    if not made_of.index:
        _, steps, rows = packing.steps_of(made_of.lengths, made_of.order)
        index = (rows, steps) if made_of.is_batch_first else (steps, rows)
        made_of.index = tuple(part.to(made_of.padded.device) for part in index)
    data: Tensor = made_of.padded[made_of.index]
    made_of.id, made_of.padded_id = _core.id(data), _core.id(made_of.padded)
    _packed[data] = made_of
    return data


def pack(func: Func, args: Args, kwargs: Words) -> Any:
    """Handle _pack_padded_sequence(input, lengths, batch_first)."""
    if len(args) != 3 or kwargs or type(args[0]) is not LazyTensor or config.is_one_chunk():
        return NotImplemented
    x, lengths, is_batch_first = args
    before = _lookup(_selected, x)
    rows_dim = 0 if is_batch_first else 1
    order = None
    if before is not None and before.dim == rows_dim:
        x, order = before.source, _number_of(before.index).cpu()
    is_fit = x.dim() >= 2 and isinstance(lengths, Tensor) and _core.rows_dim(x) == rows_dim
    if not is_fit or lengths.device.type != "cpu" or lengths.shape != (x.shape[rows_dim],):
        return NotImplemented
    by_length = _number_of(lengths).clone()
    if by_length.dtype is not torch.int64 or by_length.numel() == 0 or by_length[-1] < 1:
        return NotImplemented
    if bool((by_length.diff() > 0).any()) or by_length[0] > x.shape[1 - rows_dim]:
        return NotImplemented  # torch raises its own error
    if order is not None and order.sort().values.ne(torch.arange(order.numel())).any():
        return NotImplemented
    own = by_length if order is None else by_length[packing.invert(order)]
    made_of = _Packed(x, None, None, own, order, is_batch_first, False)
    sizes = (by_length > torch.arange(int(by_length[0]))[:, None]).sum(1)
    return _gather(made_of), sizes


def _first_steps(made_of: _Packed, n_steps: int) -> Tensor:
    """Return the first steps of the padded rows. The gradient has the strides of torch's own: if
    rows are sorted by length, it is of steps, then rows."""
    x, dim = made_of.padded, 1 if made_of.is_batch_first else 0
    if x.shape[dim] == n_steps:
        return x
    if dim == 1 and made_of.order is None:
        return x.transpose(0, 1).narrow(0, 0, n_steps).transpose(0, 1)
    return x.narrow(dim, 0, n_steps)


def _with_rows(numbers: Tensor, made_of: _Packed) -> Tensor:
    """Return a number of each row as a lazy with the rows of the padded tensor."""
    first_step: Any = made_of.padded.select(1 if made_of.is_batch_first else 0, 0)
    return _core.like(numbers.to(first_step.device), first_step)


def layer(func: Func, args: Args, kwargs: Words) -> Any:
    """Record a recurrent layer over a packed sequence: (data, batch_sizes, hx, params, has_biases,
    num_layers, dropout, train, bidirectional)."""
    is_packed = len(args) == 9 and not kwargs and isinstance(args[1], Tensor)
    made_of = _lookup(_packed, args[0]) if is_packed else None
    if made_of is None or config.is_one_chunk() or made_of.padded.dim() != 3:
        return NotImplemented
    if torch.is_autocast_enabled(made_of.padded.device.type):
        return NotImplemented  # torch casts the weights of its own call
    _, sizes, hx, params, has_biases, num_layers, dropout, train, is_both = args
    if type(sizes) is LazyTensor or _core.rows_dim(made_of.padded) < 0:
        return NotImplemented
    inverse = None if made_of.order is None else packing.invert(made_of.order)
    states = [_unsorted(state, made_of.order, inverse) for state in _listed(hx)]
    is_first = made_of.is_batch_first
    x = _first_steps(made_of, int(made_of.lengths.max()))
    words = params, has_biases, num_layers, dropout, train, is_both, is_first
    given = tuple(states) if isinstance(hx, tuple | list) else states[0]
    lengths, is_sorted = made_of.lengths, inverse is None
    keys = packing.keys_of(lengths, made_of.order)
    is_even = int(lengths.min()) == int(lengths.max())
    if is_even and not bool((keys.diff() > 0).any()):  # padded rows are the sequence
        made = call_with_lazies(func, (x,), x, given, *words)
    else:
        drops = train and 0 < dropout < 1
        kind = table.ROWS[func.__name__]["n_gates"], num_layers, is_both, is_first, is_sorted, drops
        needs = uneven.needs(x, states, lengths, *kind)
        own, n_all = LAYERS[func.__name__], lengths.numel()
        of_rows = _with_rows(keys, made_of)
        made = call_with_lazies(own, (x,), x, of_rows, given, *words, is_sorted, needs, n_all)
        _core.notes().setdefault("lengths", {})[id(lengths)] = lengths
    if type(made[0]) is not LazyTensor:
        return NotImplemented
    out = _Packed(made[0], None, None, made_of.lengths, made_of.order, is_first, True)
    out.index = made_of.index
    last = [
        state
        if made_of.order is None
        else _select(state, 1, made_of.order.to(state.device), is_own=True)
        for state in made[1:]
    ]
    return _gather(out), *last


def _listed(hx: Any) -> list[Tensor]:
    return list(hx) if isinstance(hx, tuple | list) else [hx]


def _unsorted(state: Tensor, order: Tensor | None, inverse: Tensor | None) -> Tensor:
    if order is None or inverse is None:
        return state
    before = _lookup(_selected, state)
    if (
        before is not None
        and before.dim == 1
        and torch.equal(_number_of(before.index).cpu(), order)
    ):
        source: Tensor = before.source
        return source
    return state.index_select(1, inverse.to(state.device))


def pad(func: Func, args: Args, kwargs: Words) -> Any:
    """Handle _pad_packed_sequence(data, batch_sizes, batch_first, padding_value, total_length)."""
    made_of = _lookup(_packed, args[0]) if len(args) == 5 and not kwargs else None
    if made_of is None or config.is_one_chunk():
        return NotImplemented
    _, _, is_batch_first, padding, n_steps = args
    n_most = int(made_of.lengths.max())
    x = _first_steps(made_of, n_most)
    is_new = not made_of.is_result or padding != 0
    if is_new:
        n_beyond = 1 if made_of.is_batch_first else 0
        steps = torch.arange(n_most, device=x.device).unsqueeze(n_beyond ^ 1)
        lengths = _with_rows(made_of.lengths, made_of).to(x.device).unsqueeze(n_beyond)
        is_there = (steps < lengths).reshape(x.shape[:2] + (1,) * (x.dim() - 2))
        x = torch.where(is_there, x, torch.full((), padding, dtype=x.dtype, device=x.device))
    elif made_of.is_handed_out:
        x = x.clone()
    made_of.is_handed_out |= not is_new
    is_turned = is_batch_first != made_of.is_batch_first
    x = x.transpose(0, 1) if is_turned else x
    dim = 1 if is_batch_first else 0
    if n_steps > n_most:
        beyond = [0, 0] * (x.dim() - 1 - dim) + [0, n_steps - n_most]
        x = F.pad(x, beyond, value=padding)
    by_length = made_of.lengths
    if made_of.order is None:
        return x, by_length.clone()
    order = made_of.order.to(x.device)
    x = x.contiguous()
    return _select(x, 1 - dim, order, is_own=True), by_length[made_of.order]


# Recorded calls -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_of_uneven_rows(lengths: Tensor, n_all: int) -> Iterator[None]:
    """Keep torch from a fused kernel if all rows of a chunk happen to have one length: it takes
    twice the memory of the kernel that the whole batch of `n_all` rows takes."""
    was_enabled = torch.backends.mkldnn.enabled
    is_even = int(lengths.min()) == int(lengths.max())
    if not (is_even and was_enabled) or lengths.numel() == n_all:
        yield
        return
    torch._C._set_mkldnn_enabled(False)  # set_flags() would set a precision, too
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


def _layer(name: str) -> Callable[..., Any]:
    call = getattr(_VF, name)

    def packed(
        x: Tensor,
        keys: Tensor,
        hx: Any,
        params: list[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        is_both: bool,
        is_batch_first: bool,
        is_sorted: bool,
        needs: tuple[int, ...] = (),
        n_all: int = 1,
        noises: Sequence[Tensor] = (),
    ) -> Any:
        """Run a recurrent layer over padded rows and their keys (`packing.keys_of`), which were
        made for `n_all` rows. `needs` is what the planner counts as its memory. `noises` are masks
        for the dropout between its layers, time-major and padded; none: torch draws them.

        Steps are gathered and scattered by index: torch's own calls touch memory as large as the
        padded rows once for each distinct length.

        Return the results, padded with 0 to the steps of `x`, and the last states.
        """
        (lengths, order), states = packing.of_keys(keys.cpu(), n_all), _listed(hx)
        n_rows, n_steps = x.shape[:2] if is_batch_first else x.shape[1::-1]
        is_turned = is_batch_first and is_sorted  # the strides of torch's own result
        if order is not None:
            states = [state.index_select(1, order.to(state.device)) for state in states]
        sizes, step, row = packing.steps_of(lengths, order)
        by_step, by_row = step * n_rows + row, row * n_steps + step
        is_by_row = is_batch_first and not is_turned
        places = (by_row if is_by_row else by_step).to(x.device)
        x = x.transpose(0, 1) if is_turned else x  # so that its gradient has the strides of torch's
        at = (step, row) if noises else ()
        del step, row, by_step, by_row
        data = x.flatten(0, 1).index_select(0, places)
        given = states if isinstance(hx, tuple | list) else states[0]
        with _as_of_uneven_rows(lengths, n_all):
            if noises:

                def one(data: Tensor, hx: Any, params: Sequence[Tensor]) -> Any:
                    return call(data, sizes, hx, params, has_biases, 1, 0.0, train, is_both)

                layers = params, num_layers, dropout, (noise[at] for noise in noises)
                out, *last = noise_drawn.by_layers(one, data, given, *layers)
                del layers
            else:
                words = params, has_biases, num_layers, dropout, train, is_both
                out, *last = call(data, sizes, given, *words)
        del data, states, given, at
        padded = out.new_zeros(n_rows * n_steps, out.shape[-1]).index_put_((places,), out)
        if order is not None:
            last = [state.index_select(1, packing.invert(order).to(state.device)) for state in last]
        if is_turned:
            return padded.unflatten(0, (n_steps, n_rows)).transpose(0, 1), *last
        return padded.unflatten(0, x.shape[:2]), *last

    packed.__name__ = name
    return packed


LAYERS = {
    name: _layer(name)
    for name, row in table.ROWS.items()
    if row["draws"] == "LAYERS" and hasattr(_VF, name)
}
