"""Console output: results, notes, errors and JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from unicodedata import category

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.commands.console.progress_displays import LineProgress
from prepcli.commands.console.ui import LIBRARIES, NORMAL, QUIET, Report, Ui, open_ui, printable
from prepcli.core import version
from prepcli.core.errors import FAILED, OK, USAGE, PrepError, usage_error
from prepcli.core.observer import NullProgress

ERROR = PrepError(
    "x.safetensors is cut short", "its header promises 9 bytes, the file has 8", "`hf download x`"
)


class Streams:
    """A Ui whose output can be read."""

    def __init__(
        self, as_json: bool = False, level: int = NORMAL, out: io.StringIO | None = None
    ) -> None:
        self.out, self.err = out or io.StringIO(), io.StringIO()
        self.ui = Ui(
            "save-init",
            as_json,
            level,
            "auto",
            self.out,
            self.err,
            clock=lambda: 71.25,
            started_s=0.05,
        )

    @property
    def texts(self) -> tuple[str, str]:
        return self.out.getvalue(), self.err.getvalue()


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "PREP_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_ui_prints_only_the_result_on_stdout() -> None:
    streams = Streams()
    streams.ui.note("huggyllama/llama-13b  llama")
    streams.ui.warn("the disk is slow")
    code = streams.ui.finish(Report("llama-13b-init", {"leaves": 12}, "prep reshard --mesh 1,64,4"))
    assert code == OK
    assert streams.texts == (
        "llama-13b-init\n",
        "huggyllama/llama-13b  llama\nwarning: the disk is slow\nnext: prep reshard --mesh 1,64,4\n",
    )


def test_json_has_the_common_fields() -> None:
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


def test_json_is_one_object_on_failure() -> None:
    streams = Streams(as_json=True)
    assert streams.ui.fail(ERROR) == FAILED
    document = json.loads(streams.out.getvalue())
    assert document["ok"] is False
    assert document["error"] == {
        "what": ERROR.what,
        "why": ERROR.why,
        "hint": ERROR.hint,
        "code": 1,
    }
    assert streams.err.getvalue().startswith("error: x.safetensors is cut short\n")


def test_json_rejects_nan() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        Streams(as_json=True).ui.finish(Report(fields={"loss": float("nan")}))


def test_error_prints_what_why_and_hint() -> None:
    streams = Streams()
    assert streams.ui.fail(ERROR) == FAILED
    assert streams.texts == (
        "",
        "error: x.safetensors is cut short\n"
        "  why: its header promises 9 bytes, the file has 8\n"
        " hint: `hf download x`\n",
    )


def test_error_aligns_the_lines_of_a_reason() -> None:
    streams = Streams()
    streams.ui.fail(usage_error("2 errors", "one\ntwo"))
    assert streams.err.getvalue() == "error: 2 errors\n  why: one\n       two\n"


def test_error_without_why_or_hint_has_no_empty_lines() -> None:
    streams = Streams()
    assert streams.ui.fail(usage_error("no command called `x`")) == USAGE
    assert streams.err.getvalue() == "error: no command called `x`\n"


def test_report_may_have_a_result_and_an_error() -> None:
    streams = Streams()
    error = PrepError("a is not the same as b (1 of 363 tensors)")
    assert (
        streams.ui.finish(Report("differs  up_proj.weight", {"differences": [1]}, error=error))
        == FAILED
    )
    assert streams.texts == (
        "differs  up_proj.weight\n",
        "error: a is not the same as b (1 of 363 tensors)\n",
    )
    streams = Streams(as_json=True)
    streams.ui.finish(Report("differs", {"differences": [1]}, error=error))
    document = json.loads(streams.out.getvalue())
    assert (document["differences"], document["ok"]) == ([1], False)


def test_quiet_prints_only_the_result_and_errors() -> None:
    streams = Streams(level=QUIET)
    streams.ui.note("a note")
    streams.ui.warn("a warning")
    streams.ui.finish(Report("the result", next_command="prep x"))
    streams.ui.fail(ERROR)
    assert streams.out.getvalue() == "the result\n"
    assert streams.err.getvalue().splitlines()[0].startswith("error:")
    assert streams.ui.warnings == ["a warning"]


@pytest.mark.parametrize(("level", "shown"), [(0, ""), (1, "leaf\n"), (2, "leaf\nslab\n")])
def test_note_respects_the_verbosity(level: int, shown: str) -> None:
    streams = Streams(level=level)
    streams.ui.note("leaf", 1)
    streams.ui.note("slab", 2)
    assert streams.err.getvalue() == shown


def test_message_is_written_in_one_piece() -> None:
    """Otherwise the messages of two threads could share a line."""
    pieces = list[str]()

    class Recorder(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    Ui("train", err=Recorder()).note("saved step 3")
    assert [piece for piece in pieces if piece] == ["saved step 3\n"]


def test_open_ui_applies_the_shared_options() -> None:
    assert open_ui("x", False, quiet=True, verbose=2).level == QUIET
    assert open_ui("x", False, quiet=False, verbose=5).level == LIBRARIES
    assert open_ui("x", True, quiet=False, verbose=0, progress="json").progress_mode == "json"


def test_quiet_has_no_progress_by_default() -> None:
    assert isinstance(Streams().ui.progress(), LineProgress)
    assert isinstance(Streams(level=QUIET).ui.progress(), NullProgress)
    asked = Ui("x", level=QUIET, progress_mode="lines", err=io.StringIO())
    assert isinstance(asked.progress(), LineProgress)


def test_bug_is_reported_with_a_saved_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_traceback_is_printed_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREP_TRACEBACK", "1")
    streams = Streams()
    try:
        raise ERROR
    except PrepError as error:
        streams.ui.fail(error)
    assert streams.err.getvalue().startswith("Traceback (most recent call last):")
    assert "error: x.safetensors is cut short" in streams.err.getvalue()


def is_colored(**variables: str) -> bool:
    stream = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        Ui("x", err=stream).finish(Report(error=ERROR))
    assert "error:" in stream.getvalue()
    return "\x1b[" in stream.getvalue()


def test_color_follows_the_terminal_and_variables() -> None:
    assert is_colored()
    assert is_colored(NO_COLOR="")
    assert not is_colored(NO_COLOR="1")
    assert not is_colored(NO_COLOR="1", FORCE_COLOR="1")
    assert not is_colored(TERM="dumb")
    streams = Streams()
    streams.ui.fail(ERROR)
    assert "\x1b[" not in streams.err.getvalue()


def test_control_characters_are_escaped() -> None:
    streams = Streams()
    streams.ui.note("tensor \x1b[2J\x07\r")
    streams.ui.finish(Report("a\x1b]0;b", error=PrepError("bad \udc80 name")))
    assert "\x1b" not in "".join(streams.texts)
    assert "tensor \\x1b[2J\\x07\\r" in streams.err.getvalue()
    assert "bad \\udc80 name" in streams.err.getvalue()


@given(st.text())
def test_printable_text_is_utf8_and_stable(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert all(c.isprintable() or c in "\n\t\u200c\u200d" or category(c) == "Zs" for c in shown)
    assert printable(shown) == shown


def test_printable_keeps_text_of_any_script() -> None:
    text = "\u3053\u3093\u3000\u4e16 \U0001f469\u200d\U0001f469 10\u00a0km"
    assert printable(text) == text
    assert printable("\u202eabc\u2028") == "\\u202eabc\\u2028"


def test_columns_is_none_for_a_pipe() -> None:
    assert Ui("inspect", out=io.StringIO()).columns is None


def test_columns_is_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "57")
    assert Ui("inspect", out=out).columns == 57


def test_stream_line_prints_pieces_at_once_and_ends_the_line() -> None:
    streams = Streams(out=Terminal())
    assert streams.ui.can_stream
    with streams.ui.stream_line() as write:
        for piece, expected in (("one ", "one "), ("", "one "), ("two\x1b", "one two\\x1b")):
            write(piece)
            assert streams.texts[0] == expected
    assert streams.ui.finish(Report("one two\x1b")) == OK
    assert streams.texts == ("one two\\x1b\n", "")


def test_stream_line_ends_an_interrupted_line() -> None:
    streams = Streams(out=Terminal())

    def interrupt() -> None:
        with streams.ui.stream_line() as write:
            write("one")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert streams.texts[0] == "one\n"


def test_results_stream_only_as_text_on_a_terminal() -> None:
    assert not Streams().ui.can_stream
    assert not Streams(as_json=True, out=Terminal()).ui.can_stream
    assert not Streams(out=Terminal()).ui.for_process(0).can_stream


def test_result_that_differs_from_the_streamed_text_is_printed() -> None:
    streams = Streams(out=Terminal())
    with streams.ui.stream_line() as write:
        write("one")
    assert streams.ui.finish(Report("one two")) == OK
    assert streams.texts[0] == "one\none two\n"
