"""Tests of the context benchmarks: tables, chart and search with fake measurements, and steps of a tiny model."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from bench import context, longest_context
from bench.compiled_memory import CompiledMemory
from bench.context import (
    ALL_CHUNKS,
    DENSE,
    METHODS,
    TILES,
    ContextRow,
    context_svg,
    context_text,
    method_config,
)
from bench.model_configs import MODEL_SIZES
from tests.helpers.tiny_configs import LLAMA

MIB = 1 << 20


def rows_of(
    *mib_by_tokens: tuple[int, int, int], seconds: tuple[float, ...] = ()
) -> list[ContextRow]:
    """Return rows of 1,024 and more tokens with the MiB of each method."""
    return [
        ContextRow(method, 1024 << number, CompiledMemory(nbytes * MIB, 0, 1.0), seconds)
        for number, sizes in enumerate(mib_by_tokens)
        for method, nbytes in zip(METHODS, sizes)
    ]


def test_context_text_has_a_line_per_length():
    small, large = context_text(rows_of((3000, 200, 100), (12000, 400, 200))).splitlines()[-2:]
    assert small.split() == ["1,024", "3,000", "200", "100"]
    assert large.split() == ["2,048", "12,000", "400", "200"]


def test_context_text_shows_the_fastest_run():
    rows = rows_of((3000, 200, 100), seconds=(2.0, 1.5))
    rows[0] = replace(rows[0], seconds=())
    assert context_text(rows).splitlines()[-1].split() == [
        "1,024",
        "3,000",
        "200",
        "100",
        "1.50",
        "1.50",
    ]


def test_context_svg_draws_powers_as_straight_lines():
    picture = ElementTree.fromstring(context_svg(rows_of((16, 4, 4), (64, 8, 4), (256, 16, 4))))
    lines = [line.attrib["points"].split() for line in picture.findall(".//{*}polyline")]
    steps = [[float(point.split(",")[1]) for point in line] for line in lines]
    rises = [(high - middle, middle - low) for low, middle, high in steps]
    assert [first == pytest.approx(second, abs=0.2) for first, second in rises] == [True] * 3
    assert rises[0][0] == pytest.approx(2 * rises[1][0], abs=0.3), (
        "dense attention grows with the square"
    )
    assert rises[2] == (0, 0)


def test_methods_have_different_kernels_and_chunk_sizes():
    configs = [method_config(method) for method in (DENSE, TILES, ALL_CHUNKS)]
    assert [config.attention_options.kernel for config in configs] == [
        "reference",
        "blockwise",
        "blockwise",
    ]
    assert [config.ffn_chunk_size for config in configs] == [-1, -1, 1024]
    assert [config.head_chunk_size for config in configs] == [-1, -1, 512]


@pytest.mark.slow  # compiles three training steps
def test_main_measures_memory_and_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(context, "METHODS", (ALL_CHUNKS,))
    monkeypatch.setitem(MODEL_SIZES, "small", LLAMA)
    context.main(["--tokens", "16", "--seconds", "1"])
    tokens, mib, seconds = capsys.readouterr().out.splitlines()[-1].split()
    assert (tokens, mib.isdigit()) == ("16", True)
    assert float(seconds) >= 0


@pytest.mark.parametrize(
    ("longest", "expected"), [(0, 0), (1023, 0), (1024, 1024), (5000, 4096), (24575, 23552)]
)
def test_longest_context_is_the_largest_multiple_that_fits(longest: int, expected: int):
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= longest

    assert longest_context.longest_context(fits) == expected
    assert len({*tried}) == len(tried) <= 10


def test_longest_text_has_ratios():
    text = longest_context.longest_text({DENSE: 4096, TILES: 16384, ALL_CHUNKS: 40960})
    assert text.splitlines()[-1].split()[-3:] == ["40,960", "10.0", "2.5"]
