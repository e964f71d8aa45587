"""The memory estimate as a table and as fields."""

from __future__ import annotations

from dataclasses import replace

from prepcli.models.memory_estimate import estimate_memory
from tests.prepcli.models.test_memory_estimate import LLAMA_13B, make_inputs
from trainer.planning.training_plan import memory_fields, memory_table

RUN_13B = make_inputs(
    "llama", LLAMA_13B, "1,8,4", micro_batch_size=16, seq_length=32768, itemsize=2
)


def test_memory_table_shows_the_attention_scores():
    lines = memory_table(RUN_13B, estimate_memory(RUN_13B), "80.00 GiB").splitlines()
    assert any(
        " ".join(line.split()) == "of it scores [2, 10, 32768, 32768] 80.00 GiB" for line in lines
    )
    assert any(line.startswith("saved by 40 layers (remat none)") for line in lines)
    assert lines[-1].split() == ["available", "80.00", "GiB"]


def test_memory_table_has_no_available_row_without_devices():
    assert "available" not in memory_table(RUN_13B, estimate_memory(RUN_13B))


def test_memory_table_shows_the_scores_of_a_tile():
    tiled = replace(RUN_13B, attention_tile=(512, 1024))
    text = " ".join(memory_table(tiled, estimate_memory(tiled)).split())
    assert "of it scores [2, 10, 512, 1024] 40.0 MiB" in text


def test_memory_fields_state_whether_the_step_fits():
    estimated = estimate_memory(RUN_13B)
    assert memory_fields(estimated, estimated.peak)["fits"] is True
    assert memory_fields(estimated, estimated.peak - 1)["fits"] is False
    assert memory_fields(estimated, None)["fits"] is None
