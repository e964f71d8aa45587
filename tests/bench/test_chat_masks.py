"""The table of chat templates: results, reasons below it, and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.chat_masks import main
from tests.trainer.data.chat_templates import END_OF_TEXT, NEXT_ROLE_ENDS, PYTHON_CALLS


def test_table_has_results_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    (tmp_path / "glm.jinja").write_text(NEXT_ROLE_ENDS)
    (tmp_path / "marked.jinja").write_text(PYTHON_CALLS)
    assert main(["--templates", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| template | single turn | multi-turn |")
    assert lines[2] == "| glm | ids | ids | ids | error (1) | ids | ids |"
    assert lines[3] == "| marked | equal | equal | equal | equal | equal | equal |"
    assert lines[5].startswith("1. the text that chat.jinja renders does not show the tool calls")
    # It has the name of a published template with marked texts, and renders others.
    (tmp_path / "phi3_5.jinja").write_text(END_OF_TEXT.replace("|>\\n", "|>"))
    assert main(["--templates", str(tmp_path)]) == 1
    assert "| phi3_5 | other text (2) |" in capsys.readouterr().out
