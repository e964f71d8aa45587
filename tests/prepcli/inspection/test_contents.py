"""Views of an inspection: places of tensors, numbers of parameters, names as a tree, and shards."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.formats.orbax import find_item
from prepcli.inspection.contents import (
    MAX_PATH_PARTS,
    TreeNode,
    build_tree,
    name_path,
    read_contents,
    tree_rows,
)
from prepcli.inspection.shard_map import draw_shard_map
from prepcli.models.mesh import parse_mesh
from prepcli.models.partition import partition_spec
from prepcli.models.rules import PARAM_RULES, merge_rules
from prepcli.planning.arrays import whole_array
from prepcli.sources.locate import locate
from prepcli.sources.open_folder import OpenFolder
from prepcli.sources.source import SourceTensor, stored_tensor
from prepcli.stores.paths import local_copy
from tests.helpers.golden_flax import FOLDER, decode_msgpack
from tests.helpers.memory_stores import store_of
from tests.helpers.orbax_items import read_files
from tests.helpers.tiny_checkpoints import checkpoint_tensors, write_checkpoint
from tests.helpers.tiny_configs import GOLDEN

PIECES = FOLDER / "llama/pieces.msgpack"


def test_first_place_of_an_array_in_pieces_is_in_its_file():
    contents = read_contents(locate(str(PIECES)))
    data = PIECES.read_bytes()
    arrays = {".".join(path): value for path, value in decode_msgpack(data, "flax").items()}
    assert len(contents.entries) > 5
    for entry in contents.entries:
        place = contents.first_place(entry)
        assert place is not None
        name, offset = place
        assert name == PIECES.name
        first = arrays[entry.name].reshape(-1)[:1].tobytes()
        assert data[offset : offset + len(first)] == first


def test_first_place_of_every_tensor_is_its_first_element(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    values = {"a": rng.random((3, 4), np.float32), "b.c": rng.random(5)}
    Path("m").mkdir()
    save_file(values, "m/model.safetensors")
    prep.save_init("m", "item", verbatim=True)
    for folder in ("m", "item"):
        contents = read_contents(locate(folder))
        found = 0
        for entry in contents.entries:
            place = contents.first_place(entry)
            assert place is not None
            data = local_copy(contents.folder / place[0]).read_bytes()
            key = entry.name.removeprefix("params.")
            if key in values:
                first = values[key].reshape(-1)[:1].tobytes()
                assert data[place[1] : place[1] + len(first)] == first
                found += 1
        assert found == len(values)


def test_first_places_in_a_store_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    save_file({"a": np.ones((3, 4), np.float32), "b.c": np.ones(5)}, "m/model.safetensors")
    prep.save_init("m", "item", verbatim=True)
    for folder in ("m", "item"):
        located = locate(folder)
        local = read_contents(located)
        root, _ = store_of(read_files(Path(folder)))
        stored = read_contents(
            replace(located, files=OpenFolder(folder, root), item=find_item(root))
        )
        places = [stored.first_place(entry) for entry in stored.entries]
        assert places == [local.first_place(entry) for entry in local.entries]


def test_name_path_splits_names_of_many_dots():
    path = name_path(stored_tensor(whole_array("a." * 100 + "b", "int8", (), (0, 0))))
    assert len(path) == MAX_PATH_PARTS
    assert ".".join(path) == "a." * 100 + "b"


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_model_of_another_kind_has_values(capsys: pytest.CaptureFixture[str]):
    """The config of Chronos-2 states the type of T5. Only two of these tensors have names of T5."""
    shapes = {
        "shared.weight": (2, 4),
        "encoder.final_layer_norm.weight": (4,),
        "encoder.block.0.layer.0.self_attention.q.weight": (4, 4),
        "input_patch_embedding.hidden_layer.weight": (8, 6),
    }
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    write_checkpoint(Path("m"), GOLDEN["t5"], tensors)
    result = prep.inspect("./m")
    assert result.parameters is None
    assert main(["inspect", "./m"]) == 0
    out = capsys.readouterr().out
    assert f"{sum(tensor.size for tensor in tensors.values())} values" in out
    assert "not the tensors of t5: encoder.block.0.layer.0." in out


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_parameters_of_a_family_are_counted(family: str):
    tensors = checkpoint_tensors(GOLDEN[family], "float32", tied=False, legacy=False)
    write_checkpoint(Path("m"), GOLDEN[family], tensors)
    assert prep.inspect("./m").parameters == sum(tensor.size for tensor in tensors.values())


def test_prediction_layers_are_no_parameters():
    config = GOLDEN["glm4_moe"] | {"num_nextn_predict_layers": 1}
    tensors = checkpoint_tensors(config, "float32", tied=False, legacy=False)
    count = sum(tensor.size for tensor in tensors.values())
    tensors[f"model.layers.{config['num_hidden_layers']}.input_layernorm.weight"] = np.ones(
        3, np.float32
    )
    write_checkpoint(Path("m"), config, tensors)
    prep.save_init("./m", "init")
    assert prep.inspect("./m").parameters == prep.inspect("init").parameters == count


def entry(name: str, *shape: int, dtype: str = "float32") -> SourceTensor:
    return stored_tensor(whole_array(name, dtype, shape, (0, 0)))


def lines(*entries: SourceTensor) -> list[str]:
    return [" | ".join(part for part in row if part) for row in tree_rows(build_tree(entries))]


def test_tree_merges_equal_layers_in_any_order() -> None:
    layers = [entry(f"h.{i}.{name}.weight", 2, 2) for i in range(12) for name in ("q", "k")]
    layers[2], layers[3] = layers[3], layers[2]
    assert lines(*layers) == [
        "h.{0..11} | 384 bytes",
        *(f"  {n}.weight | 12 x [2, 2] | float32 | 192 bytes" for n in "qk"),
    ]


def test_tree_separates_layers_of_another_shape_or_dtype() -> None:
    rows = lines(
        entry("h.0.w", 2), entry("h.1.w", 2), entry("h.2.w", 3), entry("h.3.w", 2, dtype="int32")
    )
    assert rows == [
        "h | 36 bytes",
        "  {0,1}.w | 2 x [2] | float32 | 16 bytes".replace("0,1", "0..1"),
        "  2.w | [3] | float32 | 12 bytes",
        "  3.w | [2] | int32 | 8 bytes",
    ]


def test_tree_merges_alternating_layers_into_two_groups() -> None:
    rows = lines(*(entry(f"h.{i}.w", 2 + i % 2) for i in range(20)))
    assert rows == [
        "h | 200 bytes",
        "  {0,2,4,…,18}.w | 10 x [2] | float32 | 80 bytes",
        "  {1,3,5,…,19}.w | 10 x [3] | float32 | 120 bytes",
    ]


def test_tree_multiplies_experts_within_layers() -> None:
    rows = lines(*(entry(f"h.{i}.experts.{j}.w", 2) for i in range(3) for j in range(4)))
    assert rows == ["h.{0..2}.experts.{0..3}.w | 12 x [2] | float32 | 96 bytes"]


def test_tree_shows_a_tensor_whose_name_is_a_prefix() -> None:
    assert lines(entry("a", 1), entry("a.b", 2)) == [
        "a | 12 bytes",
        "  (itself) | [1] | float32 | 4 bytes",
        "  b | [2] | float32 | 8 bytes",
    ]


def test_tree_does_not_merge_noncanonical_numbers() -> None:
    assert [line.split()[0] for line in lines(entry("h.00", 1), entry("h.²", 1), entry(f"h.{'9' * 5000}", 1))] == [
        "h", "00", "²", "9" * 5000,
    ]  # fmt: skip


NAMES = st.lists(st.sampled_from(["a", "b", "0", "1", "2", "3", ""]), min_size=1, max_size=4).map(
    ".".join
)


@given(st.dictionaries(NAMES, st.integers(0, 3), max_size=12))
def test_tree_contains_all_tensors(sizes: dict[str, int]) -> None:
    entries = [entry(name, size) for name, size in sizes.items()]
    nodes = build_tree(entries)
    assert sum(node.tensors for node in nodes) == len(entries)
    assert sum(node.nbytes for node in nodes) == sum(item.nbytes for item in entries)
    assert sorted(name for node in nodes for name in expand_names(node, "")) == sorted(sizes)


def expand_names(node: TreeNode, before: str) -> list[str]:
    """Return the names of a node's tensors. Number lists are short enough here to be complete."""
    names = [f"{before}{label}" for label in expand_label(node.name)]
    if node.name == "(itself)":
        names = [before[:-1]]
    return (
        names
        if node.dtype
        else [
            full
            for name in names
            for child in node.children
            for full in expand_names(child, f"{name}.")
        ]
    )


