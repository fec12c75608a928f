# SPDX-License-Identifier: Apache-2.0
"""The rules of the house for Python: which module may import which."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import house_map

PACKAGE = Path(__file__).parent.parent / "python/koila"
MODULES = {
    ".".join(("koila", *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}
#: It gives each public name when that is asked for, from the module that defines it.
ENTRANCE = PACKAGE / "__init__.py"
#: Of the folders, each may import from those before it. What people call stands above them.
FOLDERS = [Path(folder).name for folder in house_map.PYTHON[1:-1]]


def rank(module: str) -> int:
    """How high a module stands."""
    folder = module.split(".")[1]
    return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)


def imported(path: Path) -> Iterator[str]:
    """The modules of koila that a file imports: at its top, in a function, or for types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names & MODULES.keys()
            if node.module in MODULES:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)


def test_no_module_imports_what_imports_it() -> None:
    graph = {name: set(imported(path)) - {name} for name, path in MODULES.items()}
    assert sum(map(len, graph.values())) > 300, "imports were not found"
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_from_its_folder_and_those_before_it(name: str) -> None:
    above = [other for other in imported(MODULES[name]) if rank(other) > rank(name)]
    assert above == []


@pytest.mark.parametrize("path", MODULES.values(), ids=MODULES.keys())
def test_no_module_asks_the_package_for_a_public_name(path: Path) -> None:
    """That would be a circle by way of the package, which imports all of them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import) and path.parent.name != "integrations":
            assert "koila" not in {alias.name for alias in node.names}


#: A module is one idea, which seldom needs more lines.
N_LINES = 500


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_short(name: str) -> None:
    lines = MODULES[name].read_text().splitlines()
    n_lines = sum(not line.startswith("# SPDX") for line in lines)
    assert n_lines <= N_LINES


N_ARGUMENTS = 6


def test_functions_of_the_core_take_few_arguments() -> None:
    """More of them are a tuple with names: a Job, an Entry."""
    found = [
        node
        for node in ast.walk(ast.parse((PACKAGE / "_core.pyi").read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert len(found) > 100
    for function in found:
        assert len(function.args.posonlyargs + function.args.args) <= N_ARGUMENTS, function.name
