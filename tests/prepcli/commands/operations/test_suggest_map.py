"""Suggested maps between two checkpoints convert bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import prepcli as prep
from prepcli.commands.operations import suggest_map
from prepcli.commands.operations.docs import docs_folder
from tests.helpers.foreign_names import write_foreign_folder
from tests.helpers.hf_folders import write_hf_folder
from tests.helpers.run_cli import run_failing, run_json, run_ok
from tests.helpers.tiny_checkpoints import GPT2, LLAMA, assert_same, make_checkpoint, read_tensors


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_suggested_map_converts(source: str, target: str) -> None:
    """Convert a checkpoint by the suggested map, and compare the result with the target by the safetensors library."""
    suggestion = prep.suggest_map(source, target, "suggested.map")
    text = Path("suggested.map").read_text()
    # Tensors of the source that the target does not have are dropped.
    Path("suggested.map").write_text(text.replace("# drop ", "drop "))
    assert suggestion.unmatched == (), text
    run_ok("save-init", source, "--map", "suggested.map", "--out", "mapped")
    run_ok("export", "mapped", "--out", "mapped-hf")
    assert_same(read_tensors(Path("mapped-hf")), read_tensors(Path(target)))


@pytest.mark.parametrize("layout", ["tunix", "easylm", "hf-flax"])
def test_suggested_map_leads_from_layouts_of_llama_to_hugging_face(layout: str):
    make_checkpoint(Path("llama"), LLAMA)
    run_ok("export", "llama", "--layout", layout, "--out", "other")
    assert_suggested_map_converts("other", "llama")


def test_json_names_the_group_as_errors_do(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("llama"), LLAMA)
    assert run_json(capsys, "map", "suggest", "llama", "llama")["command"] == "map"


def test_suggested_map_divides_fused_tensors():
    make_checkpoint(Path("llama"), LLAMA)
    write_foreign_folder(Path("own"), read_tensors(Path("llama")))
    assert_suggested_map_converts("own", "llama")


def test_guide_shows_a_suggested_map(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("llama-hf"), LLAMA)
    write_foreign_folder(Path("own"), read_tensors(Path("llama-hf")))
    run_failing(capsys, 1, "map", "suggest", "own", "llama-hf")
    guide = (docs_folder() / "how-to" / "map.md").read_text()
    assert f"```text\n{Path('own.map').read_text()}```\n" in guide


def test_suggested_map_leads_to_the_names_of_an_output(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("llama"), LLAMA)
    write_foreign_folder(Path("own"), read_tensors(Path("llama")))
    run_ok("save-init", "llama", "--out", "init")
    suggestion = prep.suggest_map("own", "init")
    assert suggestion.unmatched == ()
    assert "family llama\n" in Path("own.map").read_text()
    error = run_failing(capsys, 2, "map", "suggest", "init", "llama")
    assert "init needs no map" in error


def test_suggested_map_fuses_tensors():
    make_checkpoint(Path("llama"), LLAMA)
    write_foreign_folder(Path("own"), read_tensors(Path("llama")))
    tensors = read_tensors(Path("own"))
    del tensors["rotary.inv_freq"]
    write_hf_folder(Path("target"), {"model.safetensors": tensors})
    assert_suggested_map_converts("llama", "target")


def orbax_leaves(item: Path) -> dict[str, np.ndarray]:
    """Restore an item with Orbax, and return its leaves by dotted name."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(item.absolute())
    leaves: dict[str, np.ndarray] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(tree):
        leaves[".".join(str(getattr(key, "key", key)) for key in path)] = np.asarray(value)
    return leaves


def test_suggested_map_leads_from_hugging_face_to_tunix():
    make_checkpoint(Path("llama"), LLAMA, dtype="bfloat16")
    run_ok("export", "llama", "--layout", "tunix", "--out", "tunix")
    suggestion = prep.suggest_map("llama", "tunix", "suggested.map")
    assert suggestion
    run_ok("save-init", "llama", "--map", "suggested.map", "--out", "mapped")
    run_ok("export", "mapped", "--out", "mapped-hf")
    (item,) = (path.parent for path in Path("tunix").rglob("_METADATA"))
    assert_same(read_tensors(Path("mapped-hf")), orbax_leaves(item))


def test_suggested_map_leads_from_fused_gpt2_to_flax_and_back():
    make_checkpoint(Path("gpt2"), GPT2)
    run_ok("export", "gpt2", "--layout", "hf-flax", "--out", "flax")
    assert_suggested_map_converts("flax", "gpt2")


