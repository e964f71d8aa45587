"""Exceptions other than PrepError as errors for the user."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from prepcli.core.unexpected import BUG, OUT_OF_MEMORY, TEMPORARY_FOLDER_HINT, as_prep_error

OUT_OF_ADDRESS_SPACE = "libjax_common.so: failed to map segment from shared object"


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_full_disk_is_not_a_bug(temporary_folder: Path) -> None:
    error = as_prep_error(OSError(errno.ENOSPC, "No space left on device", "/data/x"))
    assert (error.what, error.why, error.hint) == (
        "cannot use /data/x",
        "No space left on device",
        "",
    )
    assert not list(temporary_folder.iterdir())


def test_full_temporary_folder_names_its_variable(temporary_folder: Path) -> None:
    error = as_prep_error(
        OSError(errno.ENOSPC, "No space left on device", str(temporary_folder / "headers"))
    )
    assert error.hint == TEMPORARY_FOLDER_HINT


def test_missing_temporary_folder_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/does/not/exist"])
    with pytest.raises(FileNotFoundError) as caught:
        tempfile.mkdtemp()
    error = as_prep_error(caught.value)
    assert error.what == "no temporary folder can be written"
    assert error.hint == TEMPORARY_FOLDER_HINT


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE, errno.EFBIG])
def test_errors_of_the_system_are_not_bugs(number: int) -> None:
    assert as_prep_error(OSError(number, "text", "/data/x")).what == "cannot use /data/x"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError(OUT_OF_ADDRESS_SPACE),
        OSError(OUT_OF_ADDRESS_SPACE),
        RuntimeError("can't start new thread"),
    ],
)
def test_out_of_memory_is_one_message(error: Exception) -> None:
    assert as_prep_error(error) is OUT_OF_MEMORY


def test_memory_error_behind_another_one_is_recognised() -> None:
    error = ValueError("cannot decode")
    assert as_prep_error(error).what == BUG
    error.__cause__ = MemoryError()
    assert as_prep_error(error) is OUT_OF_MEMORY


@pytest.mark.slow
@pytest.mark.parametrize("limit_kib", [250_000, 350_000])
def test_small_address_space_is_one_message(limit_kib: int, tmp_path: Path) -> None:
    """Libraries of jax do not fit into it."""
    script = f"ulimit -v {limit_kib}; {sys.executable} -m prepcli generate missing --tokens 1"
    process = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert f"error: {OUT_OF_MEMORY.what}" in process.stderr
