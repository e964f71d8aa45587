"""Suggested maps between two checkpoints convert bit by bit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import prepcli as prep
from prepcli.commands.operations import suggest_map
from prepcli.commands.operations.about import docs_folder
from tests.helpers.damage import flip_bit
from tests.helpers.foreign_names import CONFIG, FAMILY_MAP, stacked_tensors, write_foreign_folder
from tests.helpers.hf_folders import write_hf_folder
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_json, run_ok
from tests.helpers.tiny_checkpoints import LLAMA, assert_same, make_checkpoint, read_tensors


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


def write_folder(folder: str, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a folder without the names of a family."""
    write_hf_folder(Path(folder), {"model.safetensors": tensors}, CONFIG)


def test_suggested_map_leads_from_tunix_to_hugging_face():
    make_checkpoint(Path("llama"), LLAMA)
    run_ok("export", "llama", "--layout", "tunix", "--out", "other")
    assert_suggested_map_converts("other", "llama")


def test_permuted_rows_of_easylm_are_not_matched():
    make_checkpoint(Path("llama"), LLAMA)
    run_ok("export", "llama", "--layout", "easylm", "--out", "other")
    suggestion = prep.suggest_map("other", "llama", "suggested.map")
    permuted = [f"model.layers.{i}.self_attn.{part}_proj.weight" for i in range(3) for part in "kq"]
    assert list(suggestion.unmatched) == permuted
    assert suggestion.ambiguous == {}


def test_json_names_the_group_as_errors_do(capsys: Capture):
    make_checkpoint(Path("llama"), LLAMA)
    assert run_json(capsys, "map", "suggest", "llama", "llama")["command"] == "map"


def test_suggested_map_of_fused_tensors_is_completed_by_hand():
    make_checkpoint(Path("llama"), LLAMA)
    write_foreign_folder(Path("own"), read_tensors(Path("llama")))
    suggestion = prep.suggest_map("own", "llama")
    assert suggestion.targets == 9
    assert suggestion.unused == (
        "gate_up",
        "h.0.qkv",
        "h.1.qkv",
        "h.2.qkv",
        "norms",
        "rotary.inv_freq",
    )
    text = Path("own.map").read_text()
    assert text.count("# no tensor has the values of model.layers.1.") == 7
    assert "# drop h.2.qkv\n" in text
    fused = [
        line for line in FAMILY_MAP.splitlines() if re.search("- (norms|h.*qkv|gate_up):", line)
    ]
    Path("own.map").write_text("\n".join([text, "size side = 2", "drop rotary.*", *fused, ""]))
    run_ok("save-init", "own", "--map", "own.map", "--out", "mapped")
    run_ok("export", "mapped", "--out", "mapped-hf")
    assert_same(read_tensors(Path("mapped-hf")), read_tensors(Path("llama")))


def test_guide_shows_a_suggested_map(capsys: Capture):
    make_checkpoint(Path("llama-hf"), LLAMA)
    tensors = stacked_tensors(read_tensors(Path("llama-hf")))
    norms = [tensors.pop(f"h.{kind}_norm") for kind in ("input", "post_attention")]
    write_folder("stacked", tensors | {"h.norms": np.stack(norms, axis=1)})
    run_failing(capsys, 1, "map", "suggest", "stacked", "llama-hf")
    guide = (docs_folder() / "how-to" / "map.md").read_text()
    suggested = Path("stacked.map").read_text()
    assert f"```text\n{suggested}```\n" in guide
    added = guide.partition("Replace the comments by rows")[2].split("```")[1].removeprefix("text")
    Path("stacked.map").write_text(suggested + added)
    run_ok("save-init", "stacked", "--map", "stacked.map")
    run_ok("verify", "stacked-init", "llama-hf")


def test_suggested_map_leads_to_the_names_of_an_output(capsys: Capture):
    make_checkpoint(Path("llama"), LLAMA)
    write_folder("own", stacked_tensors(read_tensors(Path("llama"))))
    run_ok("save-init", "llama", "--out", "init")
    assert prep.suggest_map("own", "init")
    assert "family llama\n" in Path("own.map").read_text()
    error = run_failing(capsys, 2, "map", "suggest", "init", "llama")
    assert "init needs no map" in error


