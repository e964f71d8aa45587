"""Plans of drafts: rows of the vocabulary, values of an adapter, and the order of the settings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prepcli.engine.casts import Cast, LowRankUpdate
from prepcli.engine.fills import fill_of
from prepcli.models.mesh import parse_mesh
from prepcli.models.registry import family_of
from prepcli.models.rules import DEFAULT_RULES
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Plan, Stream
from prepcli.sources.source import Source, SourceTensor, stored_rows
from prepcli.sources.tensor_match import detect_names
from prepcli.targets.orbax_item import OrbaxLayout, Partitioning
from prepcli.targets.planner import Draft, make_plan, start_draft, with_rows, with_tied_head
from prepcli.targets.safetensors_folder import place_safetensors
from tests.helpers.plans import flat
from tests.helpers.tiny_checkpoints import GPT2, LLAMA, checkpoint_tensors

ROWS = LLAMA["vocab_size"]
EMBEDDING = "embed_tokens.weight"
QUERY = "layers.0.self_attn.q_proj.weight"


def source_of(config: dict[str, Any]) -> Source:
    """Return a source with the float32 tensors of a model, one after another in a file."""
    family = family_of(config)
    arrays = checkpoint_tensors(config, "float32", family.is_tied(config), legacy=False)
    names = detect_names(family, config, full_names=arrays)
    tensors, offset = [], 8
    for name, array in arrays.items():
        place = (flat("float32", array.shape, offset),)
        tensors.append(SourceTensor(names.bare_name(name), "float32", array.shape, place))
        offset += tensors[-1].nbytes
    files = (Path("m/model.safetensors"),)
    return Source("m", Path("m"), family, config, names, tuple(tensors), files, (), (), None)


def draft_of(config: dict[str, Any], dtype: str | None = None) -> Draft:
    source = source_of(config)
    return start_draft(source, stored_rows(source), dtype=dtype)


def folder_plan(draft: Draft) -> Plan:
    placed = place_safetensors(draft, 10**9)
    return make_plan(draft, placed, command="export", request="export m", name="m")


def streams_of(plan: Plan, name: str) -> list[Stream]:
    return [stream for stream in plan.streams if stream.name == name]


@pytest.mark.parametrize("rows", [ROWS, ROWS + 5])
def test_new_rows_follow_the_stored_ones(rows: int):
    plan = folder_plan(with_rows(draft_of(LLAMA), rows))
    kinds = [
        (s.rows, fill.kind if (fill := fill_of(s)) else "read") for s in streams_of(plan, EMBEDDING)
    ]
    expected = [((0, ROWS), "read"), ((ROWS, ROWS + 5), "zeros")]
    assert kinds == expected[: 1 + (rows > ROWS)]
    assert plan.settings.config["vocab_size"] == rows
    assert plan.settings.vocab == {"true": ROWS, "padded": rows}


def test_cast_draft_writes_the_requested_dtype():
    plan = folder_plan(draft_of(LLAMA, "bfloat16"))
    assert {stream.operations for stream in plan.streams} == {(Cast("bfloat16"),)}
    assert plan.write_nbytes == plan.read_nbytes // 2


def test_tied_head_is_read_a_second_time():
    source = with_tied_head(source_of(GPT2))
    draft = start_draft(source, stored_rows(source), kept={"lm_head.weight"})
    plan = folder_plan(draft)
    assert "lm_head.weight" in {tensor.name for tensor in draft.tensors}
    (head,) = streams_of(plan, "lm_head.weight")
    (embedding,) = streams_of(plan, "wte.weight")
    assert embedding.reads[0].position[0] == 0
    assert head.reads[0].position == (1, embedding.reads[0].position[1])


def test_adapter_changes_the_true_rows_only():
    draft = with_rows(draft_of(LLAMA), ROWS + 5)
    width = LLAMA["hidden_size"]
    place = (flat("bfloat16", (ROWS, width), 8, file=1),)
    whole = SourceTensor(EMBEDDING, "bfloat16", (ROWS, width), place)
    a = Stream("a", "float32", (2, width), (0, 2), (flat("float32", (2, width), file=1),), ())
    b = Stream("b", "float32", (width, 2), (0, width), (flat("float32", (width, 2), file=1),), ())
    update = LowRankUpdate(a, b, 0.5)
    plan = folder_plan(
        replace(draft, updates={QUERY: update}, replaced={EMBEDDING: whole}, digested=(a, b))
    )
    true_rows, new_rows = streams_of(plan, EMBEDDING)
    assert (true_rows.dtype, true_rows.operations) == ("bfloat16", (Cast("float32"),))
    assert (true_rows.reads, new_rows.reads) == (whole.placement, ())
    assert [stream.operations for stream in streams_of(plan, QUERY)] == [(update, Cast("float32"))]
    assert plan.streams[:2] == (a, b)


def test_settings_have_the_order_of_earlier_versions():
    """The digest of a plan depends on it, and finished outputs record the digest."""
    draft = replace(draft_of(LLAMA), settings=Manifest(added_tokens=None))
    folder = ["name", "kind", "family", "vocab", "prefixed", "tied", "config", "added_tokens"]
    assert list(folder_plan(draft).settings) == folder
    partitioning = Partitioning(parse_mesh("1,2,1"), DEFAULT_RULES)
    placed = OrbaxLayout(partitioning).place(draft)
    plan = make_plan(draft, placed, command="save-init", request="save-init m", name="m")
    layout = ["layout", "mesh", "rules", "scan", "scan_axis", "prefixed", "tied", "config"]
    assert list(plan.settings) == [*folder[:4], *layout, "added_tokens"]
    assert sum(math.prod(leaf.grid.shape) for leaf in plan.leaves) * 4 == plan.write_nbytes
