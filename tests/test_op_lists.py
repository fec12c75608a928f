# SPDX-License-Identifier: Apache-2.0
"""What is known of ops stands in the table: no other list of their names is left without a reason.

A reason is a comment right above it that begins "Ops by name:".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from koila.basics import table

ROOT = Path(__file__).parents[1]
PYTHON = sorted((ROOT / "python" / "koila").rglob("*.py"))
CORE = sorted((ROOT / "koila_c").glob("*/*.[ch]"))
REASON = "Ops by name:"


def is_op(name: str) -> bool:
    """Whether the table has an op, or one that this is in place."""
    return name in table.ROWS or (name.endswith("_") and name[:-1] in table.ROWS)


def names_in(element: ast.expr | None) -> list[str]:
    """Names that an element of a list stands for: words of a text, or a function of torch."""
    if isinstance(element, ast.Constant) and isinstance(element.value, str):
        return element.value.split()
    if isinstance(element, ast.Attribute) and ast.unparse(element.value).startswith("torch"):
        is_dtype = isinstance(getattr(torch, element.attr, None), torch.dtype)
        return [] if is_dtype else [element.attr]
    return []


def collections_in(tree: ast.AST) -> Iterator[tuple[int, list[list[str]]]]:
    """The line of each list, set, dict, comparison and text of words, and its elements' names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            yield node.lineno, list(map(names_in, node.elts))
        elif isinstance(node, ast.Dict):
            yield node.lineno, list(map(names_in, node.keys))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split()
            yield node.lineno, [[word] for word in words if re.fullmatch(r"\w+", word)]
        elif isinstance(node, ast.BoolOp):
            compared = [value for value in node.values if isinstance(value, ast.Compare)]
            yield node.lineno, [names_in(one.comparators[0]) for one in compared]


def is_list_of_ops(elements: list[list[str]]) -> bool:
    """Whether more than half of its elements are ops, and two at least."""
    n_ops = sum(len(names) == 1 and is_op(names[0]) for names in elements)
    return n_ops > 1 and 2 * n_ops > len(elements)


def has_reason(lines: list[str], number: int) -> bool:
    """Whether a comment on the lines right above says why."""
    return REASON in "\n".join(lines[max(0, number - 6) : number])


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: path.name)
def test_no_list_of_ops_in_python(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    found = [
        f"{path.name}:{number}"
        for number, elements in collections_in(ast.parse(text))
        if is_list_of_ops(elements) and not has_reason(lines, number)
    ]
    assert found == []


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_no_list_of_ops_in_c(path: Path) -> None:
    """Nor does C compare the name of a row, or look one up by its id or by its rules."""
    whole = path.read_text()
    with_reason = re.sub(rf"/\* {REASON}.*?;\n", "", whole, flags=re.DOTALL)  # to the list's end
    text = re.sub(r"/\*.*?\*/", "", with_reason, flags=re.DOTALL)
    assert not re.search(r"str\w*\([^;]*row->name", text)
    assert not re.search(r"\bKL_OP_\w", text) or path.name == "ops.c"
    lists = re.findall(r"=\s*\{((?:[^{};]|\{[^{};]*\})*)\}\s*;", text)
    for body in lists:
        names = re.findall(r'"([^"]*)"', body)
        assert not is_list_of_ops([[word] for name in names for word in name.split()]), body
        assert len(re.findall(r"\b(?:place|shape|dtype|saves)_\w+\s*,", body)) < 2, body
    texts = re.findall(r'"((?:[^"\\]|\\.)*)"', text)
    assert not [words for words in texts if is_list_of_ops([[w] for w in words.split()])]


@pytest.mark.parametrize(
    "text",
    [
        'ROWS = frozenset("sort argsort".split())',
        'if name in ("linear", "mm"):\n    pass',
        'if name == "linear" or name == "mm":\n    pass',
        'CALLS = {"cumsum": 1, "cumprod": 2, "other": 3}',
        "CALLS = [torch.relu, torch.sigmoid_]",
    ],
)
def test_lists_are_found(text: str) -> None:
    assert any(is_list_of_ops(elements) for _, elements in collections_in(ast.parse(text)))
