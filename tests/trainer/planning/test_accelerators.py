"""Kinds of accelerators and their bandwidths."""

from __future__ import annotations

import pytest

from prepcli.core.errors import UsageError
from trainer.planning.step_time import ACCELERATORS, Accelerator, parse_devices


@pytest.mark.parametrize(
    ("text", "name", "number"),
    [("v5p", "v5p", None), ("h100:8", "H100", 8), ("a100-80:16", "A100-80", 16)],
)
def test_parse_devices_accepts_kind_and_number(text: str, name: str, number: int | None):
    kind, parsed_number = parse_devices(text)
    assert kind is not None
    assert (kind.name, parsed_number) == (name, number)


def test_parse_devices_accepts_a_number_alone():
    assert parse_devices("256") == (None, 256)


@pytest.mark.parametrize(
    "text", ["v5p:0", "0", "1048577", "v5p:", "v5p:-1", "v5p:x", "v5p:1048577", 20 * "9"]
)
def test_parse_devices_rejects_invalid_numbers(text: str):
    with pytest.raises(UsageError, match="is invalid"):
        parse_devices(text)


def test_parse_devices_suggests_a_similar_kind():
    with pytest.raises(UsageError) as caught:
        parse_devices("H10O")
    assert "known: v4, v5e" in caught.value.why
    assert "H100" in caught.value.hint


def test_axis_bandwidth_depends_on_the_domain():
    h100 = ACCELERATORS["H100"]
    assert h100.axis_bandwidth(8, 1) == h100.link_bandwidth, "within a node"
    assert h100.axis_bandwidth(64, 4) == 2 * h100.network_bandwidth, (
        "two devices of each node are in the ring"
    )
    assert h100.axis_bandwidth(64, 8) == h100.network_bandwidth
    assert ACCELERATORS["v5p"].axis_bandwidth(64, 4) == ACCELERATORS["v5p"].link_bandwidth, (
        "within a pod"
    )


@pytest.mark.parametrize("kind", ACCELERATORS.values(), ids=lambda kind: kind.name)
def test_links_are_faster_than_the_network(kind: Accelerator):
    assert kind.memory_bandwidth > kind.link_bandwidth > kind.network_bandwidth
