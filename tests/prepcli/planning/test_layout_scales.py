"""Records of scales in a manifest: complete ones are read back, and others are invalid."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from prepcli.core.errors import DamagedError
from prepcli.formats.manifest import encode_manifest, parse_manifest
from prepcli.planning.layout_scales import LayoutScale, recorded_scale

MANIFEST = {
    "kind": "hf", "request": "", "plan": "", "config": {}, "tensors": {}, "prefixed": True, "tied": False
}  # fmt: skip
RECORD = {"sqrt": 64, "significant": "", "lost": 0, "digests": [[0, 8, "d"]]}


def is_scale_record(record: Mapping[str, object]) -> bool:
    """Return whether a manifest with the record is valid."""
    data = encode_manifest({**MANIFEST, "scales": {"w": record}})
    try:
        parse_manifest(Path("prep-manifest.json"), data)
    except DamagedError:
        return False
    return True


@pytest.mark.parametrize(
    "scale",
    [
        LayoutScale(64),
        LayoutScale(2560, power=-1, root_dtype="bfloat16"),
        LayoutScale(1, offset=1),
    ],
)
def test_recorded_scale_returns(scale: LayoutScale):
    assert is_scale_record({**RECORD, **scale.fields()})
    assert recorded_scale(scale.fields()) == scale


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sqrt", 0),
        ("sqrt", 8.0),
        ("power", "1"),
        ("root", "float8"),
        ("offset", None),
        ("significant", "int8"),
        # Negative counts would cancel those of other tensors.
        ("lost", -1),
    ],
)
def test_record_with_an_invalid_value_is_refused(key: str, value: object):
    assert is_scale_record(RECORD)
    assert not is_scale_record(RECORD | {key: value})


@pytest.mark.parametrize("key", ["sqrt", "significant", "lost", "digests"])
def test_record_without_a_key_is_refused(key: str):
    assert not is_scale_record({name: RECORD[name] for name in RECORD.keys() - {key}})