def test_scaled_tensors_of_maxtext_are_not_matched():
    make_checkpoint(Path("llama"), LLAMA)
    run_ok("export", "llama", "--layout", "maxtext-unscanned", "--out", "maxtext")
    suggestion = prep.suggest_map("maxtext", "llama", "suggested.map")
    queries = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)]
    assert list(suggestion.unmatched) == queries
    assert len(suggestion.unused) == 3
    assert suggestion.targets == 27


def test_stack_without_one_of_its_layers_is_not_matched():
    values = np.random.default_rng(0).standard_normal((4, 5, 6)).astype(np.float32)
    target = {f"h.{layer}.w": values[layer] for layer in range(3)}
    write_hf_folder(Path("source"), {"model.safetensors": {"w": values, "x": values[0, 0]}})
    write_hf_folder(Path("target"), {"model.safetensors": target | {"y": values[0, 0]}})
    suggestion = prep.suggest_map("source", "target")
    assert suggestion.rows == ("y: d6 <- x: d6",)
    assert (suggestion.unused, len(suggestion.unmatched)) == (("w",), 3)


def test_stacks_of_other_orders_and_words_have_fixed_indices():
    values = np.random.default_rng(0).standard_normal((3, 5, 6)).astype(np.float32)
    target = {
        "gate.w": values[0].T.copy(),
        "up.w": values[1].T.copy(),
        "down.w": values[2].T.copy(),
    }
    numbered = {f"h.{index}.w": values[2 - index] for index in range(3)}
    source = {"mlp": values, "reversed": values + 1, "one": values[:1] + 2}
    numbered = {name: value + 1 for name, value in numbered.items()}
    write_hf_folder(Path("source"), {"model.safetensors": source})
    write_hf_folder(Path("target"), {"model.safetensors": target | numbered | {"w": values[0] + 2}})
    assert_suggested_map_converts("source", "target")
    rows = prep.suggest_map("source", "target", "again.map").rows
    assert "up.w: d6 d5 <- mlp: f3=1 d5 d6" in rows
    assert "h.0.w: d5 d6 <- reversed: f3=2 d5 d6" in rows
    assert "w: d5 d6 <- one: 1 d5 d6" in rows


def test_suggested_map_relates_values_after_a_cast():
    make_checkpoint(Path("llama"), LLAMA)
    tensors = read_tensors(Path("llama"))
    write_folder("own", stacked_tensors(tensors))
    cast = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    for path in Path("llama").glob("*.safetensors*"):
        path.unlink()
    save_file(cast, "llama/model.safetensors", {"format": "pt"})
    suggestion = prep.suggest_map("own", "llama", "suggested.map")
    assert (suggestion.unmatched, suggestion.cast_to) == ((), "bfloat16")
    text = Path("suggested.map").read_text()
    assert "# Values are equal after a cast: --dtype bfloat16." in text
    Path("suggested.map").write_text(text.replace("# drop ", "drop "))
    run_ok("save-init", "own", "--map", "suggested.map", "--dtype", "bfloat16", "--out", "mapped")
    run_ok("export", "mapped", "--out", "mapped-hf")
    assert_same(read_tensors(Path("mapped-hf")), cast)


def test_equal_values_are_listed_and_not_guessed():
    ones = np.ones((2, 4), np.float32)
    source = {f"layer_{kind}.{layer}.scale": ones[0] for kind in "ab" for layer in range(2)}
    target = {f"blocks.{layer}.{kind}.w": ones[0] for kind in "ab" for layer in range(2)}
    only = {"only.source": np.arange(3.0), "same.name": ones[0], "w": np.arange(6.0), "tied": ones}
    other = {"only.target": np.arange(5.0), "same.name": ones[0], "v": np.arange(6.0)}
    # The slices of a stack are equal, and two targets have the values of one source.
    other |= {"head": ones, "embed": ones, "l.0": ones[0] * 2, "l.1": ones[0] * 2}
    write_hf_folder(Path("source"), {"model.safetensors": source | only | {"l": ones * 2}})
    write_hf_folder(Path("target"), {"model.safetensors": target | other})
    suggestion = prep.suggest_map("source", "target")
    assert not suggestion
    assert suggestion.rows == ("same.name: d4 <- same.name: d4", "v: d6 <- w: d6")
    expected = {name: tuple(source) for name in target}
    expected |= {"embed": ("tied",), "head": ("tied",), "l.0": ("l",), "l.1": ("l",)}
    assert {name: tuple(sorted(names)) for name, names in suggestion.ambiguous.items()} == expected
    assert suggestion.unmatched == tuple(sorted({*expected, "only.target"}))
    assert suggestion.unused == tuple(sorted({*source, "l", "only.source", "tied"}))
    text = Path("source.map").read_text()
    assert "# head has no row: its values occur several times, also in tied\n" in text
    assert "# no tensor has the values of only.target\n# drop only.source\n" in text


