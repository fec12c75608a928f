# SPDX-License-Identifier: Apache-2.0
"""The rules of the house that no compiler checks: layers, sizes, sorted rows, clean text."""

import re
import subprocess
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import house_map
import koila

ROOT = Path(__file__).parent.parent
KOILA_C = ROOT / "koila_c"
C_FILES = sorted(KOILA_C.glob("*/*.[ch]"))
TABLES = sorted(KOILA_C.glob("*/*.def"))

# A file includes only files of its own layer or of one before it. rules_shape.c is of layer rules.
LAYERS = [
    "base",
    "alloc",
    "resident",
    "reuse",
    "twister",
    "meta",
    "ops",
    "infer",
    "rules",
    "autocast",
    "tape",
    "stage",
    "segment",
    "program",
    "retained",
    "schedule",
    "sweep",
    "measure",
]
# py_args before py_state: binding arguments to a signature knows nothing of lazies and tapes, and
# py_state.h, which knows them all, keeps the signatures of the functions.
LAYERS += ["methods", "py_state", "py_tape", "py_run", "module"]
#: The state of a program: these files of the binding hold one another, and call each other.
STATE = {"py_call", "py_failure", "py_lazy", "py_stale", "py_tape", "py_view"}
SHARED = """py_args py_context py_function py_meta py_resident py_source py_storage
py_table py_twister"""
LAYER_OF = {"py_recycle": "py_tape"}
LAYER_OF |= dict.fromkeys(SHARED.split(), "py_state") | dict.fromkeys(STATE, "py_tape")
# The header a file without one of its own may open with: of its layer, or of its family.
FAMILY_HEADERS = ["base.h", "rules.h", "measure.h", "py_args.h"]
FAMILY_HEADERS += ["py_state.h", "py_tape.h", "py_run.h"]
# What makes the table and what applies it; rules.h is their private affair.
READERS_OF_RULES = {"ops.c", "infer.c", "autocast.c"}

TESTS = ROOT / "tests"
# x.c of the core has tests/core/test_x.c, x.c of the binding tests/binding/test_x.py. The rules
# have these, which go through every row: shapes, dtypes and what is saved (test_ops,
# test_infer_opdb), places (test_infer, test_brute), values and gradients, whole and in chunks
# (test_opdb, test_opdb_chunks).
# Files of the core that are tested with others.
TESTS_OF_ROWS = {
    "measure_gradients": ["core/test_measure.c", "test_read_whole.py", "test_bytes.py"],
    "measure_runs": ["core/test_measure.c", "test_bytes.py", "test_segments.py"],
    "measure_values": ["core/test_measure.c", "test_bytes.py", "test_retained.py"],
    "rules_*": [
        "test_brute.py",
        "test_infer.py",
        "test_infer_opdb.py",
        "test_opdb.py",
        "test_opdb_chunks.py",
        "test_ops.py",
    ],
    "schedule_units": ["core/test_schedule.c"],
    "stage_reads": ["core/test_stage.c"],
    "stage_sink": ["core/test_stage.c"],
    "stage_tail": ["core/test_stage.c"],
    "sweep_copies": ["core/test_sweep.c"],
}
# tests/core/test_no_memory.c is of all that allocates, test_threads.c of all.
TESTS_OF_MANY = {"no_memory", "threads"}

# _Py_NewReference is in the headers for extensions; the others clear an object's dict before 3.13,
# which has a public way.
PRIVATE_OF_PYTHON = {
    "py_lazy.c": {"_Py_NewReference"},
    "py_recycle.c": {"_PyObject_ClearManagedDict", "_PyObject_GetDictPtr", "_Py_NewReference"},
}

# A file is one idea: its length is a hint, so this only catches what has plainly outgrown one.
# The line that names the license is not counted: it is no code.
N_LINES_OF_A_FILE = 1000
N_LINES_OF_A_FUNCTION = 60
N_LINES_OF_KOILA_C = 29_546
N_LINES_OF_KOILA_PYTHON = 29_810
# "file.c:function": "why it may be longer"
LONG_FUNCTIONS: dict[str, str] = {}


def tracked_text() -> list[Path]:
    """Every file git knows or would add; all of them are text."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listing.splitlines() if (path := ROOT / name).is_file()]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer(path: Path) -> int:
    family = "py_run" if path.stem.startswith("py_") else path.stem.split("_")[0]
    own = path.stem if path.stem in LAYERS else family
    return LAYERS.index(LAYER_OF.get(path.stem, own))


def includes(path: Path) -> list[str]:
    """What a C file includes, in order: `"own.h"` with quotes, `<system.h>` with brackets."""
    return re.findall(r'^ *# *include *("[^"]+"|<[^>]+>)', path.read_text(), re.MULTILINE)


def own_includes(path: Path) -> list[Path]:
    """The project's headers among them."""
    by_name = {header.name: header for header in C_FILES}
    names = [name.strip('"') for name in includes(path) if name.endswith('.h"')]
    return [by_name[name] for name in names if name != "Python.h"]


c_files = pytest.mark.parametrize("path", C_FILES, ids=name_of)


