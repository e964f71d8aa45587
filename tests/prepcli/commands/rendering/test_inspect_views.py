"""`prep inspect`: shard maps, diffs to another checkpoint, and options."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from prepcli.commands.cli.main import main
from prepcli.formats.orbax_chunks import unplaced_array
from tests.helpers.hf_folders import write_hf_folder
from tests.helpers.orbax_items import random_array
from tests.helpers.run_cli import run_json
from tests.helpers.run_inspect import (
    SMALL_GPT_NEO,
    SMALL_LLAMA,
    Capture,
    inspect_failing,
    inspect_json,
    inspect_lines,
    make_model_and_init,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import make_checkpoint
from tests.helpers.zarr_items import STORAGE_FORMS, write_zarr_item


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Shards


def test_shards_are_drawn_on_the_stored_mesh(capsys: Capture) -> None:
    make_model_and_init(capsys, SMALL_LLAMA, "--mesh", "1,2,2")
    lines = inspect_lines(capsys, "init", "--shards", "mlp.up")
    assert lines == [
        "params.layers.mlp.up.weight  [2, 16, 8] float32  P(None, mp, fsdp)",
        "  256 bytes per device, 1 copy",
        "mlp down; embed across; whole: layers",
        " 0:4                  4:8",
        "┌────────────────────┬────────────────────┐",
        "│ 0                  │ 2                  │  0:8",
        "├────────────────────┼────────────────────┤",
        "│ 1                  │ 3                  │  8:16",
        "└────────────────────┴────────────────────┘",
    ]
    shards = inspect_json(
        capsys, "init", "--shards", "params.layers.mlp.up.weight", "--mesh", "2,1,4"
    )["shards"]
    assert shards == {
        "leaf": "params.layers.mlp.up.weight",
        "shape": [2, 16, 8],
        "dtype": "float32",
        "mesh": "2,1,4",
        "spec": "P(None, mp, None)",
        "shard": [2, 4, 8],
        "copies": 2,
        "devices": [[[0, 2], [4 * i, 4 * i + 4], [0, 8]] for i in range(4)] * 2,
    }


def test_shards_of_hf_folder_show_the_converted_leaf(capsys: Capture) -> None:
    make_checkpoint(Path("model"), SMALL_LLAMA, "float16")
    shards = inspect_json(capsys, "model", "--shards", "attn.k", "--mesh", "1,1,4")["shards"]
    assert (shards["leaf"], shards["shape"], shards["dtype"]) == (
        "params.layers.attn.k.weight",
        [2, 2, 2, 8],
        "float16",
    )
    assert inspect_lines(capsys, "model", "--shards", "attn.k", "--mesh", "1,1,4")[-1] == (
        "kv_heads 2 stays whole, not split over mp: 2 mod 4 = 2"
    )


def test_shards_select_one_unstacked_layer(capsys: Capture) -> None:
    make_model_and_init(capsys, SMALL_GPT_NEO, "--no-scan")
    shards = inspect_json(capsys, "init", "--shards", "layers.2.attn.q", "--mesh", "1,1,2")[
        "shards"
    ]
    assert (shards["leaf"], shards["shard"]) == ("params.layers.2.attn.q.weight", [1, 4, 8])


def test_shards_need_exactly_one_leaf(capsys: Capture) -> None:
    make_checkpoint(Path("model"), SMALL_GPT_NEO)
    assert inspect_failing(capsys, "model", "--shards", "embed", "--mesh", "1,1,1") == (
        2,
        "error: `embed` matches 2 leaves of model\n"
        "  why: params.embed.tokens, params.embed.positions\n"
        " hint: one of them: `--shards params.embed.tokens`\n",
    )
    code, message = inspect_failing(capsys, "model", "--shards", "embed.tokenz", "--mesh", "1,1,1")
    what, why, hint = message.splitlines()
    assert (code, what) == (2, "error: model has no leaf `embed.tokenz`")
    assert why.startswith("  why: it has params.embed.tokens, params.embed.positions, ")
    assert why.endswith(" and 14 more")
    assert hint == " hint: did you mean `embed.tokens`?"
    # A tied head has no leaf.
    code, message = inspect_failing(capsys, "model", "--shards", "head.weight", "--mesh", "1,1,1")
    assert (code, message.splitlines()[0]) == (2, "error: model has no leaf `head.weight`")


def test_shards_need_a_mesh_that_divides(capsys: Capture) -> None:
    make_checkpoint(Path("model"), SMALL_GPT_NEO)
    assert inspect_failing(capsys, "model", "--shards", "embed.tokens") == (
        2,
        "error: `--shards` requires a mesh\n"
        "  why: model has no mesh in its manifest\n"
        " hint: for example `--mesh 1,2,4`\n",
    )
    code, message = inspect_failing(capsys, "model", "--shards", "embed.tokens", "--mesh", "1,1,2")
    assert (code, message.splitlines()[0]) == (2, "error: vocabulary 13 cannot be split over mp 2")
    code, message = inspect_failing(
        capsys, "model", "--shards", "final_norm.bias", "--mesh", "1,-1,2"
    )
    assert (code, message.splitlines()[0]) == (2, "error: mesh 1,-1,2 has no size for fsdp")


def test_shards_need_known_dims(capsys: Capture, work_dir: Path) -> None:
    ocp.PyTreeCheckpointer(use_compression=False).save(work_dir / "saved", {"x": np.ones(3)})
    assert inspect_failing(capsys, "saved", "--shards", "x", "--mesh", "1,1,1") == (
        1,
        "error: saved was not written by prep\n  why: it has no manifest that describes the dims of its leaves\n"
        " hint: `prep save-init` converts it\n",
    )


def test_shards_of_unknown_family_are_split_by_size(capsys: Capture) -> None:
    tensors = {"x": np.ones((4, 6), np.float32)}
    write_hf_folder(Path("m"), {"model.safetensors": tensors}, {"model_type": "zamba2"})
    lines = inspect_lines(capsys, "m", "--shards", "x", "--mesh", "1,2,2")
    assert lines[0].startswith("params.x  [4, 6] float32  P(fsdp, mp)")


def test_shards_reject_config_of_other_model(capsys: Capture) -> None:
    make_checkpoint(Path("model"), SMALL_GPT_NEO)
    (Path("model") / "config.json").write_text(json.dumps(SMALL_GPT_NEO | {"vocab_size": 14}))
    assert inspect_failing(capsys, "model", "--shards", "embed.tokens", "--mesh", "1,1,1") == (
        1,
        "error: model: transformer.wte.weight has the wrong shape\n"
        "  why: its shape is [13, 8], its config implies [14, 8]\n"
        " hint: are config.json and the weights of one model?\n",
    )


# Differences


def test_diff_lists_differences(capsys: Capture) -> None:
    a = {
        "same": np.ones(2),
        "shape": np.ones((2, 3)),
        "dtype": np.ones(3, np.float32),
        "only a": np.ones(1),
    }
    b = {
        "same": np.zeros(2),
        "shape": np.ones((3, 2)),
        "dtype": np.ones(3, np.int32),
        "only b": np.ones(4),
    }
    write_hf_folder(Path("a"), {"model.safetensors": a})
    write_hf_folder(Path("b"), {"model.safetensors": b})
    assert main(["inspect", "a", "--diff", "b"]) == 1
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == [
        "differs  dtype  [3] float32 -> [3] int32",
        "differs  shape  [2, 3] float64 -> [3, 2] float64",
        "only in a  only a  [1] float64",
        "only in b  only b  [4] float64",
    ]
    assert captured.err == "error: a and b differ in 4 of 5 tensors\n"
    report = inspect_json(capsys, "a", "s*", "--diff", "b", code=1)
    assert report["differences"] == [
        {
            "name": "shape",
            "a": {"shape": [2, 3], "dtype": "float64"},
            "b": {"shape": [3, 2], "dtype": "float64"},
        }
    ]
    assert (report["source"]["name"], report["against"]["name"], report["error"]["code"]) == (
        "a",
        "b",
        1,
    )
    assert inspect_lines(capsys, "a", "same", "--diff", "b") == [
        "no difference in names, shapes and dtypes"
    ]
    assert inspect_failing(capsys, "a", "sane", "--diff", "b") == (
        1,
        "error: no tensor of a and b matches `sane`\n hint: did you mean `same`?\n",
    )


def test_diff_compares_init_with_hf_folder(capsys: Capture) -> None:
    make_model_and_init(capsys, SMALL_GPT_NEO, "--pad-vocab", "8")
    assert main(["inspect", "model", "--diff", "init"]) == 1
    assert (
        capsys.readouterr().out
        == "differs  transformer.wte.weight  [13, 8] float32 -> [16, 8] float32\n"
    )
    assert inspect_json(capsys, "init", "transformer.h.*", "--diff", "model")["differences"] == []


def test_diff_of_two_inits_compares_leaves(capsys: Capture) -> None:
    make_model_and_init(capsys, SMALL_LLAMA)
    assert main(["reshard", "init", "--no-scan", "--mesh", "1,2,2", "--out", "other", "-q"]) == 0
    capsys.readouterr()
    names = [
        difference["name"]
        for difference in inspect_json(capsys, "init", "*attn.q*", "--diff", "other", code=1)[
            "differences"
        ]
    ]
    assert names == [
        "params.layers.attn.q.weight", "params.layers.0.attn.q.weight", "params.layers.1.attn.q.weight",
    ]  # fmt: skip


# Options


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--tree", "--stats"], "`--tree` and `--stats` are different views"),
        (["--shards", "x", "--diff", "y"], "`--shards x` and `--diff y` are different views"),
        (["--mesh", "1,1,1"], "`--mesh` requires `--shards` or `--html`"),
        (["x.*", "--shards", "x", "--mesh", "1,1,1"], "unexpected argument `x.*`"),
        (["--sort", "age"], "invalid value for '--sort'"),
    ],
)
def test_conflicting_inspect_options_are_rejected(
    capsys: Capture, args: list[str], what: str
) -> None:
    code, message = inspect_failing(capsys, "nowhere", *args)
    assert (code, message.splitlines()[0]) == (2, f"error: {what}")


def test_inspect_does_not_draw_too_large_a_mesh(capsys: Capture) -> None:
    make_checkpoint(Path("model"), SMALL_LLAMA)
    lines = inspect_lines(capsys, "model", "--shards", "attn.k", "--mesh", "1048576,1,1")
    assert lines[-1] == "not drawn: the mesh has 1,048,576 devices, a drawing at most 16,384"
    assert (
        inspect_json(capsys, "model", "--shards", "attn.k", "--mesh", "1048576,1,1")["shards"][
            "devices"
        ]
        is None
    )


@pytest.mark.parametrize("view", [(), ("--tree",), ("--stats",)])
def test_inspect_limits_rows(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, view: tuple[str, ...]
) -> None:
    monkeypatch.setattr("prepcli.commands.rendering.inspection.MAX_ROWS", 3)
    make_checkpoint(Path("model"), SMALL_LLAMA)
    lines = inspect_lines(capsys, "model", *view)
    assert lines[-1].endswith("more rows; `-v` shows all, PATTERN selects some")
    assert len(lines) == 2 + 1 + 1 + 3 + 1  # summary, empty line, column names, rows, omitted rows
    assert main(["inspect", "model", *view, "-v"]) == 0
    assert "more rows" not in capsys.readouterr().out
    assert len(inspect_json(capsys, "model", *view)["tensors"]) > 3


def test_inspect_diff_limits_rows(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prepcli.commands.rendering.inspection.MAX_ROWS", 3)
    make_checkpoint(Path("model"), SMALL_LLAMA)
    make_checkpoint(Path("other"), SMALL_GPT_NEO)
    assert main(["inspect", "model", "--diff", "other", "-q"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 3 + 1
    assert len(inspect_json(capsys, "model", "--diff", "other", code=1)["differences"]) > 3


def test_verify_lists_twenty_differences(capsys: Capture) -> None:
    config = SMALL_LLAMA | {"num_hidden_layers": 4}
    make_checkpoint(Path("model"), config)
    make_checkpoint(Path("other"), config, "float16")
    assert main(["verify", "model", "other"]) == 1
    err = capsys.readouterr().err
    assert err.count("differs  ") == 20
    assert "more; `-v` or `--json` lists all" in err
    assert main(["verify", "model", "other", "-v"]) == 1
    assert capsys.readouterr().err.count("differs  ") > 20


FIRST = unplaced_array(("params", "a"), (16, 8), "float32", (4, 8))
SECOND = unplaced_array(("params", "b"), (600,), "int32", (600,))
TREE = {FIRST: random_array("float32", (16, 8)), SECOND: random_array("int32", (600,))}


@pytest.mark.parametrize(
    "number", slow_except(range(len(STORAGE_FORMS)), lambda number: number % 5 == 0)
)
def test_inspect_names_the_file_of_each_first_chunk(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An item in files without OCDBT, with the default compression of Orbax, ended as a bug in prep."""
    write_zarr_item(tmp_path / "item", TREE, STORAGE_FORMS[number])
    assert main(["inspect", str(tmp_path / "item")]) == 0
    entries = run_json(capsys, "inspect", str(tmp_path / "item"))["tensors"]
    for entry in entries:
        if entry["file"] is not None:
            assert entry["offset"] < (tmp_path / "item" / entry["file"]).stat().st_size
    if not STORAGE_FORMS[number].ocdbt:
        assert [entry["file"].startswith(entry["name"]) for entry in entries] == [True, True]
