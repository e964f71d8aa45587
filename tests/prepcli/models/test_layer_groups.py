"""Tests of the groups of layers and of the order in which layers are scanned."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.models.layer_config import (
    LayerSchedule,
    group_indices,
    layer_schedule,
    repeating_period,
)
from prepcli.models.param_tree import param_leaves
from prepcli.models.registry import FAMILIES


@given(st.lists(st.sampled_from([0, 3]), min_size=1, max_size=9))
def test_repeating_period_is_shortest_prefix(windows: list[int]):
    repeats = [
        n
        for n in range(1, len(windows) + 1)
        if [windows[i % n] for i in range(len(windows))] == windows
    ]
    assert repeating_period(windows) == min(repeats)


@pytest.mark.parametrize(
    ("kinds", "schedule"),
    [
        ("aaaa", LayerSchedule(0, 1, 4)),
        ("bbbaaaaa", LayerSchedule(3, 1, 5)),
        ("babababa", LayerSchedule(0, 2, 4)),
        ("baaaaaaaaaab", LayerSchedule(0, 11, 1)),
        ("aabaabaa", LayerSchedule(0, 3, 2)),
        ("ab", LayerSchedule(0, 2, 1)),
        ("", LayerSchedule(0, 1, 0)),
    ],
)
def test_layer_schedule_compiles_fewest_layers(kinds: str, schedule: LayerSchedule):
    assert layer_schedule(kinds) == schedule


@given(st.lists(st.sampled_from("ab"), max_size=12))
def test_layer_schedule_repeats_its_period(kinds: list[str]):
    schedule = layer_schedule(kinds)
    scanned = kinds[schedule.num_first : schedule.stop]
    assert scanned == scanned[: schedule.period] * schedule.num_periods
    assert schedule.stop <= len(kinds)


def test_group_indices_count_layers_of_each_kind():
    assert group_indices(3, {}) == ({"layers": 0}, {"layers": 1}, {"layers": 2})
    assert group_indices(4, {"dense_layers": (0, 2), "sparse_layers": (1, 3)}) == (
        {"layers": 0, "dense_layers": 0},
        {"layers": 1, "sparse_layers": 0},
        {"layers": 2, "dense_layers": 1},
        {"layers": 3, "sparse_layers": 1},
    )


def test_group_indices_allow_a_layer_in_two_groups_or_in_none():
    assert group_indices(3, {"attention_layers": (1,), "sparse_layers": (1, 2)}) == (
        {"layers": 0},
        {"layers": 1, "attention_layers": 0, "sparse_layers": 0},
        {"layers": 2, "sparse_layers": 1},
    )


# A search through all layers for each layer takes several times as long as this.
MAX_CPU_S = 2.0
MANY_LAYERS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 16000},
    "deepseek_v3": {"num_hidden_layers": 16000, "first_k_dense_replace": 8000},
}


@pytest.mark.parametrize("name", MANY_LAYERS)
def test_time_to_read_layers_is_linear(name: str):
    start = time.process_time()
    arch_config = FAMILIES[name].arch_config(MANY_LAYERS[name])
    assert len(arch_config.layer_kinds) == 16000
    assert len(arch_config.group_indices) == 16000
    assert time.process_time() - start < MAX_CPU_S


def test_time_to_count_sparse_layers_is_linear():
    start = time.process_time()
    config = MANY_LAYERS["deepseek_v3"]
    param_leaves(FAMILIES["deepseek_v3"], config, tied=False)
    assert time.process_time() - start < MAX_CPU_S
