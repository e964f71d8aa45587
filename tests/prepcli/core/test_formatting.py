"""Texts of sizes, rates and durations, tables in terminals, and the steps after which events happen."""

from __future__ import annotations

import io
import itertools
import json
import re
import shlex
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.commands.console.ui import Report, Ui
from prepcli.core.errors import USAGE, PrepError, usage_error
from prepcli.core.formatting import (
    MAX_LINE_CHARS,
    MAX_LINES,
    UNITS,
    bounded_error,
    bounded_line,
    bounded_lines,
    count_text,
    format_bytes,
    format_bytes_of,
    format_clock,
    format_duration,
    format_rate,
    format_time_left,
    join_names,
    parse_bytes,
    parse_decimal,
    shorten,
)
from prepcli.core.intervals import EventSteps, Interval, is_due, num_due
from prepcli.core.launchers import OPEN_MPI
from prepcli.core.process_address import coordinator_address
from prepcli.core.tables import format_table

OPTION = "memory"
GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512MiB", 512 * MIB),
        ("512mib", 512 * MIB),
        ("5GB", 5_000_000_000),
        ("5 gb", 5_000_000_000),
        ("1.5GiB", 1536 * MIB),
        ("0.5KB", 500),
        ("1048576", MIB),
        (" 17 ", 17),
        ("17B", 17),
        ("0", 0),
        ("2TiB", 2 << 40),
    ],
)
def test_parse_bytes_reads_a_size(text: str, nbytes: int) -> None:
    assert parse_bytes(text, OPTION) == nbytes


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_parse_bytes_reads_every_unit_in_any_case(number: int, unit: str, space: str) -> None:
    for spelling in (unit, unit.lower(), unit.upper()):
        assert parse_bytes(f"{number}{space}{spelling}", OPTION) == number * UNITS[unit]


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "+1", "1e6", "8XB", "1 2", "1.", ".5GB", "٣", "1,000", "nan", "8MiBs"]
)
def test_parse_bytes_rejects_invalid_text(text: str) -> None:
    with pytest.raises(PrepError) as caught:
        parse_bytes(text, OPTION)
    assert caught.value.code == USAGE
    assert caught.value.what == f"`--memory {shlex.quote(text)}` is not a size in bytes"
    assert caught.value.hint == "for example `--memory 512MiB`"


def test_parse_bytes_suggests_a_unit_for_a_bare_prefix() -> None:
    with pytest.raises(PrepError) as caught:
        parse_bytes("512m", OPTION)
    assert caught.value.hint == "did you mean `--memory 512MiB`?"


def test_parse_bytes_rejects_fractions_of_a_byte() -> None:
    with pytest.raises(PrepError) as caught:
        parse_bytes("0.0001KB", OPTION)
    assert caught.value.what == "`--memory 0.0001KB` is not a whole number of bytes"
    assert caught.value.why == "it is 0.1 bytes"


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 5000 + "GiB", "0." + "9" * 5000, "8388608TiB"])
def test_parse_bytes_rejects_huge_numbers(text: str) -> None:
    with pytest.raises(PrepError) as caught:
        parse_bytes(text, OPTION)
    assert caught.value.code == USAGE
    assert caught.value.why == "the limit is 9,223,372,036,854,775,807 bytes"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (7 * 2048 * 4, "56.0 KiB"),
        (97 * MIB, "97.0 MiB"),
        (214 * MIB, "214 MiB"),
        (5_262_303_232, "4.90 GiB"),
        (26_031_728_640, "24.24 GiB"),
        (GIB - 1, "1.00 GiB"),
        (3 << 40, "3.00 TiB"),
    ],
)
def test_format_bytes_uses_binary_units(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(0, 1 << 50))
def test_format_bytes_is_short_and_accurate(nbytes: int) -> None:
    text = format_bytes(nbytes)
    assert re.fullmatch(r"\d{1,4}(\.\d\d?)? (byte|bytes|[KMGT]iB)", text)
    number, unit = text.split()
    shown = float(number) * {"byte": 1, "bytes": 1}.get(unit, UNITS.get(unit, 0))
    assert abs(shown - nbytes) <= 0.05 * nbytes


def test_format_bytes_of_uses_the_unit_of_the_total() -> None:
    assert format_bytes_of(0, 26_031_728_640) == "0.00 of 24.24 GiB"
    assert format_bytes_of(300 * MIB, 26_031_728_640) == "0.29 of 24.24 GiB"
    assert format_bytes_of(10 * MIB, 214 * MIB) == "10 of 214 MiB"
    assert format_bytes_of(3, 9) == "3 of 9 bytes"


