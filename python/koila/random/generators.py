# SPDX-License-Identifier: Apache-2.0
"""Keep torch's generators in eager mode's order while recorded random calls have yet to draw."""

from __future__ import annotations

import hashlib
from weakref import WeakKeyDictionary, WeakSet

import torch

from koila import _core
from koila.basics import generator_state, surroundings
from koila.basics.lines import user_line
from koila.basics.threads import Thread, in_turn, this_thread
from koila.messages.errors import KoilaError
from koila.random import noise_drawn, plain
from koila.staged import one_call
from koila.staged.noise import is_uncounted, noises_of

_manual_seed = torch._C.Generator.manual_seed  # taken before koila patches it


def generator_of(device: torch.device) -> torch.Generator:
    """Return the default generator of a device."""
    if device.type == "cuda":
        torch.cuda.init()  # creates the generators, if this program is the first to use CUDA
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def seed_from(generator: torch.Generator) -> int:
    """Draw a seed from a generator. On CUDA its seed and offset are hashed, so no kernel runs."""
    if generator.device.type != "cuda":
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # offsets of CUDA's generator are multiples of 4
    text = f"{generator.initial_seed()} {offset}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def states() -> dict[torch.device, torch.Tensor]:
    """Return the states of the generators that a plain call may draw from."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    return {device: generator_state.get(generator_of(device)) for device in devices}


#: By thread: the generator states at which its first waiting call must draw, and the line of that
#: call. All threads share the generators.
_expected: WeakKeyDictionary[Thread, tuple[dict[torch.device, torch.Tensor], str]] = (
    WeakKeyDictionary()
)
#: Threads that have recorded a random call. Draws of several threads have no defined order.
_drawing: WeakSet[Thread] = WeakSet()


def note_recorded() -> None:
    """Note that this thread recorded its first waiting random call: until it has drawn, no other
    call may move the generators."""
    _drawing.add(this_thread())
    _expected[this_thread()] = states(), user_line()
    plain.watch(make_way)


def note_drawn() -> None:
    """Note that this thread drew."""
    if not _core.has_draw(False):
        _expected.pop(this_thread(), None)
        plain.unwatch()
    _disturb_others()


def _disturb_others() -> None:
    """Note that this thread moved the generators: others no longer expect a certain state."""
    for thread in list(_expected):
        if thread is not this_thread():
            _expected.pop(thread, None)


def check_undisturbed() -> None:
    """Raise a KoilaError unless the generators are where they were at recording, before waiting
    calls draw: something that koila cannot see has drawn since."""
    states, recorded = _expected.get(this_thread(), ({}, ""))
    if not _core.has_draw(False) or all(
        torch.equal(state, generator_state.get(generator_of(d))) for d, state in states.items()
    ):
        return
    _expected.pop(this_thread(), None)  # the error is raised once; a second try runs
    if any(thread is not this_thread() for thread in _drawing):
        return  # the programs of other threads may draw at any moment
    raise KoilaError(
        f"random numbers were drawn between a random call ({recorded}) and its run "
        f"({user_line()}) where koila cannot see it, by a function that was bound earlier (from "
        "torch import rand) or by compiled code: the program's own draws would come after them, "
        "and not be eager's. Nothing has run and nothing is lost. Call such a function as "
        "torch.rand(), or read the results first; asked again, the program runs with the numbers "
        "that come next"
    )


def check_live() -> None:
    """Prepare for a live run of all pending calls, which draws their random numbers."""
    check_undisturbed()
    _expected.pop(this_thread(), None)  # a run that stops half way has drawn a part
    plain.unwatch()
    _disturb_others()


@in_turn
@surroundings.in_outside
def make_way() -> None:
    """Let all waiting calls draw, since a plain call is about to draw after them. If the number of
    their draws is not known before they run, the pending program runs."""
    if not _core.is_busy() and any(is_uncounted(i, out) for i, out, _ in _core.waiting_draws()):
        _core.flush()
    move_on()


@in_turn
@surroundings.in_outside
def move_on() -> None:
    """Advance the generators past the draws of all waiting calls, and keep the states between."""
    waiting = _core.waiting_draws()
    if waiting:
        check_undisturbed()
        starts: dict[int, torch.Tensor] = _core.notes().setdefault("starts", {})
        with surroundings.making_calls():
            for i, first_out, n_outs in waiting:
                generator = generator_of(_core.value(first_out)[10])
                state = generator_state.get(generator)
                try:
                    advance(i, first_out, n_outs, generator)
                except BaseException:
                    generator_state.set_to(generator, state)
                    raise
                starts[i] = state
                _core.note_drawn(i)
    note_drawn()


def let_go() -> bool:
    """Let all waiting calls draw if the result of one is dead: it would keep its inputs alive until
    something makes it draw. Return whether there was one."""
    is_dead = _core.has_draw(False) and _core.has_draw(True)
    if is_dead:
        move_on()
    return is_dead


def advance(i: int, first_out: int, n_outs: int, generator: torch.Generator) -> None:
    """Advance a generator past the draws of one call on the whole batch."""
    noises = noises_of(i, first_out)
    if noises is not None:
        for one in noises:
            noise_drawn.advance(one, one.n_elements, generator)
        return
    tensors = {
        value: one_call.stand_in(value, None, -1) for value in _core.node(i)[5] if value >= 0
    }
    one_call.run(i, -1, tensors, first_out + n_outs, True)


def set_to(generator: torch.Generator, cell: torch.Tensor | int) -> None:
    """Set a generator to a state, or seed it with a number."""
    if isinstance(cell, int):
        _manual_seed(generator, cell)
    else:
        generator_state.set_to(generator, cell)
