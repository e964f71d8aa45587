"""Tests of the growth and alternatives tables with fake measurements."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from bench.alternatives import conversion_commands, usual_text
from bench.evidence_rows import EvidenceRow
from bench.growth import growth_svg, growth_text
from bench.meter import CommandCost

MIB = 1 << 20


def _row(gb: int, seconds: float) -> EvidenceRow:
    return EvidenceRow(
        "save-init",
        "512MiB",
        gb * 10**9,
        (seconds, seconds + 1),
        (2.0 * seconds,),
        1.0,
        4.0,
        250 * MIB,
        MIB,
    )


def test_growth_text_has_a_line_per_size() -> None:
    small, large = growth_text([_row(2, 1.0), _row(20, 12.0)]).splitlines()[-2:]
    assert small.split() == ["2.0", "1.0", "2.0", "0.50", "2.0", "0.50", "0.75", "250"]
    assert large.split() == ["20.0", "12.0", "13.0", "0.60", "24.0", "0.50", "0.52", "250"]


def test_growth_svg_has_two_charts() -> None:
    picture = ElementTree.fromstring(growth_svg([_row(2, 1.0), _row(20, 12.0)]))
    assert [child.tag.rpartition("}")[2] for child in picture] == ["style", "svg", "svg"]
    assert len(picture.findall(".//{*}polyline")) == 4
    assert "--color0: #" in (picture[0].text or ""), "the file defines the colours of its curves"


def test_table_of_usual_commands_has_seconds_cpu_ratio_memory_and_ratio_to_prep() -> None:
    ours, theirs = (
        CommandCost(0, 5.0, 1, 100 * MIB, 0, "", ""),
        CommandCost(0, 60.0, 9, 3000 * MIB, 0, "", ""),
    )
    last = usual_text({"prep": [ours, ours], "other": [theirs]}).splitlines()[-1]
    assert last.split() == ["other", "60.0", "60.0", "12.0", "3000", "30.0"]


def test_conversion_commands_include_flax_if_installed() -> None:
    assert len(conversion_commands(Path("a"), Path("b"), None)) == 2
    assert conversion_commands(Path("a"), Path("b"), Path("python"))["redco: torch, Flax, Orbax"][
        0
    ] == Path("python")
