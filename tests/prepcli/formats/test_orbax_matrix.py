"""Storage forms of Orbax items: each is read bit for bit, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("orbax.checkpoint")

from tests.helpers.orbax_matrix import EQUAL, FormResult, run_matrix
from tests.helpers.slow_cases import slow_except

REFUSED_FORMS = {
    *("zarr2-files-bz2", "zarr2-files-f-order", "zarr2-files-slash-keys", "zarr2-files-big-endian"),
    *("zarr2-files-blosc-lz4", "zarr2-files-blosc-lz4hc", "zarr2-files-blosc-zstd"),
    *("zarr2-files-blosc-blosclz", "zarr2-files-blosc-zlib", "zarr2-ocdbt-blosc-lz4"),
    *("zarr3-files-blosc", "zarr3-files-sharded-blosc", "zarr3-ocdbt-blosc"),
    *("zarr3-files-transpose", "zarr3-files-big-endian", "two-processes-not-merged"),
}


def check_results(results: list[FormResult]) -> None:
    for result in results:
        expected = "refused" if result.name in REFUSED_FORMS else EQUAL
        assert result.verdict == expected, (result.name, result.commands)
        if "blosc" in result.name:
            assert all("`blosc`" in reason for reason in result.commands.values())


@pytest.mark.parametrize(
    "pattern", slow_except(["two-processes-*", "zarr?-ocdbt-[gb]*"], ["zarr?-ocdbt-[gb]*"])
)
def test_item_of_each_storage_form_is_read_or_refused(tmp_path: Path, pattern: str):
    results = run_matrix(tmp_path, pattern)
    assert len(results) >= 2
    check_results(results)


# The test above shows both results by default.
@pytest.mark.slow
def test_all_forms_are_read_or_refused(tmp_path: Path):
    results = run_matrix(tmp_path, "*")
    assert len(results) > 100
    check_results(results)
