# SPDX-License-Identifier: Apache-2.0
"""The map of the house in CONTRIBUTING.md: one line a file, taken from the file's own first lines.

python tests/house_map.py    writes it anew
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: The folders of the package, each after those that it imports; what people call is in the first.
PYTHON = (
    "python/koila",
    *(
        f"python/koila/{folder}"
        for folder in (
            "basics",
            "messages",
            "staged",
            "random",
            "reductions",
            "memory",
            "reporting",
            "planning",
            "running",
            "recording",
            "patches",
            "integrations",
        )
    ),
)
BEGIN, END = "<!-- the map: python tests/house_map.py -->\n", "<!-- end of the map -->"
FOLDERS = ("koila_c/core", "koila_c/binding", *PYTHON)


def first_sentence(path: Path) -> str:
    """What a file says first of itself, up to the end of a sentence."""
    text = path.read_text()
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        text = re.sub(r"^(/\* (SPDX-|clang-format off).*\n)+", "", text).lstrip()
        said = text[2 : text.find("*/")].replace("\n *", " ") if text.startswith("/*") else ""
        said = re.sub(rf"^\s*{re.escape(path.name)}\s*-\s*", "", said)
    said = " ".join(said.partition("\n\n")[0].split())
    return re.split(r"(?<=[.;:])\s", said)[0].rstrip(".;:")


def lines() -> list[str]:
    """The map, in Markdown."""
    found = []
    for folder in FOLDERS:
        found += [f"**{folder}**", ""]
        for path in sorted((ROOT / folder).iterdir()):
            if path.suffix in (".c", ".h", ".def", ".py"):
                found.append(f"- `{path.name}`: {first_sentence(path)}")
        found.append("")
    return found


def text() -> str:
    """CONTRIBUTING.md as it should be."""
    known = (ROOT / "CONTRIBUTING.md").read_text()
    before, _, rest = known.partition(BEGIN)
    after = rest.partition(END)[2]
    return before + BEGIN + "\n" + "\n".join(lines()) + END + after


if __name__ == "__main__":
    (ROOT / "CONTRIBUTING.md").write_text(text())
