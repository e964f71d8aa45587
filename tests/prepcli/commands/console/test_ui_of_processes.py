"""Console output of a job of several processes: process 0 prints the result, all print warnings and errors."""

from __future__ import annotations

import io
import json

import pytest

from prepcli.commands.console.ui import Report, Ui
from prepcli.core.errors import FAILED, INTERRUPTED, OK, STOPPED, PrepError
from prepcli.core.observer import NullProgress
from prepcli.core.unexpected import label_errors, process_of


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
