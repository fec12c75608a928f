# SPDX-License-Identifier: Apache-2.0
"""What infer() answers: each key says what inference found, in Python's words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from all_samples import SAMPLES, samples_of
from koila import _core
from koila.reductions.partials import REDUCTIONS
from koila.staged.facts import REDUCTION_NAMES
from samples_kit import f, i

ROWS0 = (0, 0, 1, 1)
TABLE = Path(__file__).parents[2] / "koila_c" / "core" / "reductions.def"


def said(row: str, *args: Any, places: Any = None, **kwargs: Any) -> Any:
    answer: Any = _core.infer(row, args, kwargs, places)
    assert answer["status"] == "OK", answer
    return answer


def test_keys() -> None:
    wanted = "status mode reason reduce random effects alias saves inputs in_places outs rewrites"
    assert set(said("relu", f(4, 3))) == set(wanted.split())


def test_outs() -> None:
    """dtype, shape, strides, requires_grad and place of each."""
    (out,) = said("t", f(4, 3), places=[ROWS0])["outs"]
    assert out == ("float64", (3, 4), (1, 3), True, (0, 1, 1, 1))
    assert all(isinstance(size, int) for size in out[1])
    values, indices = said("max", f(4, 3), 1)["outs"]
    assert values == ("float64", (4,), (1,), True, None)
    assert indices == ("int64", (4,), (1,), False, None)


def test_places_are_of_each_input() -> None:
    answer = said("add", f(4, 3), f(3), places=[ROWS0, None])
    assert answer["in_places"] == [ROWS0, None]
    answer = said("add", f(4, 3), f(4, 3), places=[ROWS0, None])
    assert answer["in_places"] == [ROWS0, ROWS0]
    answer = said("flatten", f(6, 4, 2), 0, 1, places=[(2, 0, 3, 2)])
    assert answer["outs"][0][4] == (2, 0, 3, 8)


@pytest.mark.parametrize(
    ("row", "args", "mode", "reason", "reduce"),
    [
        ("relu", (f(4, 3),), "ROWS", None, None),
        ("sum", (f(4, 3),), "REDUCE", None, "SUM"),
        ("mean", (f(4, 3), 0), "REDUCE", None, "MEAN"),
        ("sort", (f(4, 3), 0), "ONCE", str, None),
    ],
)
def test_modes(row: str, args: Any, mode: str, reason: Any, reduce: str | None) -> None:
    answer = said(row, *args, places=[ROWS0])
    assert (answer["mode"], answer["reduce"]) == (mode, reduce)
    assert answer["reason"] is None if reason is None else isinstance(answer["reason"], reason)


def test_reductions_have_the_names_of_the_program() -> None:
    """Which are in the order of KlReduce; that of the first is None here."""
    names = re.findall(r"^REDUCTION\((\w+)", TABLE.read_text(), re.MULTILINE)
    assert names == REDUCTION_NAMES
    assert REDUCTIONS.keys() <= {name for name, *_ in _core.parts_table()}
    met = set()
    for row in SAMPLES:
        for args, kwargs in samples_of(row):
            if args and isinstance(args[0], torch.Tensor) and args[0].dim() > 0:
                for dim in range(min(args[0].dim(), 2)):
                    place = (0, dim, 1, 1)
                    met.add(_core.infer(row, args, kwargs, [place]).get("reduce"))
    assert met - {None} == set(names) - {"NONE"}


def test_random_and_effects_and_alias() -> None:
    x = f(4, 3)
    assert said("dropout", x, 0.5, True)["random"] is True
    assert said("relu", x)["random"] is False
    assert said("relu_", x)["effects"] == 1
    assert said("relu", x)["effects"] == 0
    assert said("relu", x)["alias"][0] == "NONE"
    assert said("view", x, 12)["alias"] == ("VIEW", 0)
    assert said("contiguous", x)["alias"] == ("SAME", 0)
    assert said("reshape", torch.ones(4, 3).t(), 12)["alias"][0] == "NONE"


def test_saves() -> None:
    x, y = f(4, 3), f(4, 3)
    words = "inputs outputs bytes_extra bytes_fixed bytes_workspace bytes_backward bytes_row "
    words += "bytes_steps"
    nothing = dict.fromkeys(words.split(), 0)
    assert said("add", x, y)["saves"] == nothing | {"is_extra_rows": False}
    assert said("mul", x, y)["saves"]["inputs"] == 0b11
    assert said("mul", x, y.detach())["saves"]["inputs"] == 0b10
    assert said("exp", x)["saves"]["outputs"] == 1
    with torch.no_grad():
        assert said("mul", x, y)["saves"]["inputs"] == 0


@pytest.mark.parametrize(
    ("row", "args", "kwargs", "places"),
    [
        ("add", (f(4, 3),), {"alpha": 2, "other": f(3)}, [(0, None), ("other", None)]),
        ("cat", ([f(4, 3), f(4, 2)],), {"dim": 1}, [(0, 0), (0, 1)]),
        ("cat", (), {"dim": 1, "tensors": (f(4, 3), f(4, 2))}, [("tensors", 0), ("tensors", 1)]),
        ("__getitem__", (f(4, 5), (slice(None), i(2))), {}, [(0, None), (1, 1)]),
    ],
)
def test_inputs_say_where_they_stand(row: str, args: Any, kwargs: Any, places: Any) -> None:
    answer = _core.infer(row, args, kwargs)
    assert [entry[:2] for entry in answer["inputs"]] == places


def test_inputs_that_count_the_rows() -> None:
    rows = torch.arange(4)
    answer = said("__getitem__", f(4, 5), (rows, i(4)), places=[ROWS0, None, ROWS0])
    assert [is_range for *_, is_range in answer["inputs"]] == [False, True, False]


@pytest.mark.parametrize(
    ("row", "args", "kwargs", "rewrites"),
    [
        ("view", (f(4, 6), 4, 2, 3), {}, [(1, None, None, 1)]),
        ("view", (f(4, 6), (24,)), {}, [(1, 0, None, 6)]),
        ("view", (f(4, 6),), {"size": [4, 6]}, [("size", 0, None, 1)]),
        ("__getitem__", (f(4, 6), slice(None, 4)), {}, [(1, None, "stop", 1)]),
        ("__getitem__", (f(4, 6), (slice(None, 4), 2)), {}, [(1, 0, "stop", 1)]),
    ],
)
def test_rewrites_say_where_and_what(row: str, args: Any, kwargs: Any, rewrites: Any) -> None:
    assert _core.infer(row, args, kwargs, [ROWS0])["rewrites"] == rewrites
