"""Comparisons as text and JSON, without checkpoints."""

from __future__ import annotations

import io
from dataclasses import replace

from prepcli.commands.console.ui import Ui
from prepcli.commands.operations.verification_results import Verification
from prepcli.commands.rendering.checkpoints import verification_report
from prepcli.core.observer import LEAVES, NORMAL

EQUAL = Verification(
    is_equal=True, tensors=3, values=1200, differences=(), seconds=0.5, checkpoint="m"
)
DIFFERENT = Verification(
    is_equal=False,
    tensors=None,
    values=None,
    differences=[{"leaf": "", "tensor": f"t{i}", "what": "is not in b"} for i in range(30)],
    seconds=0.5,
    checkpoint="a",
    against="b",
    total_tensors=40,
)


def silent_ui(level: int = NORMAL) -> Ui:
    return Ui("verify", level=level, out=io.StringIO(), err=io.StringIO())


def test_equal_checkpoints_report_values():
    report = verification_report(EQUAL, silent_ui())
    assert report.text == "ok: 3 tensors, 1,200 values, 0 different (0.5 s)"
    assert [*report.fields] == ["tensors", "values", "differences", "ignored_padding_rows"]


def test_quick_check_of_one_checkpoint_has_no_padding():
    quick = replace(EQUAL, values=None, checked=("headers", "file sizes"))
    report = verification_report(quick, silent_ui())
    assert report.text.startswith("ok: headers and file sizes of 3 tensors, no values read")
    assert [*report.fields] == ["tensors", "values", "checked"]


def test_differences_of_both_checkpoints_have_no_total():
    """Tensors that only `against` has are not part of the checkpoint's total."""
    report = verification_report(replace(DIFFERENT, total_tensors=20), silent_ui())
    assert report.error is not None
    assert report.error.what == "a is not the same as b (30 tensors)"


def test_differences_are_an_error_with_counts():
    report = verification_report(DIFFERENT, silent_ui())
    assert report.error is not None
    assert report.error.what == "a is not the same as b (30 of 40 tensors)"
    assert report.error.why == "t0 is not in b"
    assert [*report.fields] == ["differences", "ignored_padding_rows", "settings", "left_out"]


def test_normal_verbosity_omits_differences():
    normal = silent_ui()
    verbose = silent_ui(LEAVES)
    for ui in (normal, verbose):
        verification_report(DIFFERENT, ui)
    assert isinstance(normal.err, io.StringIO)
    assert isinstance(verbose.err, io.StringIO)
    assert "more; `-v` or `--json` lists all" in normal.err.getvalue()
    assert verbose.err.getvalue().count("differs  t") == 30