def expand_label(name: str) -> list[str]:
    head, braces, rest = name.partition("{")
    if not braces:
        return [name]
    runs, _, tail = rest.partition("}")
    numbers = [
        n
        for run in runs.split(",")
        for n in range(int(run.split("..")[0]), int(re.split(r"\.\.", run)[-1]) + 1)
    ]
    return [f"{head}{n}{end}" for n in numbers for end in expand_label(tail)]


def draw_lines(
    dims: str, shape, mesh: str, dtype="float32", rules=PARAM_RULES, name="leaf"
) -> list[str]:
    grid = parse_mesh(mesh)
    leaf_spec = partition_spec([(dim,) for dim in dims.split()], shape, grid, rules)
    return draw_shard_map(name, shape, dtype, leaf_spec, grid).split("\n")


def test_draw_shows_the_first_and_last_of_many_columns():
    lines = draw_lines("vocab embed", (32000, 5120), "1,64,4", "bfloat16")
    assert lines[2] == " 0:80                 × 62                 5040:5120"
    assert lines[4] == "│ 0                  │ …                  │ 252                │  0:8000"
    assert (
        lines[-2] == "│ 3                  │ …                  │ 255                │  24000:32000"
    )


def test_draw_omits_rows_between_first_and_last():
    lines = draw_lines("embed", (4096,), "1,128,1")
    assert lines[3::2] == [
        "│ 0                  │  0:32",
        "│ …                  │  × 126",
        "│ 127                │  4064:4096",
    ]