@c_files
def test_includes_only_what_stands_before_it(path: Path) -> None:
    for header in own_includes(path):
        if header.name == "rules.h":
            assert path.name in READERS_OF_RULES or layer(path) == LAYERS.index("rules")
        else:
            assert layer(header) <= layer(path), header.name


def test_headers_have_no_cycle() -> None:
    headers = {path: own_includes(path) for path in C_FILES if path.suffix == ".h"}
    TopologicalSorter(headers).prepare()


def bodies_of(path: Path) -> dict[str, str]:
    """The functions that a C file defines, with their bodies; comments and strings left out."""
    text = re.sub(
        r'/\*.*?\*/|"(?:\\.|[^"\\])*"|^ *#[^\n]*', "", path.read_text(), flags=re.S | re.M
    )
    # Heads of functions: see methods.h and rules.h.
    text = re.sub(r"^KL_DEFINE\w*\((\w+).*\)$", r"core_\1()", text, flags=re.M)
    rule = r"^KL_([A-Z]+)\((\w+)\)$"
    text = re.sub(rule, lambda head: f"{head[1].lower()}_{head[2]}()", text, flags=re.M)
    found = re.finditer(r"^(?!\s)[^;{}=]*?\b(\w+)\([^;{}]*\)\s*\{(.*?)^\}", text, re.S | re.M)
    return {match[1]: match[2] for match in found}


def calls_between(folder: str) -> dict[str, set[str]]:
    """For each C file of a folder those whose functions it calls, also by way of functions that
    headers define."""
    paths = [path for path in C_FILES if path.parent.name == folder]
    defined = {path: bodies_of(path) for path in paths}
    bodies = {name: body for found in defined.values() for name, body in found.items()}
    home = {
        name: path
        for path, found in defined.items()
        for name in found
        if name.startswith(("kl_", "core_", "shape_", "dtype_", "place_", "saves_"))
    }

    def called(body: str, seen: set[str]) -> set[str]:
        files = set()
        for name in set(re.findall(r"\b\w+", body)) & home.keys() - seen:
            is_inline = home[name].suffix == ".h"
            files |= called(bodies[name], seen | {name}) if is_inline else {home[name].stem}
        return files

    return {
        path.stem: called("".join(found.values()), set()) - {path.stem}
        for path, found in defined.items()
        if path.suffix == ".c"
    }


@pytest.mark.parametrize(
    ("folder", "room", "n_calls"), [("core", set(), 150), ("binding", STATE, 120)]
)
def test_files_call_in_one_direction(folder: str, room: set[str], n_calls: int) -> None:
    """No file calls one that calls it, also by way of others: what its calls need stands before
    it. The files of a room count as one."""
    calls = calls_between(folder)
    assert sum(map(len, calls.values())) > n_calls, "calls were not found"
    merged: dict[str, set[str]] = {}
    for name, others in calls.items():
        own = "room" if name in room else name
        found = {"room" if other in room else other for other in others}
        merged[own] = merged.get(own, set()) | found - {own}
    TopologicalSorter(merged).prepare()


@c_files
def test_a_file_is_in_the_folder_of_its_layer(path: Path) -> None:
    folder = "core" if layer(path) < LAYERS.index("methods") else "binding"
    assert path.parent.name == folder


@c_files
def test_python_stays_in_the_binding(path: Path) -> None:
    if path.parent.name == "core":
        assert not {"<Python.h>", '"Python.h"', "<structmember.h>"} & set(includes(path))


@c_files
def test_no_private_name_of_python(path: Path) -> None:
    """They go with a version of it; where one is needed, an #if says for which."""
    found = set(re.findall(r"\b_Py\w+", path.read_text()))
    assert found <= PRIVATE_OF_PYTHON.get(path.name, set())


@c_files
def test_own_header_first_then_the_systems(path: Path) -> None:
    if path.suffix == ".h":
        return
    names = [name for name in includes(path) if not name.endswith('.def"')]
    if path.with_suffix(".h").is_file():
        assert names.pop(0) == f'"{path.stem}.h"'
    elif names and names[0].strip('"') in FAMILY_HEADERS:
        names.pop(0)  # error.c, rules_shape.c, rules_index.c, py_lazy.c
    assert names == sorted(names, key=lambda name: name.startswith('"'))


def c_stems(folder: str) -> set[str]:
    return {path.stem for path in C_FILES if path.parent.name == folder and path.suffix == ".c"}


def test_every_file_of_the_core_has_its_test() -> None:
    stems = c_stems("core")
    tested = {path.stem.removeprefix("test_") for path in (TESTS / "core").glob("test_*.c")}
    covered = {stem for stem in stems if any(fnmatch(stem, files) for files in TESTS_OF_ROWS)}
    assert stems - tested - covered == set()
    assert tested - stems == TESTS_OF_MANY


def test_every_file_of_the_binding_has_its_test() -> None:
    tested = {path.stem.removeprefix("test_") for path in (TESTS / "binding").glob("test_*.py")}
    of_tests = {path.stem for path in (TESTS / "binding").glob("*.c")}  # setup.py builds them in
    assert tested == c_stems("binding") | of_tests


