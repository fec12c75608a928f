# SPDX-License-Identifier: Apache-2.0
"""Run a training script with lazy batches: python -m koila [options] train.py [arguments].

The batches of every DataLoader that the script makes are lazy; nothing in it has to be changed.
At the end koila says what it did, in ten lines at most.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import runpy
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch

from koila import __version__, launch


def parse(words: list[str]) -> argparse.Namespace:
    """Parse and apply the options before the script, and leave the rest to the script."""
    parser = argparse.ArgumentParser(
        prog="python -m koila",
        description=(__doc__ or "").partition("\n")[2].strip(),
        usage="python -m koila [options] (train.py | -m module) [arguments of the script]",
        allow_abbrev=False,
    )
    launch.add_options(parser)
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m")
    version = f"koila {__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version)
    n_own = _count_own(words)
    _refuse_missing_values(parser, words[:n_own])
    args = parser.parse_args(words[:n_own])
    args.script = words[n_own:]
    if args.module is None and args.script and not Path(args.script[0]).exists():
        parser.error(f"can't open file {args.script[0]!r}: there is no such file")
    if args.module is None and not args.script:
        parser.error("which script? For example: python -m koila --memory-limit 4GiB train.py")
    try:
        launch.configure(args)
    except (TypeError, ValueError) as error:
        parser.error(str(error).removeprefix("config: "))
    return args


#: By option that takes a value: an example of one.
_VALUES = {"--memory-limit": "4GiB", "--chunks": "8", "--report": "report.json", "-m": "train"}


def _refuse_missing_values(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """End with an error if another option, a script or nothing stands where a value should. `words`
    are the launcher's own arguments, without the script's."""
    for word, value in itertools.pairwise([*words, ""]):
        # `-m train.py` is a mistake of another kind: Python says that there is no such module.
        is_script = value.endswith(".py") and word != "-m"
        is_no_value = not value or re.match("-[-a-z]", value) or is_script
        if word in _VALUES and is_no_value:
            found = f"{value!r} stands where it should" if value else "nothing follows it"
            script = "" if word == "-m" else " train.py"
            example = f"python -m koila {word} {_VALUES[word]}{script}"
            parser.error(f"{word} takes a value, and {found}: write for example {example}")


def _count_own(words: list[str]) -> int:
    """Return how many arguments are the launcher's: those up to the script or the module's name."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        if words[at].startswith("-m"):
            return at + (2 if words[at] == "-m" else 1)
        takes_another = (
            words[at].startswith("--")
            and "=" not in words[at]
            and words[at] not in ("--help", "--progress", "--version")
        )
        at += 2 if takes_another else 1
    return min(at, len(words))


def _run_script(path: str) -> None:
    """Run a file as Python would run it."""
    source = Path(path)
    sys.path[0] = str(source.resolve().parent)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    code = compile(source.read_bytes(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _without_launcher(found: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the launcher's frames at its top."""
    own = (__file__, runpy.__file__)
    while found is not None and (
        found.tb_frame.f_code.co_filename in own
        or found.tb_frame.f_code.co_filename.startswith("<frozen runpy")
    ):
        found = found.tb_next
    return found


def main(words: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if words is None else words)
    status: Any = 0
    with launch.lazy_loaders() as summary:
        try:
            if args.module is not None:
                sys.argv = [args.module, *args.script]
                runpy.run_module(args.module, run_name="__main__", alter_sys=True)
            else:
                sys.argv = list(args.script)
                _run_script(args.script[0])
        except SystemExit as end:
            status = end.code
        except BaseException as error:
            error = error.with_traceback(_without_launcher(error.__traceback__))
            if isinstance(error, ImportError) and error.__traceback__ is None:
                sys.exit(f"{sys.executable}: {error}")  # no such module: Python's own message
            traceback.print_exception(error)
            status = 130 if isinstance(error, KeyboardInterrupt) else 1
    summary.has_error = status not in (None, 0)
    if os.environ.get("RANK", "0") == "0":  # under torchrun only the first process prints
        lines = summary.lines()
        print(*(f"koila: {line}" for line in lines), sep="\n", file=sys.stderr)
        if args.report is not None:
            launch.write(summary, args.report)
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    return 0 if status is None else int(status)


if __name__ == "__main__":
    sys.exit(main())