def test_format_rate_uses_binary_units_per_second() -> None:
    assert format_rate(870 * MIB) == "870 MiB/s"
    assert format_rate(1.2 * GIB) == "1.2 GiB/s"
    assert format_rate(97 * MIB) == "97.0 MiB/s"
    assert format_rate(12.4) == "12 B/s"


def test_format_durations_round_to_the_shown_unit() -> None:
    assert [format_duration(s) for s in (0.04, 4.31, 32.7, 99.94, 133.2, 3599.4, 11_100)] == [
        "0.0 s", "4.3 s", "32.7 s", "99.9 s", "2 min 13 s", "59 min 59 s", "3 h 05 min",
    ]  # fmt: skip
    assert [format_clock(s) for s in (4.9, 750, 3607)] == ["0:04", "12:30", "1:00:07"]
    assert [format_time_left(s) for s in (0.2, 15, 99.4, 120, 5940, 6000, 14_400)] == [
        "0 s left", "15 s left", "99 s left", "2 min left", "99 min left", "1 h 40 min left", "4 h 00 min left",
    ]  # fmt: skip


@given(st.floats(0, 1e6))
def test_format_durations_never_show_sixty(seconds: float) -> None:
    for text in (format_duration(seconds), format_clock(seconds), format_time_left(seconds)):
        assert not re.search(r":60|h 60|min 60", text)


def test_join_names_shows_all_of_a_short_list():
    assert join_names(["a", "b"]) == "a, b"
    assert join_names([]) == ""
    assert join_names(map(str, range(20))).endswith("18, 19")


def test_join_names_counts_the_remaining_names():
    assert join_names([str(n) for n in range(2000)]).endswith("19 and 1,980 more")
    assert join_names(["a", "b", "c"], max_names=2, separator="; ") == "a; b and 1 more"


def test_join_names_reads_only_the_names_it_shows():
    assert (
        join_names(map(str, itertools.count()), total=10**9, max_names=2)
        == "0, 1 and 999,999,998 more"
    )


def test_join_names_shows_eight_lines_of_long_names():
    names = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(10, 30)]
    text = join_names(names)
    # A terminal breaks a long line at its edge, and not between words.
    assert -(-len(text) // 80) <= 9
    shown, _, rest = text.partition(" and ")
    assert shown == ", ".join(names[: shown.count(", ") + 1])
    assert rest == f"{19 - shown.count(', ')} more"


def test_join_names_shows_one_name_of_any_length():
    assert join_names(["x" * 1000, "y"]) == f"{'x' * 1000} and 1 more"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 devices"), (1, "1 device"), (1024, "1,024 devices")]
)
def test_count_text_has_the_plural_unless_the_number_is_1(number: int, text: str):
    assert count_text(number, "device") == text


MANY_DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("0017", 17), ("", None), ("-1", None), ("٣", None), (MANY_DIGITS, None)],
)
def test_parse_decimal_returns_short_numbers(text: str, number: int | None) -> None:
    assert parse_decimal(text) == number


def test_variables_of_many_digits_are_ignored() -> None:
    uri = {
        "OMPI_MCA_orte_hnp_uri": f"{MANY_DIGITS}.0;tcp://10.96.0.1:34911",
        "JAX_COORDINATOR_PORT": MANY_DIGITS,
    }
    address, _ = coordinator_address(OPEN_MPI, uri, default_port=11111)
    assert address.startswith("10.96.0.1:")


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


HEADER = ("name", "shape", "dtype", "size", "file", "offset")
NAMES = [f"model.layers.{layer}.post_attention_layernorm.weight" for layer in (0, 10)]
ROWS = [
    [NAMES[0], "[4096]", "bfloat16", "8.0 KiB", "model-00001-of-00002.safetensors", 9_876_543_210],
    [NAMES[1], "[4096]", "bfloat16", "8.0 KiB", "model-00001-of-00002.safetensors", 19_876_543_210],
    [
        "lm_head.weight",
        "[32000, 4096]",
        "bfloat16",
        "250 MiB",
        "model-00001-of-00002.safetensors",
        8,
    ],
]


def test_table_aligns_text_left_and_numbers_right() -> None:
    rows = [["wte", 50257, "4.90 GiB"], ["h.0.ln_1.weight", 8, "8.0 KiB"]]
    assert format_table(rows, ["name", "rows", "size"], right_aligned=["size"]).splitlines() == [
        "name               rows      size",
        "wte              50,257  4.90 GiB",
        "h.0.ln_1.weight       8   8.0 KiB",
    ]


