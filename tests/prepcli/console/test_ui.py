"""What is printed where: results, notes, errors, JSON."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from unicodedata import category

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.console.progress import LineProgress, NullProgress
from prepcli.console.ui import (
    NORMAL,
    QUIET,
    SLABS,
    Report,
    Ui,
    as_prep_error,
    format_table,
    open_ui,
    printable,
    version,
)
from prepcli.errors import FAILED, OK, USAGE, PrepError, usage_error

ERROR = PrepError("x.safetensors is cut short", "its header promises 9 bytes, the file has 8", "`hf download x`")


class Streams:
    """A Ui that can be read."""

    def __init__(self, as_json: bool = False, level: int = NORMAL, out: io.StringIO | None = None) -> None:
        self.out, self.err = out or io.StringIO(), io.StringIO()
        self.ui = Ui("save-init", as_json, level, "auto", self.out, self.err, clock=lambda: 71.25, started_s=0.05)

    @property
    def texts(self) -> tuple[str, str]:
        return self.out.getvalue(), self.err.getvalue()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "PREP_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_the_result_goes_to_stdout_and_all_else_to_stderr() -> None:
    streams = Streams()
    streams.ui.note("huggyllama/llama-13b  llama")
    streams.ui.warn("the disk is slow")
    code = streams.ui.finish(Report("llama-13b-init", {"leaves": 12}, "prep reshard --mesh 1,64,4"))
    assert code == OK
    assert streams.texts == (
        "llama-13b-init\n",
        "huggyllama/llama-13b  llama\nwarning: the disk is slow\nnext: prep reshard --mesh 1,64,4\n",
    )


def test_json_is_one_object_with_the_common_fields() -> None:
    streams = Streams(as_json=True)
    streams.ui.warn("the disk is slow")
    code = streams.ui.finish(Report("llama-13b-init", {"leaves": 12}, "prep reshard --mesh 1,64,4"))
    assert code == OK
    assert streams.out.getvalue().count("\n") == 1
    assert json.loads(streams.out.getvalue()) == {
        "prep": version(),
        "command": "save-init",
        "ok": True,
        "seconds": 71.2,
        "leaves": 12,
        "warnings": ["the disk is slow"],
        "next": "prep reshard --mesh 1,64,4",
    }


def test_json_has_one_object_on_failure_too() -> None:
    streams = Streams(as_json=True)
    assert streams.ui.fail(ERROR) == FAILED
    document = json.loads(streams.out.getvalue())
    assert document["ok"] is False
    assert document["error"] == {"what": ERROR.what, "why": ERROR.why, "hint": ERROR.hint, "code": 1}
    assert streams.err.getvalue().startswith("error: x.safetensors is cut short\n")


def test_json_refuses_what_is_no_json() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        Streams(as_json=True).ui.finish(Report(fields={"loss": float("nan")}))


def test_an_error_says_what_why_and_hint() -> None:
    streams = Streams()
    assert streams.ui.fail(ERROR) == FAILED
    assert streams.texts == (
        "",
        "error: x.safetensors is cut short\n"
        "  why: its header promises 9 bytes, the file has 8\n"
        " hint: `hf download x`\n",
    )


def test_lines_of_a_reason_stand_below_one_another() -> None:
    streams = Streams()
    streams.ui.fail(usage_error("2 errors", "one\ntwo"))
    assert streams.err.getvalue() == "error: 2 errors\n  why: one\n       two\n"


def test_an_error_without_why_or_hint_has_no_empty_lines() -> None:
    streams = Streams()
    assert streams.ui.fail(usage_error("no command called `x`")) == USAGE
    assert streams.err.getvalue() == "error: no command called `x`\n"


def test_a_report_may_carry_a_result_and_an_error() -> None:
    streams = Streams()
    error = PrepError("a is not the same as b (1 of 363 tensors)")
    assert streams.ui.finish(Report("differs  up_proj.weight", {"differences": [1]}, error=error)) == FAILED
    assert streams.texts == ("differs  up_proj.weight\n", "error: a is not the same as b (1 of 363 tensors)\n")
    streams = Streams(as_json=True)
    streams.ui.finish(Report("differs", {"differences": [1]}, error=error))
    document = json.loads(streams.out.getvalue())
    assert (document["differences"], document["ok"]) == ([1], False)


def test_quiet_keeps_the_result_and_errors_only() -> None:
    streams = Streams(level=QUIET)
    streams.ui.note("a note")
    streams.ui.warn("a warning")
    streams.ui.finish(Report("the result", next_command="prep x"))
    streams.ui.fail(ERROR)
    assert streams.out.getvalue() == "the result\n"
    assert streams.err.getvalue().splitlines()[0].startswith("error:")
    assert streams.ui.warnings == ["a warning"]


@pytest.mark.parametrize(("level", "shown"), [(0, ""), (1, "leaf\n"), (2, "leaf\nslab\n")])
def test_verbosity(level: int, shown: str) -> None:
    streams = Streams(level=level)
    streams.ui.note("leaf", 1)
    streams.ui.note("slab", 2)
    assert streams.err.getvalue() == shown


def test_the_shared_options_make_a_ui() -> None:
    assert open_ui("x", False, quiet=True, verbose=2).level == QUIET
    assert open_ui("x", False, quiet=False, verbose=5).level == SLABS
    assert open_ui("x", True, quiet=False, verbose=0, progress="json").progress_mode == "json"


def test_quiet_means_no_progress_unless_asked_for() -> None:
    assert isinstance(Streams().ui.progress(), LineProgress)
    assert isinstance(Streams(level=QUIET).ui.progress(), NullProgress)
    asked = Ui("x", level=QUIET, progress_mode="lines", err=io.StringIO())
    assert isinstance(asked.progress(), LineProgress)


def test_a_bug_is_called_one_and_its_traceback_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    streams = Streams()
    try:
        raise ValueError("chunk 3 is nowhere")
    except ValueError as error:
        code = streams.ui.fail(error)
    (saved,) = tmp_path.iterdir()
    assert code == FAILED
    assert streams.err.getvalue() == (
        f"error: this is a bug in prep\n  why: ValueError: chunk 3 is nowhere\n hint: please report it with {saved}\n"
    )
    assert "test_ui.py" in saved.read_text()


def test_a_full_disk_is_no_bug_in_prep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    error = as_prep_error(OSError(errno.ENOSPC, "No space left on device", "/data/x"))
    assert (error.what, error.why) == ("cannot use /data/x", "No space left on device")
    assert not list(tmp_path.iterdir())


def test_the_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREP_TRACEBACK", "1")
    streams = Streams()
    try:
        raise ERROR
    except PrepError as error:
        streams.ui.fail(error)
    assert streams.err.getvalue().startswith("Traceback (most recent call last):")
    assert "error: x.safetensors is cut short" in streams.err.getvalue()


def coloured(**variables: str) -> bool:
    stream = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        Ui("x", err=stream).finish(Report(error=ERROR))
    assert "error:" in stream.getvalue()
    return "\x1b[" in stream.getvalue()


def test_colour_is_for_terminals_that_know_it_and_for_users_who_want_it() -> None:
    assert coloured()
    assert coloured(NO_COLOR="")
    assert not coloured(NO_COLOR="1")
    assert not coloured(NO_COLOR="1", FORCE_COLOR="1")
    assert not coloured(TERM="dumb")
    streams = Streams()
    streams.ui.fail(ERROR)
    assert "\x1b[" not in streams.err.getvalue()


def test_strangers_names_do_not_steer_the_terminal() -> None:
    streams = Streams()
    streams.ui.note("tensor \x1b[2J\x07\r")
    streams.ui.finish(Report("a\x1b]0;b", error=PrepError("bad \udc80 name")))
    assert "\x1b" not in "".join(streams.texts)
    assert "tensor \\x1b[2J\\x07\\r" in streams.err.getvalue()
    assert "bad \\udc80 name" in streams.err.getvalue()


@given(st.text())
def test_what_is_printed_can_be_encoded_and_stays_where_it_is(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert all(c.isprintable() or c in "\n\t\u200c\u200d" or category(c) == "Zs" for c in shown)
    assert printable(shown) == shown


def test_text_of_any_script_stays_what_it_is() -> None:
    text = "\u3053\u3093\u3000\u4e16 \U0001f469\u200d\U0001f469 10\u00a0km"
    assert printable(text) == text
    assert printable("\u202eabc\u2028") == "\\u202eabc\\u2028"


def test_a_table_aligns_words_left_and_numbers_right() -> None:
    rows = [["wte", 50257, "4.90 GiB"], ["h.0.ln_1.weight", 8, "8.0 KiB"]]
    assert format_table(rows, ["name", "rows", "size"], right_aligned=["size"]).splitlines() == [
        "name               rows      size",
        "wte              50,257  4.90 GiB",
        "h.0.ln_1.weight       8   8.0 KiB",
    ]


def test_an_empty_table_is_its_head() -> None:
    assert format_table([], ["name", "rows"]) == "name  rows"


ROWS = [["transformer.h.0.attn.attention.q_proj.weight", "[2048, 2048]", 7], ["lm_head.weight", "[50257, 2048]", 12]]


@pytest.mark.parametrize("width", [40, 60, 64])
def test_tables_fit_the_width_of_a_terminal(width: int) -> None:
    lines = format_table(ROWS, ("name", "shape", "bytes"), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split()[-1] for line in lines] == ["bytes", "7", "12"]
    assert "…" in lines[1]


def test_tables_of_a_pipe_are_never_shortened() -> None:
    assert Ui("inspect", out=io.StringIO()).columns is None
    assert ROWS[0][0] in format_table(ROWS, ("name", "shape", "bytes"))


def test_the_width_of_a_terminal_is_that_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "57")
    assert Ui("inspect", out=out).columns == 57