def test_scaled_tensors_of_maxtext_are_not_matched():
    make_checkpoint(Path("llama"), LLAMA)
    run_ok("export", "llama", "--layout", "maxtext-unscanned", "--out", "maxtext")
    suggestion = prep.suggest_map("maxtext", "llama", "suggested.map")
    queries = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)]
    assert list(suggestion.unmatched) == queries
    assert len(suggestion.unused) == 3
    assert suggestion.targets == 27


def test_suggested_map_stacks_experts_and_layers():
    random = np.random.default_rng(0)
    shape = (3, 4, 5, 6)
    stacked = random.standard_normal(shape).astype(np.float32)
    layers = {f"l.{layer}.experts": stacked[layer] for layer in range(3)}
    target = {
        f"h.{layer}.e.{expert}.w": np.ascontiguousarray(stacked[layer, expert].T)
        for layer in range(3)
        for expert in range(4)
    }
    write_hf_folder(Path("source"), {"model.safetensors": layers})
    write_hf_folder(Path("target"), {"model.safetensors": target})
    assert_suggested_map_converts("source", "target")
    assert len(prep.suggest_map("source", "target", "suggested.map", overwrite=True).rows) == 1
    run_ok("save-init", "target", "--out", "unused")
    suggestion = prep.suggest_map("target", "source", "back.map")
    assert suggestion.rows == ("l.{n3}.experts: n4 d5 d6 <- h.{n3}.e.{n4}.w: d6 d5",)


def test_suggested_map_stacks_scalars():
    random = np.random.default_rng(0)
    betas = random.standard_normal(3).astype(np.float32)
    weights = random.standard_normal((3, 4, 5)).astype(np.float32)
    target: dict[str, np.ndarray] = {}
    for layer in range(3):
        target[f"h.{layer}.beta"] = np.array(betas[layer])
        # As in Apertus, where all layers begin with the same value.
        target[f"h.{layer}.eps"] = np.full((), 0.5, np.float32)
        target[f"h.{layer}.w"] = weights[layer]
    source = {"beta": betas, "eps": np.full(3, 0.5, np.float32), "w": weights}
    write_hf_folder(Path("source"), {"model.safetensors": source})
    write_hf_folder(Path("target"), {"model.safetensors": target})
    assert_suggested_map_converts("source", "target")
    suggestion = prep.suggest_map("target", "source", "back.map")
    assert suggestion, suggestion
    assert len(suggestion.rows) == 3