def test_draw_shows_up_to_64_cells():
    assert len(draw_lines("embed", (4096,), "1,64,1")) == 2 + 2 * 64 + 1
    assert len(draw_lines("embed", (4160,), "1,65,1")) == 2 + 2 * 3 + 1


def test_draw_shows_copies_and_names_whole_dims():
    lines = draw_lines("layers heads head_dim embed", (32, 32, 128, 4096), "2,2,2")
    assert lines[:3] == [
        "leaf  [32, 32, 128, 4096] float32  P(None, mp, None, fsdp)",
        "  512 MiB per device, 2 copies",
        "heads down; embed across; whole: layers, head_dim",
    ]
    assert lines[-4:] == [
        "│ 0,4                │ 2,6                │  0:16",
        "├────────────────────┼────────────────────┤",
        "│ 1,5                │ 3,7                │  16:32",
        "└────────────────────┴────────────────────┘",
    ]


def test_draw_omits_columns_without_room_for_ranges():
    assert (
        draw_lines("norm embed", (8, 4096), "1,8,1")[2]
        == " 0:512                × 6                  3584:4096"
    )
    assert draw_lines("norm embed", (8, 800), "1,8,1")[2].split() == [
        f"{i * 100}:{i * 100 + 100}" for i in range(8)
    ]


def test_draw_never_omits_one_of_two_parts():
    lines = draw_lines("norm embed", (8, 2 * 10**12), "1,2,1")
    assert lines[2] == " 0:1000000000000      1000000000000:20000…"
    assert lines[4] == "│ 0                  │ 1                  │"


def test_draw_shows_a_lone_last_dim_horizontally():
    lines = draw_lines("layers mlp embed", (4, 8, 4096), "1,2,1")
    assert lines[1:] == [
        "embed across; whole: layers, mlp",
        " 0:2048               2048:4096",
        "┌────────────────────┬────────────────────┐",
        "│ 0                  │ 1                  │",
        "└────────────────────┴────────────────────┘",
    ]


@pytest.mark.parametrize(("dims", "shape"), [("norm", (32,)), ("", ())])
def test_draw_shows_an_unpartitioned_leaf_as_one_cell(dims, shape):
    lines = draw_lines(dims, shape, "2,4,8")
    assert lines[0].endswith("per device, 64 copies")
    assert lines[1:] == [
        "┌────────────────────┐",
        "│ 0-63               │",
        "└────────────────────┘",
    ]


def test_draw_counts_devices_that_do_not_fit_a_cell():
    lines = draw_lines("mlp", (64,), "dp:1,fsdp:32,mp:2")
    assert lines[3] == "│ 0…62 ×32           │  0:32"


def test_draw_shows_the_first_part_of_a_third_dim():
    lines = draw_lines(
        "experts mlp embed", (8, 14336, 4096), "2,4,2", rules=merge_rules(["experts=dp"]).params
    )
    assert lines[1] == "mlp down; embed across; experts in 2 parts over dp, this is 0:4"
    assert [int(n) for line in lines[4::2] for n in re.findall(r"│ (\d+) ", line)] == [
        0,
        2,
        4,
        6,
        1,
        3,
        5,
        7,
    ]


@given(
    st.text("abcdefgh.", min_size=1, max_size=120),
    st.tuples(*[st.sampled_from([1, 2, 3, 8, 64, 256])] * 3).filter(
        lambda sizes: math.prod(sizes) <= 2048
    ),
    st.lists(st.integers(1, 10**9), min_size=3, max_size=3),
    st.sampled_from(["vocab embed", "layers heads embed", "experts mlp embed"]),
)
def test_draw_fits_80_columns_with_aligned_rows(name, sizes, multiples, dims):
    shape = tuple(m * 768 for m in multiples[: len(dims.split())])
    lines = draw_lines(
        dims, shape, ",".join(map(str, sizes)), rules=merge_rules(["experts=dp"]).params, name=name
    )
    assert all(0 < len(line) <= 80 for line in lines)
    frame = [line for line in lines if line[0] in "┌├└"]
    rows = [line for line in lines if line[0] == "│"]
    assert (
        {len(line) for line in frame} == {line.rindex("│") + 1 for line in rows} == {len(frame[0])}
    )
    assert len(rows) * (rows[0].count("│") - 1) <= 64