def test_table_without_rows_is_its_header() -> None:
    assert format_table([], ["name", "rows"]) == "name  rows"


def test_table_without_a_width_is_never_shortened() -> None:
    lines = format_table(ROWS, HEADER).splitlines()
    assert lines[0].split() == [*HEADER]
    assert lines[1].split() == [*ROWS[0][:3], "8.0", "KiB", ROWS[0][4], "9,876,543,210"]


@pytest.mark.parametrize("width", [50, 60, 80, 100, 120, 200])
def test_table_never_cuts_the_first_cell(width: int) -> None:
    lines = format_table(ROWS, HEADER, {"size"}, width, optional=("offset", "size")).splitlines()
    assert max(map(len, lines)) <= width
    for name in NAMES:
        assert any(line.split()[0] == name for line in lines)
    assert not any("…" in line for line in lines)


def test_table_has_one_line_for_equal_cells() -> None:
    text = format_table(ROWS, HEADER, {"size"}, 80, optional=("offset", "size"))
    assert text.splitlines() == [
        "name                                             shape             size",
        "model.layers.0.post_attention_layernorm.weight   [4096]         8.0 KiB",
        "model.layers.10.post_attention_layernorm.weight  [4096]         8.0 KiB",
        "lm_head.weight                                   [32000, 4096]  250 MiB",
        "each row above: dtype bfloat16, file model-00001-of-00002.safetensors",
        "no room for: offset; `| cat` shows all columns",
    ]


def test_table_puts_long_names_on_lines_of_their_own() -> None:
    text = format_table(ROWS[1:], HEADER, {"size"}, 60, optional=("offset",))
    assert text.splitlines() == [
        "name",
        "  shape             size          offset",
        "model.layers.10.post_attention_layernorm.weight",
        "  [4096]         8.0 KiB  19,876,543,210",
        "lm_head.weight",
        "  [32000, 4096]  250 MiB               8",
        "each row above: dtype bfloat16, file",
        "model-00001-of-00002.safetensors",
    ]


def test_table_wraps_text() -> None:
    rows = [
        ["gpt2", "8", "Finetune a small model on the text of one file"],
        ["llama", "256", "Pretrain"],
    ]
    text = format_table(rows, ("recipe", "devices", "summary"), width=45, wrapped=("summary",))
    assert text.splitlines() == [
        "recipe  devices  summary",
        "gpt2    8        Finetune a small model on",
        "                 the text of one file",
        "llama   256      Pretrain",
    ]


def test_table_with_room_has_all_columns() -> None:
    assert format_table(ROWS, HEADER, {"size"}, 200, optional=("offset",)) == format_table(
        ROWS, HEADER, {"size"}
    )


def test_table_without_rows_is_its_header_on_two_lines() -> None:
    assert format_table([], ("name", "a long column"), width=10) == "name\n  a long column"


LAST = 24


def due_steps(events: EventSteps) -> list[int]:
    return [step for step in range(1, events.last + 1) if events.is_due(step)]


def test_interval_is_due_at_the_first_step_that_completes_it():
    every = Fraction(5, 2)
    assert [step for step in range(1, 11) if is_due(step, every)] == [3, 5, 8, 10]
    assert [step for step in range(1, 11) if is_due(step, 4)] == [4, 8]
    assert not any(is_due(step, 0) for step in range(1, 11))


@pytest.mark.parametrize("every", [0, 1, 4, 5, 12, Fraction(5, 2), Fraction(2, 3)])
def test_number_of_due_steps_is_counted(every: Interval):
    for first in range(1, LAST + 2):
        steps = range(first, LAST + 1)
        assert num_due(steps, every) == sum(is_due(step, every) for step in steps)


def test_event_happens_at_each_interval_and_after_the_last_step():
    assert due_steps(EventSteps((4, 6), 13)) == [4, 6, 8, 12, 13]
    assert due_steps(EventSteps((0,), 13)) == [13]


def test_steps_of_several_intervals_are_counted_once():
    for intervals in product((0, 1, 4, 6, 7, 12), repeat=3):
        events = EventSteps(intervals, LAST)
        for first in (1, 5, LAST, LAST + 1):
            expected = [step for step in due_steps(events) if step >= first]
            assert events.count_from(first) == len(expected), (intervals, first)


def test_steps_of_a_fraction_may_be_counted_twice():
    events = EventSteps((Fraction(5, 2), 8), 20)
    assert due_steps(events) == [3, 5, 8, 10, 13, 15, 16, 18, 20]
    assert events.count_from(1) == 10
