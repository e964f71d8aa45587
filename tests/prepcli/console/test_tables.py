"""Tables in terminals: the first cell of a row is never cut, and no line is longer than the terminal."""

from __future__ import annotations

import pytest

from prepcli.console.ui import format_table

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
