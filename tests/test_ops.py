# SPDX-License-Identifier: Apache-2.0
"""The op table: every row has samples, and says of each what torch does, whole and in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import opcalls
from all_samples import SAMPLES, samples_of
from koila import _core
from koila.reductions import norms

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

TABLE = {row["name"]: row for row in _core.op_table()}
CALLABLES: dict[str, Any] = {}
for found, row in opcalls.rows_by_callable().items():
    CALLABLES.setdefault(row, found)
CALLABLES["batch_norm"] = norms.batch_norm  # torch's own, or with the statistics of the batch


def test_every_row_has_samples() -> None:
    assert sorted(set(TABLE) - set(SAMPLES)) == []


def test_samples_belong_to_rows() -> None:
    assert sorted(set(SAMPLES) - set(TABLE)) == []


def test_names_are_torchs() -> None:
    """A row that names nothing is never used."""
    names = {name for row in TABLE.values() for name in (row["name"], *row["aliases"])}
    assert len(names) == sum(1 + len(row["aliases"]) for row in TABLE.values())
    unknown = [
        name
        for name in sorted(names)
        if not any(hasattr(s, name.removeprefix("Tensor_")) for s in opcalls.NAMESPACES)
    ]
    assert unknown == []


@pytest.mark.sanitize
@pytest.mark.parametrize("row", sorted(set(SAMPLES) & set(TABLE)))
def test_row(row: str) -> None:
    checker = opcalls.Checker()
    for args, kwargs in samples_of(row):
        checker.check(row, CALLABLES[row], args, kwargs)
    assert checker.counts[row, "OK"], "no sample is described by the row"
    assert not checker.counts[row, "DECLINED"], "a sample is declined"
    # A row that never runs by chunks is a barrier in every program: say so here, on purpose.
    assert (row in ALWAYS_ONCE) != any(checker.counts[row, mode] for mode in ("ROWS", "REDUCE"))


#: Alone: the last two go by rows where these are in an order, see test_orders.py.
ALWAYS_ONCE = {"ctc_loss", "embedding_renorm_", "_grouped_mm", "histc"}


@pytest.mark.parametrize(
    "row", sorted(name for name, row in TABLE.items() if row["kind"] == "INPLACE")
)
def test_in_place_rows_write_their_first_input(row: str) -> None:
    for args, kwargs in samples_of(row):
        said = _core.infer(row, args, kwargs)
        assert said["alias"] == ("SAME", 0)
        # dropout that drops nothing hands its input back
        assert said["effects"] == 1 or ("dropout" in row and not said["random"])


@pytest.mark.parametrize("row", sorted(set(SAMPLES) & set(TABLE)))
def test_without_grad_mode_nothing_new_requires_grad(row: str) -> None:
    for args, kwargs in samples_of(row):
        with torch.no_grad():
            said = _core.infer(row, args, kwargs)
            outs = opcalls.tensors(CALLABLES[row](*args, **kwargs)) or [args[0]]
        assert [out[3] for out in said["outs"]] == [t.requires_grad for t in outs]
        assert said["saves"]["inputs"] == said["saves"]["bytes_extra"] == 0


@pytest.mark.parametrize("row", sorted(set(SAMPLES) & set(TABLE)))
def test_no_value_decides_how_much_is_drawn(row: str) -> None:
    """Where each chunk's draws begin is found on stand-ins, before there are values."""

    def end_of(args: Any, kwargs: Any) -> torch.Tensor:
        torch.manual_seed(0)
        with torch.no_grad():
            CALLABLES[row](*args, **kwargs)
        return torch.get_rng_state()

    for args, kwargs in samples_of(row):
        if _core.infer(row, args, kwargs)["random"]:
            ones = opcalls.changed((args, kwargs), torch.ones_like)
            assert torch.equal(end_of(args, kwargs), end_of(*ones)), opcalls.describe(
                row, args, kwargs
            )
        else:
            before = end_of(args, kwargs)
            torch.manual_seed(0)
            assert torch.equal(before, torch.get_rng_state()), f"{row} draws"
