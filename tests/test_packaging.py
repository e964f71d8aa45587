"""The wheel and the sdist: what they contain, and that the wheel runs without the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from prepcli.core import VERSION
from tests.helpers.archives import extract_all

pytest.importorskip("setuptools", "77")

ROOT = Path(__file__).parents[1]
DIST_INFO = f"prepcli-{VERSION}.dist-info"
DEVELOPMENT = ("tests", "bench", "tools")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def checkout_files(root: Path = ROOT) -> list[str]:
    """Return the files of a checkout that git does not ignore, without virtual environments of any name."""
    if not (root / ".git").exists():
        pytest.skip("needs a git checkout")
    environments = {path.parent.relative_to(root).parts for path in root.glob("*/pyvenv.cfg")}
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    return [
        name
        for name in names
        if name and (root / name).is_file() and Path(name).parts[:1] not in environments
    ]


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a "wheel" or an "sdist" of a source folder with the project's build backend, and return its path."""
    out.mkdir()
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in checkout_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an unpacked sdist."""
    out = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", source, out / "dist")) as archive:
        extract_all(archive, out)
    return out / f"prepcli-{VERSION}"


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel that is built from the sdist alone, in a copy, because a build leaves files behind."""
    out = tmp_path_factory.mktemp("wheel")
    return build("wheel", shutil.copytree(sdist, out / "source"), out / "dist")


def names_in(wheel: Path) -> set[str]:
    """Return the names of the files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_checkout_files_leave_virtual_environments_out(tmp_path: Path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    for name in ("tests/test_a.py", "my-environment/pyvenv.cfg", "my-environment/lib/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert checkout_files(tmp_path) == ["tests/test_a.py"]


def test_wheel_has_the_packages_recipes_and_docs(wheel: Path):
    files = checkout_files()
    modules = {name for name in files if name.startswith(("prepcli/", "trainer/"))}
    recipes = {f"prepcli/_{name}" for name in files if name.startswith("recipes/")}
    docs = {f"prepcli/_{name}" for name in files if name.startswith("docs/")}
    expected = {"prepcli/commands/testing/checks.py", "prepcli/__init__.pyi", "prepcli/py.typed"}
    assert {*expected, "trainer/py.typed"} <= modules
    assert recipes
    assert "prepcli/_docs/how-to/add-a-family.md" in docs
    assert {
        name for name in names_in(wheel) if not name.startswith(DIST_INFO)
    } == modules | recipes | docs


def test_wheel_has_no_file_for_development(wheel: Path):
    assert {name.partition("/")[0] for name in names_in(wheel)} == {"prepcli", "trainer", DIST_INFO}


def test_wheel_has_its_metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            name: archive.read(f"{DIST_INFO}/{name}").decode()
            for name in ("METADATA", "entry_points.txt")
        }
    assert f"\nVersion: {VERSION}\n" in texts["METADATA"]
    assert "\nLicense-Expression: Apache-2.0\n" in texts["METADATA"]
    assert "prep = prepcli.__main__:main" in texts["entry_points.txt"]
    assert f"{DIST_INFO}/licenses/LICENSE" in names_in(wheel)


def test_readme_of_an_index_has_no_relative_links(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{DIST_INFO}/METADATA").decode()
    assert "\nDescription-Content-Type: text/markdown\n" in metadata
    assert "\n- **Plan** memory, time and communication" in metadata
    assert "\n$ prep pad-vocab tiny --multiple 8\n" in metadata
    links = re.findall(r"\]\(([^)]*)\)", metadata)
    assert [link for link in links if not link.startswith("https://")] == []


def test_sdist_has_the_checkout(sdist: Path):
    """Tests and benchmarks run from an sdist too."""
    expected = {name for name in checkout_files() if not name.startswith(".")}
    names = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    assert expected - names == set()
    assert {name.partition("/")[0] for name in names if "/" in name} == {
        *DEVELOPMENT, "docs", "recipes", "prepcli", "trainer", "prepcli.egg-info",
    }  # fmt: skip


def test_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    script = (
        "import sys; from pathlib import Path; from prepcli.commands.cli.main import main; import prepcli;"
        "assert Path(prepcli.__file__).parents[1] == Path(sys.argv[1]), prepcli.__file__;"
        "sys.exit(main(['--version']) or main(['recipes']))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "site")]
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == f"prep {VERSION}"
    recipes = sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))
    assert [line.split()[0] for line in lines[1:]] == recipes


def test_changelog_has_the_version():
    titles = [
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")
    ]
    assert titles[0] == "## [Unreleased]"
    assert titles[1].startswith(f"## [{VERSION}] - ")
