# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/: links lead somewhere, their Python runs, and every refusal is explained."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pages

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
#: Their Python needs the libraries that they are of: tests/zoo/test_guides.py runs it.
GUIDES = DOCS / "guides"
#: Of a run that the user never sees: it is run whole instead.
INTERNAL = {"NotInChunksError"}


def name_of(path: Path) -> str:
    return str(path.relative_to(DOCS))


def test_every_page_is_in_the_navigation_and_exists() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r"[:-] (\S+\.md)$", nav, re.MULTILINE)) == sorted(map(name_of, PAGES))


def test_the_design_is_short_and_names_files_that_are_there() -> None:
    """It is read in one go, so it has 6,000 words at most."""
    text = (DOCS / "design.md").read_text()
    assert len(text.split()) <= 6000
    named = set(re.findall(r"`(?:[a-z]+/)*([a-z_]+\.(?:py|c|h|def|md))`", text))
    files = {
        path.name
        for folder in ("koila_c", "python", "tests", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*.*")
    }
    assert len(named) > 60
    assert named <= files


def anchors(path: Path) -> set[str]:
    """Those of a page's headings, as mkdocs makes them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", slug) for slug in slugs}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_resolve(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (path.parent / name).resolve() if name else path
        assert other.is_file() and other.is_relative_to(DOCS), target
        assert not anchor or anchor in anchors(other), target
    for included in re.findall(r'^--8<-- "([^":]+)', path.read_text(), re.MULTILINE):
        assert (ROOT / included).is_file(), included


def test_their_python_runs() -> None:
    """Each page's in a process of its own."""
    names = [str(path) for path in PAGES if not path.is_relative_to(GUIDES)]
    names = [name for name in names if pages.blocks(Path(name).read_text())]
    assert len(names) >= 4
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tests/pages.py"), *names],
        env={"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    results = dict(json.loads(line) for line in ran.stdout.splitlines())
    assert set(results) == set(names)
    assert {Path(name).name: error for name, error in results.items() if error} == {}


def test_a_page_that_shows_another_output_fails() -> None:
    pages.run("```python\nprint(1, 2)\n```\n\n```text\n1 ...\n```\n", {})
    with pytest.raises(AssertionError, match="prints"):
        pages.run("```python\nprint(1)\n```\n\n```text\n2\n```\n", {})


# Refusals -----------------------------------------------------------------------------------------


def of_python(path: Path) -> list[list[str]]:
    """The texts of the errors of koila's own that a file makes, as the parts between values."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
            continue
        if not re.fullmatch(r"(Koila|Stale|MemoryLimit)Error", node.func.id):
            continue
        found.append(texts_in(node.args[0]))
    return [parts for parts in found if parts]


def texts_in(node: ast.AST) -> list[str]:
    """The texts of an expression, cut where values go."""
    consts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
    return [part for text in consts if isinstance(text, str) for part in re.split(r"%\w", text)]


def warned_by(path: Path) -> list[list[str]]:
    """The texts of warnings that a file makes, by Python's module for them or by a logger."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func)
            if name in ("warnings.warn", "_logger.warning"):
                found.append(texts_in(node.args[0]))
            elif name.endswith("log_once") and len(node.args) > 1:
                found.append(texts_in(node.args[1]))
    return [parts for parts in found if parts]


def of_c(path: Path) -> list[list[str]]:
    pattern = r'(?<!&)kl_py\.(?:koila|stale)_error,\s*((?:"[^"]*"\s*)+)'
    texts = re.findall(pattern, path.read_text())
    return [re.split(r"%[.\d]*\w", "".join(re.findall(r'"([^"]*)"', text))) for text in texts]


def test_every_refusal_and_warning_is_explained() -> None:
    """docs/messages.md has the longest part of the text of each that koila raises or logs."""
    page = " ".join((DOCS / "messages.md").read_text().split())
    files = list((ROOT / "python/koila").rglob("*.py"))
    texts = [text for path in files for text in of_python(path)]
    texts += [text for path in (ROOT / "koila_c/binding").glob("*.c") for text in of_c(path)]
    assert len(texts) > 20
    warned = [text for path in files for text in warned_by(path)]
    assert len(warned) > 5
    texts += warned
    longest = {" ".join(max(parts, key=len).split()) for parts in texts}
    assert {text for text in longest if text not in page} == set()
