"""Console output: results, notes, errors and JSON, of jobs of several processes, and in notebooks."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unicodedata import category

import pytest
from hypothesis import given
from hypothesis import strategies as st

import prepcli as prep
from prepcli.commands.console.notebook import NotebookBlock, NotebookObserver, run_observer_of
from prepcli.commands.console.progress_displays import LineProgress
from prepcli.commands.console.ui import LIBRARIES, NORMAL, QUIET, Report, Ui, open_ui, printable
from prepcli.commands.operations.results import Conversion
from prepcli.commands.operations.run_results import TrainingRun
from prepcli.core import version
from prepcli.core.errors import (
    FAILED,
    INTERRUPTED,
    OK,
    STOPPED,
    USAGE,
    Option,
    PrepError,
    UsageError,
    text,
    usage_error,
)
from prepcli.core.observer import NullProgress, RunObserver
from prepcli.core.unexpected import label_errors, process_of
from trainer.training.metrics import METRICS_FILE

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


def open_streams(process: int | None, *, as_json: bool = False, all_print: bool = False) -> Ui:
    """Return the Ui of a process, with streams that can be read."""
    ui = Ui("train", as_json, out=io.StringIO(), err=io.StringIO())
    return ui.for_process(process, all_print=all_print)


def texts(ui: Ui) -> tuple[str, str]:
    """Return what a Ui has printed on stdout and stderr."""
    assert isinstance(ui.out, io.StringIO)
    assert isinstance(ui.err, io.StringIO)
    return ui.out.getvalue(), ui.err.getvalue()


@pytest.mark.parametrize(
    ("process", "all_print", "expected"),
    [
        (None, False, "step 1\nwarning: full\n"),
        (0, False, "step 1\nwarning: process 0: full\n"),
        (1, False, "warning: process 1: full\n"),
        (0, True, "process 0: step 1\nwarning: process 0: full\n"),
        (12, True, "process 12: step 1\nwarning: process 12: full\n"),
    ],
)
def test_notes_and_warnings_have_the_process_prefix(
    process: int | None, all_print: bool, expected: str
):
    ui = open_streams(process, all_print=all_print)
    ui.note("step 1")
    ui.warn("full")
    assert texts(ui) == ("", expected)


@pytest.mark.parametrize(("process", "expected"), [(None, "run/4\n"), (0, "run/4\n"), (1, "")])
def test_process_0_prints_the_result(process: int | None, expected: str):
    ui = open_streams(None)
    assert ui.finish(Report("run/4", process=process)) == OK
    assert texts(ui) == (expected, "")


def test_other_processes_print_no_json_and_label_errors():
    error = PrepError("no data", "the folder is empty")
    first, second = (open_streams(None, as_json=True) for _ in range(2))
    assert (
        first.finish(Report(error=error, process=0))
        == second.finish(Report(error=error, process=1))
        == FAILED
    )
    assert json.loads(texts(first)[0])["error"]["what"] == "no data"
    assert texts(first)[1].startswith("error: process 0: no data\n")
    assert texts(second) == ("", "error: process 1: no data\n  why: the folder is empty\n")


@pytest.mark.parametrize("code", [STOPPED, INTERRUPTED])
def test_process_0_reports_a_stop_of_all(code: int):
    ui = open_streams(None, as_json=True)
    assert ui.finish(Report(error=PrepError("stopped by SIGTERM", code=code), process=1)) == code
    assert texts(ui) == ("", "")


def test_fail_uses_the_process_of_the_error():
    ui = open_streams(None)
    with pytest.raises(PrepError) as caught, label_errors(3):
        raise PrepError("no data")
    assert process_of(caught.value) == 3
    assert ui.fail(caught.value) == FAILED
    assert texts(ui) == ("", "error: process 3: no data\n")
    assert process_of(PrepError("other")) is None


def test_other_processes_show_no_progress():
    assert isinstance(open_streams(1, all_print=True).progress(), NullProgress)


@dataclass
class Handle:
    """A display handle that records what it shows."""

    shown: list[str] = field(default_factory=list)

    def update(self, shown: str) -> None:
        self.shown.append(shown)


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """Install a module `IPython.display` with the two names that prep uses."""
    handle = Handle()
    display: Any = ModuleType("IPython.display")
    display.HTML = str
    display.display = lambda shown, display_id: handle
    package: Any = ModuleType("IPython")
    package.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return handle


def test_notebook_block_replaces_its_escaped_lines(handle: Handle):
    block = NotebookBlock()
    block.draw([[("loss ", ""), ("<2>", "bold")], [("step 3", "")]])
    block.close()
    assert handle.shown == ["<pre>loss &lt;2&gt;\nstep 3</pre>"]


def test_notebook_observer_prints_notes_and_warnings(
    handle: Handle, capsys: pytest.CaptureFixture[str]
):
    observer = run_observer_of("notebook")
    assert isinstance(observer, NotebookObserver)
    assert isinstance(observer, RunObserver)
    observer.note("a note")
    observer.note("a detail", 1)
    observer.warn("a risk")
    assert capsys.readouterr().out == "a note\nwarning: a risk\n"


def test_notebook_without_ipython_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    with pytest.raises(PrepError, match="IPython is not installed"):
        run_observer_of("notebook")


def test_other_texts_of_progress_are_errors():
    wrong: Any = "bar"
    with pytest.raises(UsageError, match="the only text is 'notebook'"):
        run_observer_of(wrong)


def test_errors_are_one_message_in_a_notebook():
    error = UsageError("no room", "it takes 3 GB", text("use {}", Option("out", "x")))
    render: Any = error._render_traceback_
    assert render() == ["UsageError: no room", "  why: it takes 3 GB", ' hint: use `out="x"`']
    assert PrepError("only what")._render_traceback_() == ["PrepError: only what"]


def test_ipython_shows_errors_without_a_traceback(capsys: pytest.CaptureFixture[str]):
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    shell.run_cell("import prepcli as prep\nprep.inspect('no/such/model/here')")
    shown = capsys.readouterr().out
    assert "Traceback" not in shown
    assert len(shown.splitlines()) < 6


def test_results_are_tables_in_a_notebook():
    no_plan: Any = None
    result = Conversion(
        Path("a<b"),
        bytes_read=3 << 20,
        bytes_written=0,
        seconds=2.0,
        peak_bytes=0,
        already_done=False,
        plan_digest="",
        plan=no_plan,
        stage_seconds={"read": 1.25, "write": 133.0},
    )
    page: Any = result._repr_html_()
    assert "<caption>Conversion</caption>" in page
    assert "<td>a&lt;b</td>" in page
    assert "<tr><th>bytes_read</th><td>3.0 MiB</td></tr>" in page
    assert "<td>read 1.2 s, write 2 min 13 s</td>" in page
    assert "details" not in page


def test_training_is_shown_in_the_output_of_a_cell(handle: Handle, work_dir: Path):
    run = prep.train("recipe.toml", "run", overrides=["train.steps=2"], progress="notebook")
    assert run.is_finished
    assert "finished" in handle.shown[-1]
    assert run.metrics["step"] == [1, 2]


def test_metrics_of_a_run_are_columns_by_step(tmp_path: Path):
    lines = (
        '{"step": 0, "eval_loss": 3.0}\n{"step": 1, "loss": 2.5}\n'
        '{"step": 2, "loss": 2.0}\n{"step": 2, "eval_loss": 1.5}\n'
    )
    (tmp_path / METRICS_FILE).write_text(lines)
    run = TrainingRun(tmp_path, step=2, is_finished=True, seconds=1.0)
    columns = {"step": [0, 1, 2], "eval_loss": [3.0, None, 1.5], "loss": [None, 2.5, 2.0]}
    assert run.metrics == columns
    assert TrainingRun(tmp_path / "none", step=0, is_finished=False, seconds=0.0).metrics == {}
    assert prep.TrainingRun is TrainingRun
