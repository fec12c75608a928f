# SPDX-License-Identifier: Apache-2.0
"""Types of the C module koila._core; methods.def says what its functions do.

A value or a node is an int: its id on the tape of the thread.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NotRequired, TypedDict, type_check_only

import torch

# Where the rows of a value are: (axis, dim, outer, inner), see basics/rows.py
_Place = tuple[int, int, int, int]
# (dtype, shape, strides or None, requires_grad, device number)
_Description = tuple[torch.dtype, torch.Size, tuple[int, ...] | None, bool, int]
_Ids = tuple[int, ...]
# An instruction of a schedule: (op, graph, first run, runs, values, others), see schedule.def
_Step = tuple[int, int, int, int, _Ids, _Ids]
# The policy of a schedule: (is_graph, keep_every, offload_every, n_pieces, n_light, n_across,
# is_live, n_chunks), as KlHomes of schedule.h
_Homes = tuple[bool, int, int, int, int, int, bool, int]
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
# that run once), has checkpoints, a call whose output is written through x.data or None
_Staged = tuple[
    object,
    list[int],
    list[int],
    list[tuple[int, int]],
    dict[int, int],
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
    text: str
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
def register(
    func: Any,
    kind: int,
    name: str,
    handler: Callable[..., Any] | None,
    has_meta: bool,
    returns_list: bool,
    is_random: bool,
    row: str | None,
    container: type | None,
    /,
) -> None: ...
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
def has_known() -> bool: ...
def has_numbers() -> bool: ...
def note_backward() -> None: ...
def is_busy() -> bool: ...
def is_pending_here(lazy: torch.Tensor, /) -> bool: ...
def lazy_of(value: int, /) -> LazyTensor: ...
def new_tape() -> object: ...
def held(
    of: object,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    /,
) -> Any: ...
def drawing(func: Callable[[], Any], /) -> Any: ...
def has_draw(is_dead: bool, /) -> bool: ...
def waiting_draws() -> list[tuple[int, int, int]]: ...
def note_drawn(node: int, /) -> None: ...
def set_type_attribute(type: type, name: str, value: Any, /) -> None: ...
def set_attribute_by(
    descriptor: Any, put: Callable[[torch.Tensor, Any], object] | None, /
) -> bool: ...
def call_class_method_by(
    descriptor: Any,
    instead: Callable[[Any, tuple[Any, ...], dict[str, Any] | None], Any] | None,
    /,
) -> Any: ...
def set_busy(flag: bool, /) -> None: ...
def outdated(is_over: bool, /) -> tuple[list[int], list[int]]: ...
def forget_left() -> None: ...
def check_leaves() -> None: ...
def refresh_leaf(value: int, /) -> None: ...
def hook(lazy: torch.Tensor, is_retained: bool = False, is_live: bool = False, /) -> int | None: ...
def retained(value: int, is_of_lazy: bool = False, /) -> int | None: ...
def id(lazy: torch.Tensor, /) -> int | None: ...
def install_slots(names: tuple[str, ...], /) -> bool: ...
def close() -> bool: ...
def can_cut() -> bool: ...
def won_whole() -> int: ...
def reached() -> list[tuple[int, torch.Tensor]] | None: ...
def hand_out(
    roots: list[tuple[int, torch.Tensor]], others: list[tuple[int, torch.Tensor]], /
) -> tuple[LazyTensor, ...]: ...
def replace_leaves(lazy: LazyTensor, make: Callable[[torch.Tensor], torch.Tensor], /) -> None: ...
def replace_leaf(lazy: LazyTensor, leaf: int, tensor: torch.Tensor, /) -> None: ...
def set_wanted(lazies: tuple[LazyTensor, ...], is_wanted: bool, /) -> None: ...
def pending_bytes(is_graph: bool, /) -> int: ...
def memo() -> dict[str, Any]: ...
def stage(
    roots: list[torch.Tensor | int],
    is_known_only: bool,
    n_segments: int = 1,
    is_headed: bool = False,
    gets: Callable[[torch.Tensor], bool] | None = None,
    /,
) -> _Staged: ...
def told(program: object, what: str, /) -> list[Any]: ...
def staged(program: object, node: int, /) -> _StagedNode: ...
def maker(program: object, value: int, /) -> tuple[_StagedNode | None, bool, bool, bool]: ...
def overwritten(program: object, before: int, /) -> tuple[int, list[int]] | None: ...
def writer_from(node: int, value: int, /) -> tuple[int, int] | None: ...
def schedule(
    program: object, homes: _Homes, /
) -> tuple[list[_Step], int, dict[int, tuple[int, tuple[int, ...]]]]: ...
def run(
    program: object,
    run: int,
    env: list[torch.Tensor | None],
    imports: list[torch.Tensor | None],
    rows: int,
    is_grad_off: bool,
    run_other: Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    cut: Callable[[torch.Tensor, int], torch.Tensor],
    cloned: set[int],
    clone: Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    saved: list[Any] | None,
    settle: Callable[[int], None],
    again: tuple[int, ...] | None,
    aside: object,
    /,
) -> None: ...
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
    homes: _Homes,
    nodes: tuple[bytes, bytes, bytes, bytes],
    states: tuple[int, int],
    peak_of: Callable[[set[torch.Tensor]], float],
    uneven: tuple[float, float] = ...,
    /,
) -> tuple[bytes, int, float]: ...
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
def node(
    id: int, /
) -> tuple[Callable[..., Any], str | None, str | None, str, int, tuple[int, ...], _NodeSaves]: ...
def op_table() -> list[_Row]: ...
def parts_table() -> list[
    tuple[str, int, float, float, float, _Amount | None, _Held | None, bool, int]
]: ...
def fast_ways() -> dict[str, bool]: ...
def set_blocks(
    width: int, dtypes: tuple[torch.dtype, ...], tiled: tuple[torch.dtype, ...], /
) -> None: ...
def fix_malloc(size: int, /) -> bool: ...
def sees_storages() -> bool: ...
def follow_storages(
    parts: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None, /
) -> None: ...
def is_following_storages() -> bool: ...
def collecting_garbage(phase: str, info: dict[str, int], /) -> None: ...
def note_storages(objects: Sequence[object], /) -> None: ...
def note_young_storages() -> None: ...
def storage_bytes() -> int: ...
def unsettled_storages() -> list[tuple[int, int]]: ...
def settle_storage(key: int, is_file: bool, /) -> None: ...
def fail_alloc_after(n: int, /) -> None: ...
def n_blocks() -> int: ...
def abandon() -> None: ...
def forget() -> None: ...
def swap(left: torch.Tensor, right: torch.Tensor, /) -> None: ...
def set_for_chunks(lazy: torch.Tensor, /) -> bool: ...
def has_views(lazy: torch.Tensor, /) -> bool: ...
def storage(lazy: torch.Tensor, /) -> int | None: ...
def spend(program: object, is_asked: bool, /) -> int | None: ...
def behind(value: int, /) -> list[torch.Tensor]: ...
def is_spent(lazy: torch.Tensor, /) -> bool: ...
def leaves_of(tensor: torch.Tensor | None, /) -> list[int]: ...

# Only where setup.py builds for tests: see KL_TESTS.
def infer(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    places: Iterable[_Place | None] | None = None,
    rows: Sequence[int] | None = None,
    /,
) -> _Inferred: ...