def test_no_file_needs_what_only_builds_for_tests_have() -> None:
    """Or a release could not be loaded."""
    of_tests = "".join(path.read_text() for path in sorted((TESTS / "binding").glob("*.c")))
    names = set(re.findall(r"^(k\w+|core_\w+)\(", of_tests, re.MULTILINE))
    assert len(names) > 1
    code = "".join(path.read_text() for path in C_FILES if path.suffix == ".c")
    assert names & set(re.findall(r"\w+", code)) == set()


def test_tests_of_rows_exist() -> None:
    named = {name for names in TESTS_OF_ROWS.values() for name in names}
    assert {name for name in named if not (TESTS / name).is_file()} == set()


LICENSE_LINE = re.compile(r"(#|/\*) SPDX-License-Identifier: Apache-2\.0( \*/)?")


def sources() -> list[Path]:
    return [path for path in tracked_text() if path.suffix in (".c", ".h", ".def", ".py", ".pyi")]


def lines_of(path: Path) -> list[str]:
    """The lines of a source file below that which names the license."""
    return path.read_text().splitlines()[1:]


def test_every_source_file_names_the_license() -> None:
    """In its first line, as LICENSE has it."""
    assert (ROOT / "LICENSE").read_text().split()[:4] == ["Apache", "License", "Version", "2.0,"]
    firsts = {name_of(path): path.read_text().partition("\n")[0] for path in sources()}
    assert len(firsts) > 300
    assert [name for name, first in firsts.items() if not LICENSE_LINE.fullmatch(first)] == []


@c_files
def test_opens_with_a_comment(path: Path) -> None:
    assert lines_of(path)[0].startswith("/* ")


def functions(path: Path) -> list[tuple[str, int]]:
    """Name and lines of each function, from name to last brace, as clang-format lays it out."""
    found = []
    name, first = "", 0
    for number, line in enumerate(path.read_text().splitlines()):
        if match := re.match(r"(KL_[A-Z]+\([\w, ]+\)$|\w+(?=\())", line):
            name, first = match[1], number
        elif line == "}" and name:
            found.append((name, number - first + 1))
            name = ""
    return found


@c_files
def test_no_long_function(path: Path) -> None:
    too_long = [
        (name, n_lines)
        for name, n_lines in functions(path)
        if n_lines > N_LINES_OF_A_FUNCTION and f"{path.name}:{name}" not in LONG_FUNCTIONS
    ]
    assert too_long == []


def test_allowed_long_functions_exist_and_are_long() -> None:
    n_lines = {f"{path.name}:{name}": n for path in C_FILES for name, n in functions(path)}
    assert all(n_lines.get(name, 0) > N_LINES_OF_A_FUNCTION for name in LONG_FUNCTIONS)


def test_no_long_file() -> None:
    n_lines = {name_of(path): len(lines_of(path)) for path in sources()}
    assert {name: n for name, n in n_lines.items() if n > N_LINES_OF_A_FILE} == {}


def test_koila_c_is_small() -> None:
    n_lines = sum(len(lines_of(path)) for path in KOILA_C.glob("*/*.*"))
    assert n_lines <= N_LINES_OF_KOILA_C


def test_koila_python_is_small() -> None:
    n_lines = sum(len(lines_of(path)) for path in (ROOT / "python/koila").glob("**/*.py"))
    assert n_lines <= N_LINES_OF_KOILA_PYTHON


def rows(section: str) -> list[list[str]]:
    """The names of a section's rows, and those of its aliases."""
    found = re.findall(r"^([A-Z]+) *\( *(\w+)", section, re.MULTILINE)
    aliases = [name for kind, name in found if kind == "ALIAS"]
    return [[name for kind, name in found if kind != "ALIAS"], aliases]


@pytest.mark.skipif(not TABLES, reason="there is no ops.def yet")
def test_rows_are_sorted_within_a_section() -> None:
    sections = [part for path in TABLES for part in re.split(r"(?m)^/\*", path.read_text())]
    names = [group for section in sections for group in rows(section)]
    assert any(names), "no row was found"
    assert names == [sorted(group) for group in names]


# Written so that this file does not match itself.
@pytest.mark.parametrize(
    "pattern",
    [
        r"\b(TO[D]O|FIX[M]E|X[X]X)\b",
        r"[ \t]$",
        r"(?<![\w.])/(tmp|home|root|work|opt)\b",
        r"(extra-)?index[-_]url|find[-_]links|trusted[-_]host|file:[/]/",
        r"\bgc\.unfree[z]e\(",  # conftest.py says why
    ],
    ids=["unfinished", "trailing space", "machine path", "package registry", "thaw"],
)
def test_no_file_has(pattern: str) -> None:
    found = [
        f"{name_of(path)}:{number}: {line}"
        for path in tracked_text()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == []


def test_the_map_is_of_this_house() -> None:
    """python tests/house_map.py writes it anew."""
    assert (ROOT / "CONTRIBUTING.md").read_text() == house_map.text()
    assert all(len(line.partition(": ")[2]) > 3 for line in house_map.lines() if "`" in line)


def test_few_names_are_public() -> None:
    assert len(koila.__all__) <= 16
