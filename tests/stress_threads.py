# SPDX-License-Identifier: Apache-2.0
"""Threads that record, read each other's values and run, for as long as they are told to.

python tests/stress_threads.py 60 4     # seconds, threads
"""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import Any

import torch

import koila

ROWS = 12


class Board:
    """The last values that each thread has made, each with the number that eager has for it."""

    def __init__(self) -> None:
        self.notes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.shared = koila.lazy(_plain_shared())
        self.is_over = False
        self.errors: list[BaseException] = []
        self.n_read = 0
        self.n_steps = 0

    def read(self, me: int, choice: random.Random) -> None:
        """Compare a value of another thread with eager's."""
        others = [note for thread, note in list(self.notes.items()) if thread != me]
        if others:
            lazy, expected = choice.choice(others)
            torch.testing.assert_close(torch.tensor(lazy.tolist(), dtype=torch.float64), expected)
            self.n_read += 1


class Worker(threading.Thread):
    """Trains a model of its own, in steps that take another form each time."""

    def __init__(self, board: Board, number: int) -> None:
        super().__init__(daemon=True)
        self.board = board
        self.number = number
        self.choice = random.Random(number)
        seed = torch.Generator().manual_seed(number)
        self.x = torch.randn(ROWS, 5, dtype=torch.float64, generator=seed)
        self.labels = torch.randint(0, 4, (ROWS,), generator=seed)
        self.rows = torch.arange(ROWS)
        self.w = torch.randn(5, 4, dtype=torch.float64, generator=seed).requires_grad_()
        self.optimizer = torch.optim.SGD([self.w], lr=0.01)

    def model(self, x: Any, shared: Any) -> tuple[Any, Any]:
        """A hidden value, and a loss whose tail is not linear."""
        hidden = torch.tanh(x @ self.w) + shared[:, :4]
        picked = hidden[self.rows, self.labels]
        return hidden, (picked.exp().sum() + hidden.pow(2).mean()).log()

    def step(self) -> None:
        expected_hidden, expected = self.model(self.x, _plain_shared())
        (expected_gradient,) = torch.autograd.grad(expected, self.w)
        hidden, loss = self.model(koila.lazy(self.x), self.board.shared)
        kind = self.choice.randrange(6)
        self.board.notes[self.number] = (
            (hidden.sum(0), expected_hidden.detach().sum(0))
            if kind % 2
            else (loss, expected.detach())
        )
        if kind == 0:
            self.board.read(self.number, self.choice)
        elif kind == 1:
            with torch.no_grad():
                torch.testing.assert_close(
                    (hidden * 2).sum().item(), 2 * expected_hidden.sum().item()
                )
        elif kind == 2:
            return  # it is left to those who read it, or to nobody
        torch.testing.assert_close(loss.item(), expected.item())
        (gradient,) = torch.autograd.grad(loss, self.w)
        torch.testing.assert_close(gradient, expected_gradient)
        self.board.read(self.number, self.choice)
        # Before it steps, what is pending is run: so it is where others read it later.
        self.w.grad = gradient
        self.optimizer.step()
        self.board.n_steps += 1

    def run(self) -> None:
        try:
            while not self.board.is_over:
                with koila.config(chunks=self.choice.choice((1, 2, 3, 7, ROWS))):
                    self.step()
        except BaseException as error:
            self.board.errors.append(error)
            self.board.is_over = True


def _plain_shared() -> torch.Tensor:
    return torch.linspace(-1, 1, ROWS * 5, dtype=torch.float64).view(ROWS, 5)


def stress(seconds: float, n_threads: int) -> Board:
    """Let threads work for some seconds; the first error of any of them is raised."""
    board = Board()
    workers = [Worker(board, number) for number in range(n_threads)]
    for worker in workers:
        worker.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end and not board.is_over:
        time.sleep(0.05)
    board.is_over = True
    for worker in workers:
        worker.join(60)
    if board.errors:
        raise board.errors[0]
    assert not any(worker.is_alive() for worker in workers), "the threads wait for each other"
    return board


if __name__ == "__main__":
    done = stress(float(sys.argv[1]), int(sys.argv[2]))
    print(f"{done.n_steps} steps, {done.n_read} values of other threads read")
