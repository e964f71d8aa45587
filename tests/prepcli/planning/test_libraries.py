"""The table of other libraries agrees with the families and with options. Records of scales are read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import pytest

from prepcli.core.errors import DamagedError
from prepcli.formats.manifest import encode_manifest, parse_manifest
from prepcli.models.registry import FAMILIES
from prepcli.planning.libraries import (
    HF_LAYOUT,
    LIBRARIES,
    LIBRARIES_BY_LAYOUT,
    MAXTEXT,
    TUNIX,
    AdamNumbers,
    AdamSettings,
    Layout,
    LayoutScale,
    find_library,
    recorded_scale,
)

SETTINGS = AdamSettings(lr=0.5, peak_lr=1.0, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1)
NUMBERS = AdamNumbers(step=5, num_updates=4, settings=SETTINGS)


def test_layouts_of_the_table_are_those_of_the_option():
    assert {*LIBRARIES_BY_LAYOUT} == {*get_args(Layout)}


def test_each_layout_has_rows_in_a_family():
    in_families = {layout for family in FAMILIES.values() for layout in family.layouts}
    assert {*LIBRARIES_BY_LAYOUT} == {HF_LAYOUT, *in_families}


def test_layout_has_the_formats_of_its_entries():
    assert [entry.file_format for entry in LIBRARIES_BY_LAYOUT[HF_LAYOUT]] == ["safetensors", "dcp"]
    assert find_library(HF_LAYOUT).file_format == "safetensors"
    assert find_library(HF_LAYOUT, "dcp").title == "torch distributed checkpoint"


def test_items_of_one_name_have_one_place():
    places = {library.item.item: library.item for library in LIBRARIES if library.item}
    assert len(places) == len([library for library in LIBRARIES if library.item])


def test_bound_constants_are_the_numbers_of_the_state():
    assert TUNIX.state is not None
    assert TUNIX.state.optax is not None
    constants = TUNIX.state.optax.bind(NUMBERS).constants
    assert constants["step"] == ("uint32", 4)
    assert constants["opt_state.hyperparams.learning_rate"] == ("float32", 0.5)
    assert constants["opt_state.hyperparams.eps_root"] == ("float32", 0.0)


def test_folder_of_two_items_is_the_step():
    assert TUNIX.item is not None
    assert MAXTEXT.item is not None
    assert TUNIX.item.folder(7, has_state=True) == "7"
    assert TUNIX.item.folder(0) == "0/model_params"
    assert MAXTEXT.item.folder(7, has_state=True) == "7/items"


def test_record_has_the_settings_of_the_optimizer():
    record = NUMBERS.record(["random state"])
    assert (record["step"], record["updates"]) == (5, 4)
    assert record["optimizer"]["peak_lr"] == 1.0


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
