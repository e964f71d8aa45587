"""Results of pipelines and workers, and their JSON fields."""

from __future__ import annotations

import json

import pytest

from prepcli.engine.conversion_result import ConversionResult


def make_result() -> ConversionResult:
    return ConversionResult(
        read_nbytes=100,
        written_nbytes=90,
        copied_nbytes=30,
        resumed_nbytes=7,
        peak_nbytes=1 << 20,
        seconds={"read": 0.5, "move": 0.0, "write": 2.125},
    )


def test_result_is_read_from_its_json_fields():
    fields = json.loads(json.dumps(make_result().json_fields(1 << 30)))
    assert fields["bytes"]["moved"] == 220
    assert fields["memory"] == {"budget": 1 << 30, "peak": 1 << 20}
    assert ConversionResult.from_json(fields) == make_result()


@pytest.mark.parametrize("field", ["bytes", "memory", "time"])
def test_report_without_a_field_has_no_result(field: str):
    fields = make_result().json_fields(1 << 30)
    del fields[field]
    assert ConversionResult.from_json(fields) is None


def test_sum_of_results_has_the_bytes_and_times_of_both():
    total = make_result()
    total.add(make_result())
    assert (total.read_nbytes, total.written_nbytes, total.copied_nbytes) == (200, 180, 60)
    assert total.resumed_nbytes == 14
    assert total.seconds == {"read": 1.0, "move": 0.0, "write": 4.25}
