"""Errors: their type, references to options and keys, exit codes, and other exceptions as errors for the user."""

from __future__ import annotations

import contextlib
import copy
import errno
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prepcli.core.errors import (
    FAILED,
    PYTHON,
    TERMINAL,
    USAGE,
    Command,
    Key,
    Option,
    PrepError,
    Reference,
    Style,
    UsageError,
    join_texts,
    text,
    usage_error,
)
from prepcli.core.unexpected import BUG, OUT_OF_MEMORY, TEMPORARY_FOLDER_HINT, as_prep_error


def test_prep_error_text_omits_empty_parts():
    error = PrepError("x is cut short", hint="download it again")
    assert str(error) == "x is cut short - download it again"


def test_prep_errors_have_failed_or_usage_exit_code():
    assert PrepError("x").code == FAILED
    assert usage_error("x", "y", "z").code == USAGE


def test_prep_error_survives_pickling():
    hint = text("{} or more", Option("memory", "1GiB"))
    error = usage_error("what", why="why", hint=hint)
    error.add_note("a note")
    loaded = pickle.loads(pickle.dumps(error))
    assert type(loaded) is UsageError
    assert loaded.fields() == error.fields()
    assert str(loaded) == 'what - why - `memory="1GiB"` or more'
    assert loaded.__notes__ == ["a note"]


def test_prep_error_is_hashable():
    assert len({PrepError("x"), PrepError("x")}) == 2


def test_pickled_texts_keep_references_without_a_value():
    message = text("{} or {} is missing", Option("mesh"), Key("mesh"))
    loaded = pickle.loads(pickle.dumps(message))
    assert (loaded, loaded.render(PYTHON)) == (message, "`mesh` or `mesh` is missing")
    assert loaded == "`--mesh` or `mesh` is missing"


@pytest.mark.parametrize("name", ["what", "why", "hint", "code"])
def test_prep_error_is_read_only(name: str):
    error = PrepError("what", "why", "hint")
    with pytest.raises(AttributeError):
        setattr(error, name, "other")


def test_prep_error_passes_a_context_manager():
    """A frozen dataclass cannot: `contextlib` sets `__traceback__` of the exception that leaves the block."""

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        yield

    raised = PrepError("what")
    with pytest.raises(PrepError) as caught, block():
        raise raised
    assert caught.value is raised


def test_with_texts_keeps_class_cause_notes_and_traceback():
    def fail() -> None:
        try:
            raise OSError("disk")
        except OSError as cause:
            raise UsageError("what", "why", "hint", USAGE) from cause

    with pytest.raises(UsageError) as caught:
        fail()
    caught.value.add_note("a note")
    changed = caught.value.with_texts(what="other")
    assert type(changed) is UsageError
    assert (changed.what, changed.why, changed.hint, changed.code) == (
        "other",
        "why",
        "hint",
        USAGE,
    )
    assert isinstance(changed.__cause__, OSError)
    assert changed.__traceback__ is caught.value.__traceback__
    assert changed.__notes__ == ["a note"]
    assert caught.value.what == "what"


@pytest.mark.parametrize(
    ("reference", "terminal", "python"),
    [
        (Option("memory", "1GiB"), "`--memory 1GiB`", '`memory="1GiB"`'),
        (Option("scan_axis", 1), "`--scan-axis 1`", "`scan_axis=1`"),
        (Option("overwrite", True), "`--overwrite`", "`overwrite=True`"),
        (Option("verify", False), "`--no-verify`", "`verify=False`"),
        (Option("out"), "`--out`", "`out`"),
        (Option("rules", "a b"), "`--rule 'a b'`", '`rules="a b"`'),
        (Key("train.steps"), "`train.steps`", "`train.steps`"),
        (Key("data.shuffle", False), "`data.shuffle = false`", "`data.shuffle = false`"),
        (Key("data.type", "text"), '`data.type = "text"`', '`data.type = "text"`'),
        (
            Key("mesh", "1,8,1", is_override=True),
            "`--set mesh=1,8,1`",
            '`overrides="mesh=1,8,1"`',
        ),
        (
            Key("data.add_bos", None, is_override=True),
            "`--set data.add_bos=`",
            '`overrides="data.add_bos="`',
        ),
        (
            Command("export", "./a b", Option("dtype", "float32")),
            "`prep export './a b' --dtype float32`",
            '`prep.export("./a b", dtype="float32")`',
        ),
        (Command("demo"), "`prep demo`", "`prep demo`"),
    ],
)
def test_reference_renders_for_terminal_and_python(
    reference: Reference, terminal: str, python: str
):
    assert reference.render(TERMINAL) == terminal
    assert reference.render(PYTHON) == python


def test_path_is_rendered_as_a_text():
    option = Option("towers", Path("a b/m"))
    assert option.render(PYTHON) == '`towers="a b/m"`'
    assert option.render(TERMINAL) == "`--towers 'a b/m'`"


def test_style_names_the_variable_that_set_an_option():
    style = Style("terminal", variables={"memory": "PREP_MEMORY"})
    message = text("{} is invalid, {} is not", Option("memory", "abc"), Option("out", "x"))
    assert message.render(style) == "`PREP_MEMORY=abc` is invalid, `--out x` is not"


def test_style_replaces_recipe_keys():
    def as_option(key: Key) -> Option | None:
        return Option("fields", key.value) if key.name == "data.fields" else None

    style = Style("terminal", rename_key=as_option)
    message = text("{} or {}", Key("data.fields", "text"), Key("mesh", "1,1,1"))
    assert message.render(style) == '`--fields text` or `mesh = "1,1,1"`'


def test_text_as_str_is_rendered_for_a_terminal():
    message = text("{} of {:,} {}", Option("size", 5), 50257, "{braces}")
    assert message == "`--size 5` of 50,257 {braces}"
    assert copy.copy(message).render(PYTHON) == "`size=5` of 50,257 {braces}"


def test_texts_inside_a_text_keep_their_references():
    inner = text("{}", Option("size", 5))
    assert text("{}, or {}", inner, "x").render(PYTHON) == "`size=5`, or x"
    assert join_texts("; ", [inner, "y"]).render(PYTHON) == "`size=5`; y"


def test_rendered_error_has_the_words_of_the_style():
    error = PrepError("what", hint=text("{}", Option("size", 5)))
    assert error.rendered(PYTHON).hint == "`size=5`"
    assert error.rendered(TERMINAL).hint == "`--size 5`"


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
