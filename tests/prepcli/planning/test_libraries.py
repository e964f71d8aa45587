"""The table of other libraries agrees with the rows of the families and with the option `layout`."""

from __future__ import annotations

from typing import get_args

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
    find_library,
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
