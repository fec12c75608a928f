# SPDX-License-Identifier: Apache-2.0
"""What users install: the sdist is complete, and its wheel builds without torch or network."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import house_map
import koila

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a copy of the tree: building one leaves files behind."""
    tree = tmp_path_factory.mktemp("sdist") / "tree"
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=unwanted)
    subprocess.run([sys.executable, "setup.py", "--quiet", "sdist"], cwd=tree, check=True)
    (archive,) = (tree / "dist").iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of that sdist, built where importing torch fails."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "torch.py").write_text("raise ImportError('torch is not needed to build')\n")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    command += ["--no-index", "--wheel-dir", folder, sdist]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(folder)}, check=True)
    (archive,) = folder.glob("*.whl")
    return archive


def files(folder: str, *patterns: str) -> set[str]:
    found = (path for pattern in patterns for path in (ROOT / folder).glob(pattern))
    return {str(path.relative_to(ROOT)) for path in found}


def linked() -> set[str]:
    """The files to which README.md links."""
    return set(re.findall(r"\]\(([^):#]+\.\w+)[)#]", (ROOT / "README.md").read_text()))


def test_sdist_has_all_that_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = files("koila_c", "*/*.[ch]", "*/*.def") | files("python/koila", "*.py", "*.pyi")
    needed |= {"LICENSE", "pyproject.toml", "setup.py", "python/koila/py.typed"}
    needed |= {name for name in linked() if "/results/" not in name}
    needed |= {"CONTRIBUTING.md", "mkdocs.yml", "demo/demo.py", "tests/smoke.py"}
    needed |= files("docs", "*.*", "*/*.md") | files("examples", "*.py", "*.ipynb")
    assert needed - names == set()
    assert [name for name in names if name.endswith((".so", ".o", ".pyc"))] == []


def test_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = files("python/koila", "*.py", "*.pyi")
    for folder in house_map.PYTHON[1:]:
        sources |= files(folder, "*.py")
    sources |= {"python/koila/py.typed"}
    (extension,) = (name for name in names if name.endswith(".so"))
    assert extension.startswith("koila/_core.")
    assert names - {extension} == {name.removeprefix("python/") for name in sources}


def test_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    requirements = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert requirements == ["Requires-Dist: torch>=2.10"]
    assert "\nName: koila-c\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    assert "\nDescription-Content-Type: text/markdown\n" in metadata
    assert "\nClassifier: Programming Language :: Python :: 3.11\n" in metadata
    assert (ROOT / "README.md").read_text().strip() in metadata


def test_wheel_has_the_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
        text = archive.read(name).decode()
    assert text == (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0" in text


def test_wheel_works_when_installed(wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", tmp_path, wheel], check=True)
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests/smoke.py")],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert Path(result.stdout.strip()).parent == tmp_path / "koila"


def test_beside_the_older_koila_it_is_not_imported(tmp_path: Path) -> None:
    """Both are imported by one name, and lie in one folder: files of one replace the other's."""
    folder = Path(koila.__file__).parent
    shutil.copytree(folder, tmp_path / "koila", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "koila" / "prepasses.py").touch()
    ran = subprocess.run(
        [sys.executable, "-c", "import koila"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert ran.returncode != 0
    assert "ImportError" in ran.stderr and "pip uninstall koila koila-c" in ran.stderr


def test_the_extension_needs_only_the_systems_libraries() -> None:
    """torch's are found at import: a wheel works with torch for the CPU and with torch for GPUs."""
    (extension,) = (ROOT / "python/koila").glob(f"_core{sysconfig.get_config_var('EXT_SUFFIX')}")
    said = subprocess.run(
        ["readelf", "-d", extension], check=True, capture_output=True, text=True
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\.so", said)
    loader = {"ld-linux-x86-64", "ld-linux-aarch64"}
    assert set(needed) <= {"libm", "libc", "libdl", "libpthread"} | loader
