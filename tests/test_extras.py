"""The suite runs with the extra `test` alone: tests that need another package are skipped without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.extras import (
    OWN_ROOTS,
    ROOT,
    imports_at_the_top,
    modules_of_test_extra,
    needs_parity,
)


def collected_modules() -> Iterator[Path]:
    """Yield the modules that pytest imports to collect the tests, and the project's modules that these import."""
    pending = {*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "tests").rglob("conftest.py")}
    seen = set[Path]()
    while pending:
        path = pending.pop()
        seen.add(path)
        yield path
        for name in imports_at_the_top(path):
            imported = (ROOT / name.replace(".", "/")).with_suffix(".py")
            if imported.is_file() and imported not in seen:
                pending.add(imported)


def test_collection_imports_no_package_outside_the_extra():
    allowed = modules_of_test_extra()
    for path in collected_modules():
        roots = {name.partition(".")[0] for name in imports_at_the_top(path)}
        assert roots <= allowed, f"{path.relative_to(ROOT)}: use tests.helpers.lazy_modules"


def test_extra_has_the_judges_of_files_and_not_torch():
    modules = modules_of_test_extra()
    assert {"jax", "numpy", "pytest", "safetensors", "orbax", "msgpack"} <= modules
    assert not {"torch", "transformers", "flax", "peft", "sentencepiece"} & modules
    assert {"prepcli", "tests"} <= OWN_ROOTS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('torch = lazy_module("torch")\n', True),
        ('def test_x():\n    pytest.importorskip("flax.nnx")\n', True),
        ('pyarrow = pytest.importorskip("pyarrow.parquet")\n', False),
        ("import numpy\n", False),
    ],
)
def test_modules_that_name_optional_packages_get_the_mark(
    tmp_path: Path, text: str, expected: bool
):
    (tmp_path / "test_module.py").write_text(text)
    assert needs_parity(tmp_path / "test_module.py") == expected
