"""Views of runs, results and errors in a notebook."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import prepcli as prep
from prepcli.commands.console.notebook import NotebookBlock, NotebookObserver, run_observer_of
from prepcli.commands.operations.results import Conversion, TrainingRun
from prepcli.core.errors import Option, PrepError, UsageError, text
from prepcli.core.observer import RunObserver
from trainer.training.metrics import METRICS_FILE


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