@pytest.mark.parametrize(
    ("dtype", "target_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_suggested_map_relates_values_after_a_cast(dtype: str, target_dtype: str):
    make_checkpoint(Path("wide"), LLAMA)
    tensors = read_tensors(Path("wide"))
    write_foreign_folder(Path("own"), _cast_all(tensors, dtype))
    make_checkpoint(Path("llama"), LLAMA)
    # The target has the values of the source, each cast once.
    cast = _cast_all(_cast_all(tensors, dtype), target_dtype)
    for path in Path("llama").glob("*.safetensors*"):
        path.unlink()
    save_file(cast, "llama/model.safetensors", {"format": "pt"})
    suggestion = prep.suggest_map("own", "llama", "suggested.map")
    assert (suggestion.unmatched, suggestion.cast_to) == ((), target_dtype)
    text = Path("suggested.map").read_text()
    assert f"# Values are equal after a cast: --dtype {target_dtype}." in text
    Path("suggested.map").write_text(text.replace("# drop ", "drop "))
    words = ("--map", "suggested.map", "--dtype", target_dtype, "--out", "mapped")
    run_ok("save-init", "own", *words)
    run_ok("export", "mapped", "--out", "mapped-hf")
    assert_same(read_tensors(Path("mapped-hf")), cast)


def _cast_all(tensors: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return {name: tensor.astype(kind) for name, tensor in tensors.items()}


def test_equal_values_are_told_apart_by_names_and_listed():
    ones = np.ones((2, 4), np.float32)
    source = {f"layer_{kind}.{layer}.scale": ones[0] for kind in "ab" for layer in range(2)}
    target = {f"blocks.{layer}.{kind}.w": ones[0] for kind in "ab" for layer in range(2)}
    source["only.source"] = np.arange(3, dtype=np.float32)
    target["only.target"] = np.arange(5, dtype=np.float32)
    write_hf_folder(Path("source"), {"model.safetensors": source})
    write_hf_folder(Path("target"), {"model.safetensors": target})
    suggestion = prep.suggest_map("source", "target")
    assert not suggestion
    assert suggestion.path == Path("source.map")
    assert suggestion.unmatched == ("only.target",)
    assert suggestion.unused == ("only.source",)
    assert suggestion.rows == (
        "blocks.{n2}.a.w: d4 <- layer_a.{n2}.scale: d4",
        "blocks.{n2}.b.w: d4 <- layer_b.{n2}.scale: d4",
    )
    assert len(suggestion.ambiguous) == 4
    text = Path("source.map").read_text()
    assert "# no tensor has the values of only.target" in text
    assert "# drop only.source" in text


def test_numbers_other_than_the_first_ones_are_an_index_list():
    random = np.random.default_rng(0)
    values = {number: random.standard_normal((3, 2)).astype(np.float32) for number in (1, 4, 7)}
    source = {f"a.{number}.w": value for number, value in values.items()}
    target = {f"b.{number}.w": np.ascontiguousarray(value.T) for number, value in values.items()}
    write_hf_folder(Path("source"), {"model.safetensors": source})
    write_hf_folder(Path("target"), {"model.safetensors": target})
    assert_suggested_map_converts("source", "target")
    assert "size numbers1 = 1,4,7" in Path("suggested.map").read_text()


def test_layers_of_two_shapes_have_two_rows():
    random = np.random.default_rng(0)
    source: dict[str, np.ndarray] = {}
    target: dict[str, np.ndarray] = {}
    for layer, width in enumerate((4, 4, 6, 6)):
        value = random.standard_normal((3, width)).astype(np.float32)
        source[f"h.{layer}.w"] = value
        target[f"layers.{layer}.w"] = np.ascontiguousarray(value.T)
    write_hf_folder(Path("source"), {"model.safetensors": source})
    write_hf_folder(Path("target"), {"model.safetensors": target})
    assert_suggested_map_converts("source", "target")


def test_two_numbers_of_one_name_have_their_own_atoms():
    random = np.random.default_rng(0)
    source: dict[str, np.ndarray] = {}
    target: dict[str, np.ndarray] = {}
    for block in range(2):
        for layer in range(2):
            value = random.standard_normal((3, 4)).astype(np.float32)
            source[f"b.{block}.l.{layer}.w"] = value
            target[f"block.{block}.layer.{layer}.w"] = np.ascontiguousarray(value.T)
    write_hf_folder(Path("source"), {"model.safetensors": source})
    write_hf_folder(Path("target"), {"model.safetensors": target})
    assert_suggested_map_converts("source", "target")
    (row,) = prep.suggest_map("source", "target", "again.map").rows
    assert row == "block.{n2}.layer.{n2_2}.w: d4 d3 <- b.{n2}.l.{n2_2}.w: d3 d4"


def test_suggested_map_of_many_equal_and_unused_tensors_is_short(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suggest_map, "MAX_COMMENTS", 4)
    monkeypatch.setattr(suggest_map, "MAX_ROWS", 1)
    zeros = {f"h.{layer}.b": np.zeros(4, np.float32) for layer in range(9)}
    unused = {f"u.{layer}.b": np.full(3, layer, np.float32) for layer in range(9)}
    write_hf_folder(Path("source"), {"model.safetensors": zeros | unused})
    write_hf_folder(Path("target"), {"model.safetensors": zeros})
    suggestion = prep.suggest_map("source", "target")
    assert [*map(len, suggestion.ambiguous.values())] == [6] * 9
    lines = Path("source.map").read_text().splitlines()
    assert [line for line in lines if line.startswith("# drop")] == [
        f"# drop u.{i}.b" for i in range(4)
    ]
    assert lines.count("# 5 more") == 2
    words = {f"h.{word}": np.full(2, ord(word), np.float32) for word in "abc"}
    write_hf_folder(Path("words"), {"model.safetensors": words})
    with pytest.raises(prep.PrepError, match="the map of words needs 3 rows"):
        prep.suggest_map("words", "words")


def test_command_reports_an_incomplete_map(capsys: pytest.CaptureFixture[str]):
    write_hf_folder(Path("a"), {"model.safetensors": {"x": np.arange(4.0), "y": np.arange(3.0)}})
    write_hf_folder(Path("b"), {"model.safetensors": {"z": np.arange(4.0)}})
    words = ("map", "suggest", "a", "b")
    error = run_failing(capsys, 1, *words)
    assert "the map a.map is not complete" in error
    assert "y has no row" in error
    result = run_json(capsys, *words)
    assert result["rows"] == ["z: d4 <- x: d4"]
    write_hf_folder(Path("c"), {"model.safetensors": {"z": np.ones(7)}})
    error = run_failing(capsys, 1, "map", "suggest", "a", "c")
    assert "no tensor of a has the values of c" in error
    Path("a.map").write_text("mine")
    assert "a.map already exists" in run_failing(capsys, 1, *words)