def test_unequal_values_of_equal_shapes_have_no_row():
    values = np.random.default_rng(0).standard_normal((3, 6, 6)).astype(np.float32)
    changed = values.copy()
    changed[2, 5, 5] = np.nextafter(changed[2, 5, 5], 9)
    # Equal bytes in another shape, another dtype, and another permutation are no row.
    source = {
        "a": values,
        "b": changed[2].T.copy(),
        "c": values.reshape(4, 27) + 1,
        "z": values[0] - 1,
    }
    target = {f"h.{layer}": changed[layer] for layer in range(3)} | {
        "i": values[2].view(np.int32).copy(),
        "c": values.reshape(9, 12) + 1,
        "p": values[0][::-1] - 1,
    }
    write_hf_folder(Path("source"), {"model.safetensors": source})
    write_hf_folder(Path("target"), {"model.safetensors": target})
    assert prep.suggest_map("source", "target").rows == ("h.2: d6_2 d6 <- b: d6 d6_2",)


def random_array(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def transposed(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.T)


STACK = random_array(0, 3, 4, 5, 6)
BETAS = random_array(0, 3)
WIDTHS = (4, 4, 6, 6)
CELLS = [(block, layer) for block in range(2) for layer in range(2)]
# Source, target, and the suggested rows.
PAIRS: dict[str, tuple[dict[str, np.ndarray], dict[str, np.ndarray], tuple[str, ...]]] = {
    "experts and layers": (
        {f"l.{layer}.experts": STACK[layer] for layer in range(3)},
        {f"h.{i // 4}.e.{i % 4}.w": transposed(STACK[i // 4, i % 4]) for i in range(12)},
        ("h.{n3}.e.{n4}.w: d6 d5 <- l.{n3}.experts: n4 d5 d6",),
    ),
    "scalars": (
        {"beta": BETAS},
        {f"h.{layer}.beta": np.array(BETAS[layer]) for layer in range(3)},
        ("h.{n3}.beta: <- beta: n3",),
    ),
    "numbers other than the first ones": (
        {f"a.{number}.w": random_array(number, 3, 2) for number in (0, 4, 7)},
        {f"b.{number}.w": transposed(random_array(number, 3, 2)) for number in (0, 4, 7)},
        ("b.{n3@numbers1}.w: d2 d3 <- a.{n3@numbers1}.w: d3 d2",),
    ),
    "stack of numbers other than the first ones": (
        {"a": STACK[0, :3]},
        {f"b.{number}.w": transposed(STACK[0, i]) for i, number in enumerate((1, 4, 70))},
        ("b.{n3@numbers1}.w: d6 d5 <- a: n3 d5 d6",),
    ),
    "two numbers of one name": (
        {f"b.{i}.l.{j}.w": STACK[i, j] for i, j in CELLS},
        {f"block.{i}.layer.{j}.w": transposed(STACK[i, j]) for i, j in CELLS},
        ("block.{n2}.layer.{n2_2}.w: d6 d5 <- b.{n2}.l.{n2_2}.w: d5 d6",),
    ),
    "layers of two shapes": (
        {f"h.{layer}.w": random_array(layer, 3, width) for layer, width in enumerate(WIDTHS)},
        {
            f"l.{layer}.w": transposed(random_array(layer, 3, width))
            for layer, width in enumerate(WIDTHS)
        },
        (
            "l.{n2@numbers1}.w: d6 d3 <- h.{n2@numbers1}.w: d3 d6",
            "l.{n2}.w: d4 d3 <- h.{n2}.w: d3 d4",
        ),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_suggested_rows_convert_and_have_few_atoms(name: str):
    source, target, rows = PAIRS[name]
    write_hf_folder(Path("source"), {"model.safetensors": source})
    write_hf_folder(Path("target"), {"model.safetensors": target})
    assert_suggested_map_converts("source", "target")
    assert prep.suggest_map("source", "target", "again.map").rows == rows
    back = tuple(" <- ".join(reversed(row.split(" <- "))) for row in rows)
    assert prep.suggest_map("target", "source", "back.map").rows == back


def test_suggested_map_of_many_equal_and_unused_tensors_is_short(monkeypatch: MonkeyPatch):
    monkeypatch.setattr(suggest_map, "MAX_COMMENTS", 4)
    monkeypatch.setattr(suggest_map, "MAX_ROWS", 1)
    zeros = {f"h.{layer}.b": np.zeros(4, np.float32) for layer in range(9)}
    unused = {f"u.{layer}.b": np.full(3, layer, np.float32) for layer in range(9)}
    write_hf_folder(Path("source"), {"model.safetensors": zeros | unused})
    renamed = {name.replace("h", "l"): value for name, value in zeros.items()}
    write_hf_folder(Path("target"), {"model.safetensors": renamed})
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


def test_hostile_names_and_shapes_are_listed_or_mapped():
    values = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    long = "x" * 900
    source = {
        "h.01.w": values[0],
        "h.02.w": values[1],
        "h.0.h0": values + 1,
        "h.1.h1": values + 2,
        "h.99999999999.w": values + 3,
        "h.5.w": values + 4,
        long: values + 5,
        "scalar": np.array(7, np.float32),
        "deep": (values + 8).reshape((1,) * 30 + (2, 4)),
        "empty": np.zeros((0, 4), np.float32),
        "a:b": values + 9,
    }
    target = {f"t.{name}" if len(name) < 900 else name: value for name, value in source.items()}
    write_hf_folder(Path("source"), {"model.safetensors": source})
    write_hf_folder(Path("target"), {"model.safetensors": target})
    suggestion = prep.suggest_map("source", "target")
    assert (suggestion.unmatched, suggestion.unused) == (("t.empty",), ("empty",))
    for name in (long, "a:b", "empty"):
        del source[name]
    for name in (long, "t.a:b", "t.empty"):
        del target[name]
    write_hf_folder(Path("source2"), {"model.safetensors": source})
    write_hf_folder(Path("target2"), {"model.safetensors": target})
    assert_suggested_map_converts("source2", "target2")


def test_hostile_numbers_of_slices_and_shapes_are_bounded(monkeypatch: MonkeyPatch):
    monkeypatch.setattr(suggest_map, "MAX_STACK", 8)
    monkeypatch.setattr(suggest_map, "MAX_VIEWS", 40)
    monkeypatch.setattr(suggest_map, "MAX_BATCH", 5)
    random = np.random.default_rng(0)
    long, *short = (random.standard_normal((n, 4)).astype(np.float32) for n in (9, 6, 7, 8, 5))
    source = {"long": long} | {f"short.{index}": values for index, values in enumerate(short)}
    target: dict[str, np.ndarray] = {}
    for name, values in source.items():
        target |= {f"{name}.row.{row}": values[row] for row in range(len(values))}
    write_hf_folder(Path("source"), {"model.safetensors": source})
    write_hf_folder(Path("target"), {"model.safetensors": target})
    suggestion = prep.suggest_map("source", "target")
    # Of the stacks, the first four have 26 slices. The long one is no stack.
    assert suggestion.unused == ("long",)
    monkeypatch.setattr(suggest_map, "MAX_VIEWS", 20)
    suggestion = prep.suggest_map("source", "target", overwrite=True)
    assert len(suggestion.unused) > 1
    assert suggestion.rows


def test_damaged_tensor_is_not_compared(capsys: Capture):
    values = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    write_hf_folder(Path("model"), {"model.safetensors": {"w": values}})
    write_hf_folder(Path("target"), {"model.safetensors": {"v": values.T.copy()}})
    run_ok("save-init", "model", "--out", "init")
    run_ok("export", "init", "--out", "source")
    (file,) = Path("source").glob("*.safetensors")
    flip_bit(file, -1)
    assert "(w) in source is damaged" in run_failing(
        capsys, 1, "map", "suggest", "source", "target"
    )


def test_command_reports_an_incomplete_map(capsys: Capture):
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
