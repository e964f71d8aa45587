"""Inputs of the estimates, and warnings about the context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.models.attention_kernels import ANY_ACCELERATOR, CPU, AttentionFeature, DeviceKind
from prepcli.models.mesh import parse_mesh
from prepcli.models.rules import DEFAULT_RULES
from tests.helpers.tiny_configs import T5
from tests.helpers.training_plans import TINY, load_text
from trainer.planning.memory_estimate import estimate_memory
from trainer.planning.model_shapes import model_of_config
from trainer.planning.step_inputs import (
    ChunkSizes,
    ModelShapes,
    attention_needs,
    chunk_sizes,
    context_warnings,
    step_inputs,
)

MESH = parse_mesh("1,2,4")


def llama(**changes: Any) -> ModelShapes:
    """Return the shapes of a tiny Llama."""
    return model_of_config({**TINY, **changes}).shapes(MESH, DEFAULT_RULES)


def test_step_inputs_have_the_source_length_of_the_recipe(tmp_path: Path):
    model = model_of_config(T5).shapes(MESH, DEFAULT_RULES)
    pairs = ("data.type=json", "data.fields=[a], b", "batch.size=8")
    recipe = load_text(tmp_path, *pairs, "data.source_length=24")
    assert step_inputs(recipe, model, mesh=MESH, rules=DEFAULT_RULES).source_length == 24
    assert (
        step_inputs(
            load_text(tmp_path, *pairs), llama(), mesh=MESH, rules=DEFAULT_RULES
        ).source_length
        == 0
    )


def test_span_corruption_has_the_source_length_of_the_recipe(tmp_path: Path):
    t5 = model_of_config(T5).shapes(MESH, DEFAULT_RULES)
    spans = load_text(
        tmp_path, "data.objective=span_corruption", "data.source_length=40", "batch.size=8"
    )
    assert step_inputs(spans, t5, mesh=MESH, rules=DEFAULT_RULES).source_length == 40


def test_step_inputs_follow_batch_and_dtype(tmp_path: Path):
    recipe = load_text(
        tmp_path,
        "batch.accumulate=2",
        "model.dtype=bfloat16",
        "model.remat_policy=nothing_saveable",
    )
    inputs = step_inputs(recipe, llama(), mesh=MESH, rules=DEFAULT_RULES)
    assert (inputs.micro_batch_size, inputs.local_batch_size, inputs.accumulate) == (4, 2, 2)
    assert (inputs.seq_length, inputs.itemsize, inputs.remat_policy) == (16, 2, "nothing_saveable")
    assert (
        step_inputs(recipe, llama(), mesh=MESH, rules=DEFAULT_RULES, widens_bfloat16=True).itemsize
        == 4
    )


def test_packed_documents_need_segments_and_two_more_columns(tmp_path: Path):
    plain, packed = load_text(tmp_path), load_text(tmp_path, "data.packing=documents")
    needs = [
        attention_needs(recipe, llama(), MESH, DEFAULT_RULES).features for recipe in (plain, packed)
    ]
    assert needs[1] - needs[0] == {AttentionFeature.SEGMENTS}
    inputs, more = (
        step_inputs(recipe, llama(), mesh=MESH, rules=DEFAULT_RULES) for recipe in (plain, packed)
    )
    added = estimate_memory(more).batch - estimate_memory(inputs).batch
    assert added == 4 * 2 * inputs.seq_length * inputs.local_batch_size * inputs.accumulate
    cudnn = load_text(tmp_path, "data.packing=documents", "model.attention_kernel=cudnn")
    with pytest.raises(PrepError, match="does not support segment ids"):
        step_inputs(cudnn, llama(), mesh=MESH, rules=DEFAULT_RULES)


def test_step_inputs_have_a_tile_only_for_tiled_attention(tmp_path: Path):
    tiled = load_text(tmp_path, "model.attention_kernel=blockwise", "model.q_chunk_size=4")
    assert step_inputs(tiled, llama(), mesh=MESH, rules=DEFAULT_RULES).attention_tile == (4, 512)
    assert (
        step_inputs(load_text(tmp_path), llama(), mesh=MESH, rules=DEFAULT_RULES).attention_tile
        is None
    )


@pytest.mark.parametrize(
    ("device", "length", "tile", "head_chunk_size"),
    [
        (CPU, 255, None, 128),
        (CPU, 256, (64, 64), 128),
        (CPU, 1025, (128, 128), 128),
        (ANY_ACCELERATOR, 1024, None, 512),
        (ANY_ACCELERATOR, 1025, (512, 512), 512),
    ],
)
def test_step_inputs_have_sizes_for_the_devices(
    tmp_path: Path,
    device: DeviceKind,
    length: int,
    tile: tuple[int, int] | None,
    head_chunk_size: int,
):
    recipe = load_text(tmp_path, f"data.seq_length={length}", "batch.accumulate=2")
    inputs = step_inputs(recipe, llama(), mesh=MESH, rules=DEFAULT_RULES, device=device)
    assert (inputs.attention_tile, inputs.head_chunk_size) == (tile, head_chunk_size)


@pytest.mark.parametrize("device", [CPU, ANY_ACCELERATOR])
def test_chunk_sizes_of_the_recipe_take_precedence(tmp_path: Path, device: DeviceKind):
    keys = ("model.q_chunk_size=7", "model.k_chunk_size=-1", "model.head_chunk_size=512")
    assert chunk_sizes(load_text(tmp_path, *keys), device, num_rows=2) == ChunkSizes(
        7, -1, head=512
    )


def test_context_warnings_name_too_long_sequences(tmp_path: Path):
    assert list(context_warnings(load_text(tmp_path, "data.seq_length=64"), llama())) == []
    (warning,) = context_warnings(load_text(tmp_path, "data.seq_length=65"), llama())
    assert (
        warning
        == "`data.seq_length` is 65, and the model was made for 64 positions; `model.rope_scaling` extends them"
    )


def test_context_warnings_include_rope_scaling(tmp_path: Path):
    model = llama(
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    )
    assert list(context_warnings(load_text(tmp_path, "data.seq_length=256"), model)) == []
    assert list(context_warnings(load_text(tmp_path, "data.seq_length=257"), model))
