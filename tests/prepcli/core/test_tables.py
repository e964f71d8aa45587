"""Tables in terminals: the first cell of a row is never cut, and no line is longer than the terminal."""

from __future__ import annotations

import pytest

from prepcli.core.tables import format_table

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
