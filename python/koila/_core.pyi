# SPDX-License-Identifier: Apache-2.0
"""Types of the C module koila._core; methods.def says what its functions do.

A value or a node is an int: its id on the tape of the thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NotRequired, TypedDict, TypeVar, type_check_only

import torch

_T = TypeVar("_T")
# Where the rows of a value are: (axis, dim, outer, inner), see basics/rows.py
_Place = tuple[int, int, int, int]
# (dtype, shape, strides or None, requires_grad, device number)
_Description = tuple[torch.dtype, torch.Size, tuple[int, ...] | None, bool, int]
_Ids = tuple[int, ...]
# functions.Entry: (kind, name, handler, has_meta, returns_list, is_random, row, container)
_Entry = tuple[int, str, Callable[..., Any] | None, bool, bool, bool, str | None, type | None]

# What Python notes about the program of a thread. Each module that writes an entry explains it.
class _Notes(TypedDict, total=False):
    # draws.py: the chunks of an axis in which calls drew
    grids: dict[int, list[tuple[int, int]]]
    # by call and chunk: the generator's state, or a seed
    cells: dict[tuple[int, int | None], torch.Tensor | int]
    starts: dict[int, torch.Tensor]  # by call
    ends: dict[tuple[int, tuple[int, int] | None], bytes]  # by call and rows
    noises: dict[int, list[Any] | None]  # noise.py: the tensors that a call draws
    effects: set[int]  # visible.py: the calls whose running statistics are written
    versions: dict[int, tuple[int, int]]  # overwritten.py: of running statistics
    watched: dict[int, Any]  # aliases.py: by leaf, a checksum of memory that others may write
    arrays: dict[int, list[Any]]  # arrays.py: by storage
    indices: dict[int, tuple[torch.Tensor, Any]]  # copies of arrays in an index, by id
    unwritten: dict[int, Any]  # unwritten.py: by call, its write
    read_numbers: list[Any]  # read_numbers.py: numbers that the user has
    hooks: dict[int, OrderedDict[int, Any]]  # hooks.py: by value
    live_hooks: dict[int, list[Any]]  # by value
    retained: dict[int, torch.Tensor]  # gradients, by a number of retained()
    seen: Any  # the gradients of a backward that calls hooks now
    has_leaves: bool  # leaves.py: there are leaves in mid-program
    layouts: dict[int, Any]  # layouts.py: by value
    lengths: dict[int, torch.Tensor]  # packed.py: of sequences, by id
    recipes: list[Any]  # derived.py: how gradients within the program were made
    around: dict[int, tuple[int, ...]]  # checkpoints.py: by region, those around it and itself
    given: dict[int, tuple[list[int], set[int]]]  # what a region's function was given
    modules: dict[int, list[Any]]  # by region, the states of modules
    live: dict[int, Any]  # recomputed.py: by region, its body
    read: dict[int, float]  # steps.py: by number of calls, the bytes they need whole
    cut_off: tuple[int, float]  # the calls before, on other tapes, and their bytes

# facts.Job: (is_grad_off, run_other, cut, cloned, clone, saved, settle, again, aside, functions)
_Job = tuple[
    bool,
    Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    Callable[[torch.Tensor, int], torch.Tensor],
    set[int],
    Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None,
    list[Any] | None,
    Callable[[int], None] | None,
    tuple[int, ...] | None,
    object,
    Mapping[int, Callable[..., Any]],
]
# An instruction of a schedule: (op, graph, first run, runs, values, others), see schedule.def
_Step = tuple[int, int, int, int, _Ids, _Ids]
# The policy of a schedule: (is_graph, policies of the boundary values, n_pieces, second_size,
# is_live, n_chunks), as KlPolicy of schedule.h
_Policy = tuple[bool, bytes, int, int, bool, int]
# (id, stage, late stage, mode, reduce, axis, first out, n outs, is random, writes, leaf writes,
#  is data, is open, is for chunks, checkpoint, does its backward read what it saves, imports)
_StagedNode = tuple[
    int,
    int,
    int | None,
    int,
    int,
    int,
    int,
    int,
    bool,
    int,
    int,
    bool,
    bool,
    bool,
    int,
    bool,
    tuple[int, ...],
]
# What autograd saves of a node: (bits of inputs, bits of outputs, bytes_extra, is_extra_rows,
# bytes_fixed, bytes_workspace, bytes_backward), as KlSaves of infer.h
_NodeSaves = tuple[int, int, int, bool, int, int, int]
# An argument of a call: its position or its keyword
_Where = int | str

# What stage() returns: handle, roots, values the user can reach, (storage with several
# LazyTensors, how many), rows by axis, tensors that enter, devices on which calls allocate,
# numbers of nodes, values, imports and stages, last body, is tail linear, tail node, are all
# pending calls staged, has writes, has side effects, draws, (bytes that calls allocate, of these
# calls that run once, bytes of imports with rows, bytes of leaves without rows, number of calls
# that run once), has checkpoints, a call whose output is written through x.data or None, calls of
# the tape, does a graph lead to no root
_Axes = list[tuple[int, int]]
_Staged = tuple[
    object,
    list[int],
    list[int],
    list[tuple[int, int]],
    _Axes,
    list[torch.Tensor],
    set[torch.device],
    int,
    int,
    int,
    int,
    int | None,
    bool,
    int | None,
    bool,
    bool,
    bool,
    bool,
    tuple[int, int, int, int, int],
    bool,
    int | None,
    int,
    bool,
]

# Bytes as multiples: of the result, of the first operand, of the element count of the larger
_Amount = tuple[float, float, float]
# Workspace of an op, as KlHeld of ops.h: run, back_outs, back_ins, back_masks, turned, handed_on,
# is_wide, is_stepwise, is_composed, is_of_terms, turns
_Held = tuple[_Amount, _Amount, _Amount, float, float, int, bool, bool, bool, bool, bool]

@type_check_only
class _Row(TypedDict):
    name: str
    call: str
    kind: str
    aliases: list[str]
    is_heavy: bool
    n_gates: int  # of recurrent layers and cells
    draws: str | None
    gathers: str | None
    is_cast: tuple[bool, bool]
    held: _Held

@type_check_only
class _Saves(TypedDict):
    inputs: int
    outputs: int
    bytes_extra: int
    is_extra_rows: bool
    bytes_fixed: int
    bytes_workspace: int
    bytes_backward: int
    bytes_row: int
    bytes_steps: int

@type_check_only
class _Inferred(TypedDict):
    status: str
    text: NotRequired[str]  # why no rule is asked
    # All that follows is there only if the status is "OK"
    mode: NotRequired[str]
    reason: NotRequired[str | None]
    reduce: NotRequired[str | None]
    random: NotRequired[bool]
    effects: NotRequired[int]
    alias: NotRequired[tuple[str, int | None]]
    saves: NotRequired[_Saves]
    # dtype, shape, strides, requires_grad, place
    outs: NotRequired[
        list[tuple[str, tuple[int, ...], tuple[int, ...] | None, bool, _Place | None]]
    ]
    in_places: NotRequired[list[_Place | None]]
    inputs: NotRequired[list[tuple[_Where, int | None, bool]]]
    rewrites: NotRequired[list[tuple[_Where, int | None, str | None, int]]]

@type_check_only
class _TorchFunction:
    @property
    def __name__(self) -> str: ...
    def __call__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None, /) -> Any: ...

# Its own attributes, besides a tensor's; patches/install.py sets their docstrings
class LazyTensor(torch.Tensor):
    _node: Any
    def __repr__(self) -> str: ...  # type: ignore[override]
    def __str__(self) -> str: ...
    __torch_function__: ClassVar[_TorchFunction]
    @staticmethod
    def __torch_dispatch__(func: Any, types: Any, args: Any = (), kwargs: Any = None, /) -> Any: ...

def bind(folders: tuple[str, ...], reductions: int, objects: dict[str, Any], /) -> None: ...
def register(func: Any, entry: _Entry, /) -> None: ...
def count_interpreters(n: int, /) -> None: ...
def count_dual_levels(n: int, /) -> None: ...
def set_region(region: int, /) -> int: ...
def set_in_function(flag: bool | None, /) -> bool: ...
def note_switches(setting: int, is_flash_allowed: bool, /) -> None: ...
def new_axis() -> int: ...
def input(tensor: torch.Tensor, dim: int, axis: int, rows: int, /) -> LazyTensor: ...
def like(tensor: torch.Tensor, lazy: LazyTensor, /) -> LazyTensor: ...
def force(lazy: LazyTensor, /) -> torch.Tensor: ...
def read(lazy: LazyTensor, /) -> torch.Tensor: ...
def leave(lazy: LazyTensor, /) -> torch.Tensor | None: ...
def release() -> None: ...
def real(lazy: LazyTensor, /) -> torch.Tensor | None: ...
def is_input(lazy: LazyTensor, /) -> bool: ...
def is_held_by(tensor: torch.Tensor, n_others: int, /) -> bool: ...
def rows_dim(lazy: torch.Tensor, /) -> int: ...
def describe(tensor: torch.Tensor, /) -> _Description | None: ...
def live(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    is_plain: bool,
    /,
) -> Any: ...
def live_with_all(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    is_plain: bool,
    /,
) -> Any: ...
def flush() -> None: ...
def has_no_grad() -> bool: ...
def has_stranded() -> bool: ...
def has_numbers() -> bool: ...
def note_backward() -> None: ...
def is_busy() -> bool: ...
def is_pending_here(lazy: torch.Tensor, /) -> bool: ...
def lazy_of(value: int, /) -> LazyTensor: ...
def new_tape(arrays: list[bytes] = ..., /) -> object: ...
def held(
    of: object,
    func: Callable[..., _T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    /,
) -> _T: ...
def drawing(func: Callable[[], _T], /) -> _T: ...
def has_draw(is_dead: bool, /) -> bool: ...
def waiting_draws() -> list[tuple[int, int, int]]: ...
def note_drawn(node: int, /) -> None: ...
def set_type_attribute(type: type, name: str, value: Any, /) -> None: ...
def replace(descriptor: Any, by: Callable[..., Any] | None, is_before: bool = False, /) -> Any: ...
def before_set_item(by: Callable[[torch.Tensor], Any] | None, /) -> bool: ...
def set_busy(flag: bool, /) -> None: ...
def outdated(is_over: bool, /) -> tuple[list[int], list[int]]: ...
def forget_left() -> None: ...
def check_leaves() -> None: ...
def refresh_leaf(value: int, /) -> None: ...
def hook(lazy: torch.Tensor, is_retained: bool = False, is_live: bool = False, /) -> int | None: ...
def graph_of(value: int, /) -> int: ...
def retained(value: int, is_of_lazy: bool = False, /) -> int | None: ...
def id(lazy: torch.Tensor, /) -> int | None: ...
def handler(own: Callable[..., Any], /) -> Callable[..., Any]: ...
def install_slots(names: tuple[str, ...], /) -> None: ...
def close() -> bool: ...
def is_empty() -> bool: ...
def trim() -> tuple[int, int] | None: ...
def reals() -> list[torch.Tensor]: ...
def can_cut() -> bool: ...
def won_whole() -> int: ...
def reached() -> list[tuple[int, torch.Tensor]] | None: ...
def left_numbers(is_any: bool, /) -> list[tuple[int, torch.Tensor]]: ...
def hand_out(
    roots: list[tuple[int, torch.Tensor]], others: list[tuple[int, torch.Tensor]], /
) -> tuple[LazyTensor, ...]: ...
def replace_leaves(lazy: LazyTensor, make: Callable[[torch.Tensor], torch.Tensor], /) -> None: ...
def replace_leaf(lazy: LazyTensor, leaf: int, tensor: torch.Tensor, /) -> None: ...
def set_wanted(lazies: tuple[LazyTensor, ...], is_wanted: bool, /) -> None: ...
def pending_bytes(is_graph: bool, /) -> int: ...
def notes() -> _Notes: ...
def stage(
    roots: list[torch.Tensor | int],
    is_no_grad_only: bool,
    gets: Callable[[torch.Tensor], bool] | None = None,
    /,
) -> _Staged: ...
def cut_program(program: object, n_segments: int, is_headed: bool, /) -> tuple[object, _Axes]: ...
def facts_of(program: object, what: str, /) -> Any: ...
def print_of(program: object, /) -> tuple[int, int, int, int, int, list[bytes | None]]: ...
def overwritten(program: object, before: int, /) -> tuple[int, list[int]] | None: ...
def writer_from(node: int, value: int, /) -> tuple[int, int] | None: ...
def schedule(
    program: object, policy: _Policy, /
) -> tuple[list[_Step], int, dict[int, tuple[int, tuple[int, ...]]]]: ...
def run(
    program: object,
    run: int,
    env: list[torch.Tensor | None],
    imports: list[torch.Tensor | None],
    rows: int,
    job: _Job,
    /,
) -> None: ...
def pack_into(saved: list[Any], /) -> Callable[[torch.Tensor], list[torch.Tensor]]: ...
def run_alone(
    node: int,
    env: list[torch.Tensor | None],
    rows: int,
    is_grad_off: bool,
    run_other: Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    /,
) -> None: ...
def gradient_part(
    program: object, run: int, values: list[int], /
) -> tuple[int, list[int], list[int], list[int], list[int]]: ...
def measure(
    program: object,
    policy: _Policy,
    nodes: tuple[bytes, bytes, bytes, bytes],
    states: tuple[int, int],
    peak_of: Callable[[set[torch.Tensor]], float],
    uneven: tuple[float, float, float, float, bool] = ...,
    /,
) -> tuple[bytes, int, float, bytes]: ...
def peak(moments: bytes, n_rows: int, rows: int, /) -> tuple[float, float, int]: ...
def moments(
    moments: bytes, n_rows: int, rows: int, /
) -> list[tuple[int, int, bool, float, float, float]]: ...
def skip_words(state: bytes, n: int, /) -> bytes: ...
def check_result(node: int, value: int, tensor: torch.Tensor, /) -> None: ...
def deliver(value: int, tensor: torch.Tensor, is_final: bool, /) -> None: ...
def failed(error: BaseException, /) -> bool: ...
def cut(value: int, tensor: torch.Tensor, /) -> None: ...
def call(node: int, /) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]: ...
def value(
    id: int, /
) -> tuple[
    torch.dtype,
    torch.Size,
    bool,
    _Place | None,
    int,
    torch.Tensor | None,
    torch.Tensor | None,
    int,
    int,
    tuple[int, int, int] | None,
    torch.device,
    tuple[int, ...] | None,
    bool,
]: ...
def maker_of(
    value: int, /
) -> tuple[int, int, list[tuple[int, _Place | None, torch.Tensor | None]]] | None: ...
def node(
    id: int, /
) -> tuple[Callable[..., Any], str | None, str | None, str, int, tuple[int, ...], _NodeSaves]: ...
def op_table() -> list[_Row]: ...
def parts_table() -> list[
    tuple[str, int, float, float, float, _Amount | None, _Held | None, bool, int]
]: ...
def is_recycling() -> bool: ...
def set_blocks(
    width: int,
    dtypes: tuple[torch.dtype, ...],
    tiled: tuple[torch.dtype, ...],
    emulated: tuple[torch.dtype, ...],
    /,
) -> None: ...
def return_free() -> None: ...
def reuse_freed(library: str, /) -> bool: ...
def resident() -> int: ...
def watch_resident(bound: int, /) -> bool: ...
def stop_resident() -> tuple[int, int]: ...
def follow_storages(
    parts: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None, /
) -> None: ...
def is_following_storages() -> bool: ...
def collecting_garbage(phase: str, info: dict[str, int], /) -> None: ...
def note_storages(objects: Sequence[object], /) -> None: ...
def storage_bytes() -> int: ...
def storage_fields(tensor: object, /) -> tuple[int, int, int, int, bool, int]: ...
def settle_storages(ask: Callable[[int], bool], /) -> None: ...
def abandon() -> None: ...
def forget() -> None: ...
def swap(left: torch.Tensor, right: torch.Tensor, /) -> None: ...
def set_for_chunks(lazy: torch.Tensor, /) -> bool: ...
def has_views(lazy: torch.Tensor, /) -> bool: ...
def storage(lazy: torch.Tensor, /) -> int | None: ...
def spend(program: object, is_asked: bool, /) -> int | None: ...
def behind(value: int, /) -> tuple[list[torch.Tensor], list[int]]: ...
def is_graph_freed(lazy: torch.Tensor, /) -> bool: ...
def leaves_of(tensor: torch.Tensor | None, /) -> list[int]: ...

# Only where setup.py builds for tests: see KL_TESTS.
def fail_alloc_after(n: int, /) -> None: ...
def n_blocks() -> int: ...
def infer(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    places: Iterable[_Place | None] | None = None,
    rows: Sequence[int] | None = None,
    /,
) -> _Inferred: ...
