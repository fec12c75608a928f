# SPDX-License-Identifier: Apache-2.0
"""Magics for notebooks: %load_ext koila, then %%koila in a cell, or %koila for all later cells."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Iterator
from typing import Any, NoReturn

from koila import launch
from koila.summary import Summary

_on: contextlib.ExitStack | None = None  # open while %koila is on


class _Parser(argparse.ArgumentParser):
    """A parser that raises where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}")


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    """Let IPython print what is wrong with a magic's options as one line, without a traceback."""
    try:
        yield
    except (TypeError, ValueError) as error:
        from IPython.core.error import UsageError

        raise UsageError(str(error).removeprefix("config: ")) from None


@_usage_errors()
def _parse(name: str, line: str) -> argparse.Namespace:
    parser = _Parser(prog=name, add_help=False)
    launch.add_options(parser)
    if name == "%koila":
        parser.add_argument("state", nargs="?", choices=("on", "off"), default="on")
    return parser.parse_args(shlex.split(line))


_configure = _usage_errors()(launch.configure)


def _tell(lines: list[str]) -> None:
    print(*(f"koila: {line}" for line in lines), sep="\n")


def _run(shell: Any, cell: str) -> bool:
    """Run the lines below the first line of a cell, and return whether they raised no error.

    In messages the cell has the number that the user sees (IPython has counted it already), and
    line numbers count from its first line.
    """
    if not cell.lstrip().startswith("%%"):
        cell = f"# %%koila\n{cell}"
    compiler = shell.compile
    cache = compiler.cache

    def named(code: str, number: int = 0, raw_code: str | None = None) -> str:
        name: str = cache(code, shell.displayhook.prompt_count, raw_code)
        return name

    compiler.cache = named
    try:
        return bool(shell.run_cell(cell).success)
    finally:
        del compiler.cache


def _koila_cell(shell: Any, line: str, cell: str) -> None:
    """%%koila [--memory-limit SIZE | --chunks N] [--report FILE]: run the cell with lazy loaders.

    The batches of every DataLoader are lazy. A summary is printed below the cell.
    """
    args = _parse("%%koila", line)
    with launch.settings_kept():
        _configure(args)
        with launch.lazy_loaders() as summary:
            summary.has_error = not _run(shell, cell)
        _tell(summary.lines())
    if args.report is not None:
        launch.write(summary, args.report)


def _koila_line(line: str) -> None:
    """%koila [on | off] [--memory-limit SIZE | --chunks N]: lazy loaders in all later cells."""
    global _on
    args = _parse("%koila", line)
    if _on is not None:
        stack, _on = _on, None
        stack.close()
    if args.state == "off":
        return
    with contextlib.ExitStack() as stack:
        if args.chunks is not None or args.memory_limit is not None or args.progress:
            stack.enter_context(launch.settings_kept())
        _configure(args)
        found: list[Summary] = []
        stack.callback(lambda: _tell(found[0].lines()))  # runs after the loaders' block has ended
        found.append(stack.enter_context(launch.lazy_loaders()))
        _on = stack.pop_all()


def load_ipython_extension(shell: Any) -> None:
    """%load_ext koila: define `%%koila` and `%koila`."""
    shell.register_magic_function(
        lambda line, cell: _koila_cell(shell, line, cell), "cell", "koila"
    )
    shell.register_magic_function(_koila_line, "line", "koila")


def unload_ipython_extension(shell: Any) -> None:
    """%unload_ext koila: switch `%koila` off and remove both magics."""
    _koila_line("off")
    for kind in ("cell", "line"):
        shell.magics_manager.magics[kind].pop("koila", None)
