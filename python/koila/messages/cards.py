# SPDX-License-Identifier: Apache-2.0
"""The results of explain() and report() as HTML cards for notebooks, without scripts."""

from __future__ import annotations

import html as escaping
from collections.abc import Iterable, Sequence

from koila.messages.layer_table import HEADS, Layer, cells

_MOST_LAYERS = 20
_MOST_LINES = 60
#: Longer lines are cut: notebooks show them badly, and a card is to stay below 50 KB.
_MOST_CHARACTERS = 400

#: Colors are inherited from the page, which may be light or dark. Repeating the class three times
#: raises the specificity of these rules above that of a notebook's rules for tables.
_STYLE = """
<style>
CARD {font: 13px/1.5 system-ui, sans-serif; color: inherit; max-width: 60em;
  border: 1px solid rgba(127, 127, 127, .4); border-radius: 6px; padding: .6em 1em; margin: .4em 0}
CARD h4 {margin: 0 0 .3em; font-size: 13px; opacity: .7}
CARD p {margin: .15em 0}
CARD p:first-of-type {font-weight: 600}
CARD table {border-collapse: collapse; margin: .5em 0; width: 100%; font-size: inherit}
CARD tr {background: none}
CARD th, CARD td {text-align: left; padding: .1em .8em .1em 0; border: 0;
  background: none; color: inherit; font-size: inherit}
CARD th {font-weight: 600; opacity: .7}
CARD td {white-space: nowrap}
CARD .n {text-align: right}
CARD .bar {width: 30%}
CARD i {display: block; height: .8em; border-radius: 2px; background: #4c8dd6}
CARD i.whole {background: #d9822b}
CARD pre {margin: .3em 0; overflow-x: auto; color: inherit; background: none;
  font: 12px/1.5 ui-monospace, monospace}
CARD summary {cursor: pointer; opacity: .8}
</style>
""".replace("CARD", 3 * ".koila-card")


def _shown(text: str) -> str:
    """Escape a text, and cut it if it is too long."""
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]} ..."
    return escaping.escape(text)


def _table(layers: Sequence[Layer]) -> list[str]:
    """Return the table of layers, with a bar for the bytes of each."""
    rows, left_out = cells(layers, _MOST_LAYERS)
    if not rows:
        return []
    kinds = ("", " class=n", " class=n", " class=n", "", "")
    named = zip((*HEADS, ""), kinds, strict=True)
    heads = "".join(f"<th{kind}>{head}</th>" for head, kind in named)
    made = [f"<table><tr>{heads}</tr>"]
    most = rows[0][0].n_bytes
    for layer, (name, per_sample, whole, share, runs) in rows:
        kind = " class=whole" if layer.is_whole else ""
        made.append(
            f"<tr><td>{_shown(name)}</td><td class=n>{per_sample}</td><td class=n>{whole}</td>"
            f"<td class=n>{share}</td><td>{runs}</td>"
            f"<td class=bar><i{kind} style='width:{100 * layer.n_bytes / most:.0f}%'></i></td>"
            "</tr>"
        )
    made.append("</table>")
    return [*made, f"<p>{left_out}</p>"] if left_out else made


def _listed(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a table; the first row is its head."""
    if len(rows) < 2:
        return []
    heads = "".join(f"<th>{_shown(cell)}</th>" for cell in rows[0])
    cells_of = ("".join(f"<td>{_shown(cell)}</td>" for cell in row) for row in rows[1:])
    return [f"<table><tr>{heads}</tr>", *(f"<tr>{row}</tr>" for row in cells_of), "</table>"]


def html(
    title: str,
    lines: Iterable[str],
    layers: Sequence[Layer] = (),
    calls: Iterable[str] = (),
    *,
    picture: str = "",
    rows: Sequence[tuple[str, ...]] = (),
) -> str:
    """Return a card, as HTML of at most 50 KB: lines with a fact each, tables, and a list of calls
    that unfolds. Its title is the name of the function whose result it is.

    An indented line belongs to the one before it. The first of `calls` is shown in any case. Below
    the facts come `picture`, an SVG, and `rows`, another table whose first row is its head.
    """
    facts = [part for line in lines for part in line.splitlines()]
    made = [_STYLE, f"<div class=koila-card><h4>{escaping.escape(title)}</h4>"]
    for fact in facts[:_MOST_LINES]:
        indent = " style='margin-left:1.5em;opacity:.85'" if fact.startswith(" ") else ""
        made.append(f"<p{indent}>{_shown(fact.strip())}</p>")
    if len(facts) > _MOST_LINES:
        made.append(f"<p>{len(facts) - _MOST_LINES} more lines; print() shows them</p>")
    made += [picture, *_listed(rows), *_table(layers)]
    listed = list(calls)
    if len(listed) > 1:
        text = "\n".join(map(_shown, listed[1 : _MOST_LINES + 1]))
        rest = (
            f"\n... {len(listed) - 1 - _MOST_LINES} more" if len(listed) > _MOST_LINES + 1 else ""
        )
        made.append(
            f"<details><summary>{_shown(listed[0])}</summary><pre>{text}{rest}</pre></details>"
        )
    elif listed:
        made.append(f"<p style='opacity:.7'>{_shown(listed[0])}</p>")
    return "\n".join([*made, "</div>"])
