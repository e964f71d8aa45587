"""Length limits of messages."""

from __future__ import annotations

import io
import json

from prepcli.commands.console.ui import Report, Ui
from prepcli.core.bounded_text import (
    MAX_LINE_CHARS,
    MAX_LINES,
    bounded_error,
    bounded_line,
    bounded_lines,
    shorten,
)
from prepcli.core.errors import PrepError, usage_error

LONG_VALUE = "9" * 5000


def test_long_value_is_shortened_in_the_middle() -> None:
    line = bounded_line(f"`--memory {LONG_VALUE}GiB` is too large")
    assert line.startswith("`--memory 99999")
    assert line.endswith("9GiB` is too large")
    assert len(line) < 140


def test_path_of_usual_length_is_kept() -> None:
    text = f"cannot read /{'data/' * 45}config.json"
    assert bounded_line(text) == text


def test_many_short_words_are_shortened() -> None:
    assert len(bounded_line("9 " * 5000)) == MAX_LINE_CHARS


def test_lines_beyond_the_limit_are_counted() -> None:
    lines = bounded_lines("\n".join(map(str, range(100)))).split("\n")
    assert lines == [*map(str, range(MAX_LINES)), "and 76 more lines"]


def test_hint_keeps_the_paths_of_a_command() -> None:
    command = f"to resume: `prep save-init /{'d' * 250}/model --out /{'e' * 250}`"
    error = bounded_error(usage_error(LONG_VALUE, LONG_VALUE, command))
    assert error.hint == command
    assert error.code == 2
    assert (len(error.what), len(error.why)) == (100, 100)


def test_messages_of_the_console_are_bounded() -> None:
    out, err = io.StringIO(), io.StringIO()
    ui = Ui("save-init", as_json=True, out=out, err=err)
    ui.warn(LONG_VALUE)
    ui.finish(Report(error=PrepError(LONG_VALUE, "\n".join([LONG_VALUE] * 1000), LONG_VALUE)))
    document = json.loads(out.getvalue())
    assert len(document["warnings"][0]) == 100
    assert len(document["error"]["why"].split("\n")) == MAX_LINES + 1
    assert len(err.getvalue()) < 6000


def test_shorten_keeps_both_ends() -> None:
    assert shorten("abcdefgh", 5) == "ab…gh"
    assert shorten("abcde", 5) == "abcde"
