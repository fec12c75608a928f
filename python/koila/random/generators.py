# SPDX-License-Identifier: Apache-2.0
"""Torch's generators while recorded draws wait: where each stands in eager's order."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from koila import _core
from koila.basics import rows, surroundings
from koila.basics.lines import user_line
from koila.basics.threads import in_turn
from koila.messages.errors import KoilaError
from koila.random import noise_drawn, plain
from koila.staged import noise
from koila.staged.noise import is_uncounted, noises_of

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    pass


_manual_seed = torch._C.Generator.manual_seed  # as it was before koila patched it


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that calls on a device draw from where none is named."""
    if device.type == "cuda":
        torch.cuda.init()  # a program may be the first to use it, and has no generators before
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def seed_from(generator: torch.Generator) -> int:
    """Draw a seed from a generator. On CUDA no kernel runs: the generator's place is hashed."""
    if generator.device.type != "cuda":
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # in fours, as CUDA's generator asks
    text = f"{generator.initial_seed()} {offset}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def states() -> dict[torch.device, torch.Tensor]:
    """The states of the generators that a plain call may draw from."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    return {device: noise.get_state(generator_of(device)) for device in devices}


#: Where each thread's first waiting draw has to start, and its line: the generators are shared.
_expected: dict[int, tuple[dict[torch.device, torch.Tensor], str]] = {}
#: Threads that have recorded a random call: with two of them nobody knows whose draw comes first.
_drawing: set[int] = set()


def note_recorded() -> None:
    """A random call was recorded and none was waiting: the generators stay where they are until it
    has drawn."""
    _drawing.add(threading.get_ident())
    _expected[threading.get_ident()] = states(), user_line()
    plain.watch(make_way)


def note_drawn() -> None:
    """This thread drew."""
    if not _core.has_draw(False):
        _expected.pop(threading.get_ident(), None)
        plain.unwatch()
    _disturb_others()


def _disturb_others() -> None:
    """Other threads do not find the generators where they left them."""
    for thread in set(_expected) - {threading.get_ident()}:
        _expected.pop(thread, None)


def _do_others_draw() -> bool:
    """Whether programs of other threads may draw at any moment."""
    _drawing.intersection_update([thread.ident for thread in threading.enumerate()])
    return bool(_drawing - {threading.get_ident()})


def check_undisturbed() -> None:
    """What waits is about to draw.

    Raises:
        KoilaError: something that koila could not see has drawn since it was recorded.
    """
    states, recorded = _expected.get(threading.get_ident(), ({}, ""))
    if not _core.has_draw(False) or all(
        torch.equal(state, noise.get_state(generator_of(d))) for d, state in states.items()
    ):
        return
    _expected.pop(threading.get_ident(), None)  # whoever asks again goes on
    if _do_others_draw():
        return
    raise KoilaError(
        f"random numbers were drawn between a random call ({recorded}) and its run "
        f"({user_line()}) where koila cannot see it, by a function that was bound earlier (from "
        "torch import rand) or by compiled code: the program's own draws would come after them, "
        "and not be eager's. Nothing has run and nothing is lost. Call such a function as "
        "torch.rand(), or read the results first; asked again, the program runs with the numbers "
        "that come next"
    )


def check_live() -> None:
    """All that waits is about to run whole, and to draw."""
    check_undisturbed()
    _expected.pop(threading.get_ident(), None)  # if it stops half way, some has been drawn
    plain.unwatch()
    _disturb_others()


@in_turn
@surroundings.in_outside
def make_way() -> None:
    """Something else is about to draw: all that waits draws before it."""
    if not _core.is_busy() and any(is_uncounted(i, out) for i, out, _ in _core.waiting_draws()):
        _core.flush()
    move_on()


@in_turn
@surroundings.in_outside
def move_on() -> None:
    """Move the generators past all that waits: what is drawn next comes after it, as in eager."""
    waiting = _core.waiting_draws()
    if waiting:
        check_undisturbed()
        starts: dict[int, torch.Tensor] = _core.memo().setdefault("starts", {})
        is_busy = _core.is_busy()
        _core.set_busy(True)
        try:
            for i, first_out, n_outs in waiting:
                generator = generator_of(_core.value(first_out)[10])
                state = noise.get_state(generator)
                try:
                    advance(i, first_out, n_outs, generator)
                except BaseException:
                    noise.set_state(generator, state)
                    raise
                starts[i] = state
                _core.note_drawn(i)
        finally:
            _core.set_busy(is_busy)
    note_drawn()


def let_go() -> bool:
    """Let what waits draw, where nobody will look at some of it: else that would keep what it reads
    until something asks for it.

    Returns:
        Whether it was so.
    """
    is_dead = _core.has_draw(False) and _core.has_draw(True)
    if is_dead:
        move_on()
    return is_dead


def advance(i: int, first_out: int, n_outs: int, generator: torch.Generator) -> None:
    """Let one call draw for the whole batch, and forget the numbers."""
    noises = noises_of(i, first_out)
    if noises is not None:
        for one in noises:
            noise_drawn.advance(one, one.n_elements, generator)
        return
    given = {value: stand_in(value, None, -1) for value in _core.node(i)[5] if value >= 0}
    run_alone(i, -1, given, first_out + n_outs, True)


def set_to(generator: torch.Generator, cell: torch.Tensor | int) -> None:
    if isinstance(cell, int):
        _manual_seed(generator, cell)
    else:
        noise.set_state(generator, cell)


def stand_in(value: int, place: rows.Place | None, n_rows: int) -> torch.Tensor:
    """Ones, which are legal as weights, as probabilities and as deviations: where a call is made
    for its draws alone, only sizes and types matter."""
    info = _core.value(value)
    shape = info[1] if place is None else rows.chunk_shape(info[1], place, n_rows)
    return torch.ones(shape, dtype=info[0], device=info[10])


def make_call(
    _: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make a call as it was recorded."""
    return func(*args, **kwargs)


def run_alone(
    i: int, n_rows: int, given: dict[int, torch.Tensor], n_values: int, is_grad_off: bool
) -> list[Any]:
    """Run one call on the tensors given for its inputs; all values after it, by number."""
    env: list[Any] = [None] * n_values
    for value, tensor in given.items():
        env[value] = tensor
    _core.run_alone(i, env, n_rows, is_grad_off, make_call)
    return env
