"""The folders of the tests mirror the packages: `tests/prepcli/engine` tests `prepcli/engine`."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FOLDERS = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path()}


@pytest.mark.parametrize("folder", sorted(FOLDERS), ids=str)
def test_folder_of_tests_mirrors_a_package(folder: Path):
    assert (TESTS.parent / folder / "__init__.py").is_file()
