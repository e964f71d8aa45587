"""`prep inspect`: table, tree and statistics."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.rendering.inspection import MAX_NON_ARRAYS
from prepcli.formats.orbax import OrbaxNonArray
from prepcli.formats.orbax_chunks import unplaced_array
from tests.helpers.hf_folders import write_hf_folder
from tests.helpers.orbax_items import write_item
from tests.helpers.run_inspect import (
    SMALL_GPT_NEO,
    SMALL_LLAMA,
    Capture,
    inspect_failing,
    inspect_json,
    inspect_lines,
    make_model_and_init,
)
from tests.helpers.tiny_checkpoints import make_checkpoint
from tests.helpers.waiting import MAX_S


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_two_files() -> list[int]:
    """Make a model `m`, and return the data offset of each of its two files."""
    a = {"b.weight": np.ones((2, 3), np.float32), "a.weight": np.ones(5, np.float16)}
    b = {"c": np.ones((), np.int64), "a.bias": np.zeros((100, 4), ml_dtypes.bfloat16)}
    files = {"model-00001-of-00002.safetensors": a, "model-00002-of-00002.safetensors": b}
    folder = write_hf_folder(Path("m"), files)
    return [8 + int.from_bytes((folder / name).read_bytes()[:8], "little") for name in files]


# Table


def test_inspect_lists_a_folder_of_unknown_family(capsys: Capture) -> None:
    first, second = write_two_files()
    lines = inspect_lines(capsys, "m")
    assert lines[:3] == [
        "m  unknown family  412 values  842 bytes bfloat16, float32, float16, int64",
        "safetensors, 2 files, 4 tensors",
        "",
    ]
    assert [line.split() for line in lines[3:]] == [
        ["name", "shape", "dtype", "size", "file", "offset"],
        [
            "b.weight",
            "[2,",
            "3]",
            "float32",
            "24",
            "bytes",
            "model-00001-of-00002.safetensors",
            f"{first}",
        ],
        [
            "a.weight",
            "[5]",
            "float16",
            "10",
            "bytes",
            "model-00001-of-00002.safetensors",
            f"{first + 24}",
        ],
        ["c", "[]", "int64", "8", "bytes", "model-00002-of-00002.safetensors", f"{second}"],
        [
            "a.bias",
            "[100,",
            "4]",
            "bfloat16",
            "800",
            "bytes",
            "model-00002-of-00002.safetensors",
            f"{second + 8}",
        ],
    ]


def test_inspect_fields_locate_each_tensor(capsys: Capture) -> None:
    first, _ = write_two_files()
    report = inspect_json(capsys, "m")
    assert report["tensors"][0] == {
        "name": "b.weight",
        "shape": [2, 3],
        "dtype": "float32",
        "bytes": 24,
        "file": "model-00001-of-00002.safetensors",
        "offset": first,
    }
    for tensor in report["tensors"]:
        data = (Path("m") / tensor["file"]).read_bytes()[tensor["offset"] :][: tensor["bytes"]]
        assert data == {
            "b.weight": b"\0\0\x80?" * 6,
            "a.weight": b"\0<" * 5,
            "c": b"\1" + b"\0" * 7,
        }.get(tensor["name"], b"\0" * 800)
    sizes = [path.stat().st_size for path in Path("m").glob("*.safetensors")]
    expected = {
        "name": "m",
        "files": 2,
        "bytes": sum(sizes),
        "format": "safetensors",
        "family": None,
        "tensors": 4,
    }
    assert report["source"] | expected == report["source"]
    assert (report["source"]["parameters"], report["source"]["values"]) == (None, 412)
    assert report["source"]["dtypes"] == {"bfloat16": 800, "float32": 24, "float16": 10, "int64": 8}


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("file", ["b.weight", "a.weight", "c", "a.bias"]),
        ("name", ["a.bias", "a.weight", "b.weight", "c"]),
        ("size", ["a.bias", "b.weight", "a.weight", "c"]),
    ],
)
def test_inspect_sorts_tensors(capsys: Capture, by: str, names: list[str]) -> None:
    write_two_files()
    assert [
        tensor["name"] for tensor in inspect_json(capsys, "m", "--sort", by)["tensors"]
    ] == names


def test_inspect_selects_by_pattern(capsys: Capture) -> None:
    write_two_files()
    lines = inspect_lines(capsys, "m", "a.*")
    assert [line.split()[0] for line in lines[4:6]] == ["a.weight", "a.bias"]
    assert lines[6:] == ["2 of 4 tensors, 810 bytes"]


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("weight", " hint: did you mean `*weight*`?\n"),
        ("a.wieght", " hint: did you mean `a.weight`?\n"),
        ("zzz", " hint: a pattern of names, such as `*.q.*`\n"),
    ],
)
def test_pattern_without_match_gets_a_suggestion(capsys: Capture, pattern: str, hint: str) -> None:
    write_two_files()
    assert inspect_failing(capsys, "m", pattern) == (
        1,
        f"error: no tensor of m matches `{pattern}`\n{hint}",
    )


def test_parameter_count_ignores_buffers_and_tied_head(capsys: Capture) -> None:
    tensors = make_checkpoint(Path("plain"), SMALL_GPT_NEO)
    head = tensors["transformer.wte.weight"].copy()
    masks = {
        f"transformer.h.{i}.attn.attention.bias": np.ones((1, 1, 6, 6), bool) for i in range(3)
    }
    everything = {**tensors, **masks, "lm_head.weight": head}
    write_hf_folder(Path("m"), {"model.safetensors": everything}, SMALL_GPT_NEO)
    n_parameters = sum(array.size for array in tensors.values())
    n_values = sum(array.size for array in everything.values())
    source = inspect_json(capsys, "m")["source"]
    assert (source["family"], source["parameters"], source["values"]) == (
        "gpt_neo",
        n_parameters,
        n_values,
    )
    assert source["vocab"] == {"true": 13, "padded": 13}
    lines = inspect_lines(capsys, "m")
    assert lines[0].startswith(f"m  gpt_neo  {n_parameters:,} parameters  ")
    assert lines[1] == f"safetensors, 1 file, {len(everything)} tensors; vocabulary 13"
    del everything["transformer.wte.weight"]  # the head alone is the embedding
    write_hf_folder(Path("n"), {"model.safetensors": everything}, SMALL_GPT_NEO)
    assert inspect_json(capsys, "n")["source"]["parameters"] == n_parameters
    shards = inspect_json(capsys, "n", "--shards", "embed.tokens", "--mesh", "1,2,1")["shards"]
    assert (shards["shape"], shards["spec"]) == ([13, 8], "P(None, fsdp)")


def test_inspect_shows_true_vocabulary(capsys: Capture) -> None:
    make_checkpoint(Path("model"), SMALL_GPT_NEO)
    assert main(["pad-vocab", "model", "--out", "padded", "-q"]) == 0
    capsys.readouterr()
    assert inspect_lines(capsys, "padded")[1].endswith("; vocabulary 16 (13 true)")


def test_inspect_names_unknown_model_type(capsys: Capture) -> None:
    write_hf_folder(Path("m"), {"model.safetensors": {"x": np.ones(2)}}, {"model_type": "zamba2"})
    lines = inspect_lines(capsys, "m")
    assert lines[0] == "m  zamba2 (unknown family)  2 values  16 bytes float64"
    assert lines[2] == "names kept as in the file; prep cannot train this architecture"


def test_inspect_warns_about_invalid_config(capsys: Capture) -> None:
    write_hf_folder(Path("m"), {"model.safetensors": {"x": np.ones(2)}}, {"vocab_size": "many"})
    assert main(["inspect", "m"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("warning: config.json is invalid: vocab_size is 'many'")
    assert captured.err.count("\n") == 1
    assert captured.out.splitlines()[4].startswith("x ")


@pytest.mark.parametrize(
    "changes", [{"num_layers": -1}, {"vocab_size": True}, {"num_heads": 0}, {"hidden_size": "x"}]
)
def test_inspect_lists_tensors_with_invalid_config(
    capsys: Capture, changes: dict[str, Any]
) -> None:
    write_hf_folder(Path("m"), {"model.safetensors": {"x": np.ones(2)}}, SMALL_GPT_NEO | changes)
    assert main(["inspect", "m", "-q"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 values" in lines[0]
    assert any(line.startswith("x ") for line in lines)


def test_inspect_rejects_unreadable_folders(capsys: Capture, work_dir: Path) -> None:
    code, message = inspect_failing(capsys, "./nowhere")
    assert (code, message.splitlines()[0]) == (2, "error: `./nowhere` does not exist")
    (work_dir / "notes").mkdir()
    code, message = inspect_failing(capsys, "notes")
    assert (code, message.splitlines()[0]) == (1, "error: `notes` holds no checkpoint")
    write_two_files()
    (work_dir / "m" / "model-00001-of-00002.safetensors").write_bytes(b"\x80\0\0\0\0\0\0\0{")
    code, message = inspect_failing(capsys, "m")
    assert (code, message.splitlines()[0]) == (
        1,
        "error: model-00001-of-00002.safetensors is cut short",
    )


# Orbax


def test_inspect_init_shows_mesh_and_layout(capsys: Capture) -> None:
    tensors = make_model_and_init(capsys, SMALL_LLAMA, "--mesh", "1,2,2")
    n_values = sum(array.size for array in tensors.values())
    lines = inspect_lines(capsys, "init")
    assert (
        lines[0] == f"init  llama  {n_values:,} parameters  {n_values * 4 / 1024:.1f} KiB float32"
    )
    assert lines[1].split("; ") == [
        "Orbax, 1 data file, 12 leaves in 21 chunks",
        "mesh 1,2,2",
        "layout native, layers stacked on axis 0",
        "vocabulary 12",
    ]
    assert lines[3].split() == ["name", "shape", "dtype", "size", "chunk", "chunks"]
    assert lines[4].split() == [
        "params.embed.tokens",
        "[12,",
        "8]",
        "float32",
        "384",
        "bytes",
        "[12,",
        "8]",
        "1",
    ]


def test_inspect_fields_describe_each_leaf(capsys: Capture) -> None:
    tensors = make_model_and_init(capsys, SMALL_LLAMA, "--no-scan", "--mesh", "1,1,2")
    report = inspect_json(capsys, "init")
    expected = {
        "format": "orbax",
        "layout": "native",
        "mesh": "1,1,2",
        "scan": False,
        "scan_axis": 0,
        "others": [],
    }
    assert report["source"] | expected == report["source"]
    leaf = next(
        tensor for tensor in report["tensors"] if tensor["name"] == "params.layers.1.mlp.up.weight"
    )
    assert {key: leaf[key] for key in ("shape", "dtype", "bytes", "chunk", "chunks")} == {
        "shape": [16, 8], "dtype": "float32", "bytes": 512, "chunk": [16, 8], "chunks": 1,
    }  # fmt: skip
    data = (Path("init") / leaf["file"]).read_bytes()[leaf["offset"] :][:512]
    assert data == tensors["model.layers.1.mlp.up_proj.weight"].tobytes()


def test_inspect_reads_a_checkpoint_saved_by_orbax(capsys: Capture, work_dir: Path) -> None:
    tree = {"b": np.arange(6.0).reshape(2, 3), "step": np.int32(7), "text": "hello", "nothing": {}}
    ocp.PyTreeCheckpointer(use_compression=False).save(work_dir / "run" / "12" / "default", tree)
    lines = inspect_lines(capsys, "run")
    assert lines[0] == "run  unknown family  7 values  52 bytes float64, int32"
    assert lines[1].startswith("Orbax, ")
    assert sorted(lines[2:4]) == ["nothing is an empty Dict", "text is the text 'hello'"]
    tensors = {tensor["name"]: tensor for tensor in inspect_json(capsys, "run")["tensors"]}
    assert (tensors["b"]["shape"], tensors["b"]["chunks"], tensors["step"]["shape"]) == (
        [2, 3],
        1,
        [],
    )
    stats = {
        tensor["name"]: tensor["stats"]
        for tensor in inspect_json(capsys, "run", "--stats")["tensors"]
    }
    assert stats["b"] == {"min": 0.0, "max": 5.0, "mean": 2.5, "nan": 0, "inf": 0, "zeros": 1}
    assert stats["step"]["mean"] == 7


# Tree


def test_inspect_limits_listed_non_arrays(capsys: Capture) -> None:
    asides = [OrbaxNonArray((f"empty{number:02d}",), "None") for number in range(40)]
    write_item(
        Path("item"),
        {unplaced_array(("w",), (2,), "float32", (2,)): np.ones(2, np.float32)},
        non_arrays=asides,
    )
    lines = inspect_lines(capsys, "item")
    assert [line for line in lines if "empty" in line] == [
        f"empty{n:02d} is an empty None" for n in range(MAX_NON_ARRAYS)
    ]
    assert f"and {40 - MAX_NON_ARRAYS} more that are not arrays" in lines
    assert len(inspect_json(capsys, "item")["source"]["others"]) == 40


def test_tree_merges_equal_layers(capsys: Capture) -> None:
    make_checkpoint(Path("model"), SMALL_LLAMA, files=2)
    lines = inspect_lines(capsys, "model", "--tree")
    assert [" ".join(line.split()) for line in lines[3:]] == [
        "name shape dtype size",
        "model 5.0 KiB",
        "embed_tokens.weight [12, 8] float32 384 bytes",
        "layers.{0..1} 4.6 KiB",
        "input_layernorm.weight 2 x [8] float32 64 bytes",
        "post_attention_layernorm.weight 2 x [8] float32 64 bytes",
        "self_attn 1.5 KiB",
        "q_proj.weight 2 x [8, 8] float32 512 bytes",
        "k_proj.weight 2 x [4, 8] float32 256 bytes",
        "v_proj.weight 2 x [4, 8] float32 256 bytes",
        "o_proj.weight 2 x [8, 8] float32 512 bytes",
        "mlp 3.0 KiB",
        "gate_proj.weight 2 x [16, 8] float32 1.0 KiB",
        "up_proj.weight 2 x [16, 8] float32 1.0 KiB",
        "down_proj.weight 2 x [8, 16] float32 1.0 KiB",
        "norm.weight [8] float32 32 bytes",
        "lm_head.weight [12, 8] float32 384 bytes",
    ]


def test_tree_handles_deeply_nested_names(capsys: Capture) -> None:
    name = "a." * 5000 + "b"
    write_hf_folder(Path("m"), {"model.safetensors": {name: np.ones(1), "a.c": np.ones(1)}})
    (node,) = inspect_json(capsys, "m", "--tree")["tree"]
    assert [f"a.{child['name']}" for child in node["children"]] in (["a.c", name], [name, "a.c"])


def test_tree_shows_selected_leaves_only(capsys: Capture) -> None:
    make_model_and_init(capsys, SMALL_LLAMA)
    report = inspect_json(capsys, "init", "params.layers.mlp.*", "--tree")
    (node,) = report["tree"]
    assert (node["name"], node["tensors"], node["bytes"]) == ("params.layers.mlp", 3, 3072)
    assert [child["name"] for child in node["children"]] == [
        "gate.weight",
        "up.weight",
        "down.weight",
    ]
    assert len(report["tensors"]) == 3


# Statistics


def test_stats_of_folder_and_init_match_numpy(capsys: Capture) -> None:
    tensors = make_model_and_init(capsys, SMALL_LLAMA, "--mesh", "1,2,2")
    stats = {
        tensor["name"]: tensor["stats"]
        for tensor in inspect_json(capsys, "model", "--stats")["tensors"]
    }
    assert stats.keys() == tensors.keys()
    for name, array in tensors.items():
        expected = {
            "min": float(array.min()),
            "max": float(array.max()),
            "nan": 0,
            "inf": 0,
            "zeros": 0,
        }
        assert stats[name] == expected | {
            "mean": pytest.approx(array.mean(dtype=np.float64), abs=1e-12)
        }
    leaves = {
        tensor["name"]: tensor["stats"]
        for tensor in inspect_json(capsys, "init", "--stats")["tensors"]
    }
    stacked = np.stack([tensors[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(2)])
    assert leaves["params.layers.attn.q.weight"] == {
        "min": float(stacked.min()),
        "max": float(stacked.max()),
        "mean": pytest.approx(stacked.mean(dtype=np.float64), abs=1e-12),
        "nan": 0,
        "inf": 0,
        "zeros": 0,
    }


def test_stats_table_shows_special_values_and_integers(capsys: Capture) -> None:
    x = np.array([math.nan, math.inf, -2, 0, 1.5], ml_dtypes.bfloat16)
    y = np.full(3, math.nan, np.float16)
    write_hf_folder(Path("m"), {"model.safetensors": {"y": y, "x": x, "n": np.array([-5, 2**60])}})
    lines = inspect_lines(capsys, "m", "--stats", "--sort", "name")
    assert [line.split() for line in lines[3:]] == [
        ["name", "shape", "dtype", "min", "max", "mean", "nan", "inf", "zeros"],
        ["n", "[2]", "int64", "-5", "1.15292e+18", "5.76461e+17", "0", "0", "0"],
        ["x", "[5]", "bfloat16", "-2", "1.5", "-0.166667", "1", "1", "1"],
        ["y", "[3]", "float16", "-", "-", "-", "3", "0", "0"],
    ]


def test_stats_report_progress(capsys: Capture) -> None:
    write_hf_folder(Path("m"), {"model.safetensors": {"x": np.ones(1000, np.float32)}})
    assert main(["inspect", "m", "--stats", "--progress", "json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {event["task"] for event in events} == {"inspect"}
    assert (events[-1]["done"], events[-1]["total"]) == (4000, 4000)


# VmHWM is the peak of this program alone. `ru_maxrss` of a child begins with the peak of the forked test process.
PEAK_SCRIPT = (
    "import sys; from pathlib import Path; from prepcli.commands.cli.main import main; code = main(sys.argv[1:]);"
    "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0], file=sys.stderr);"
    "sys.exit(code)"
)


def test_stats_read_large_tensors_in_little_memory(work_dir: Path) -> None:
    n = 200 << 20
    header = json.dumps({"x": {"dtype": "F8_E4M3", "shape": [n], "data_offsets": [0, n]}}).encode()
    (work_dir / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with (work_dir / "model.safetensors").open("r+b") as file:
        file.truncate(8 + len(header) + n)
    peaks = []
    for options in ([], ["--stats"]):
        command = [
            sys.executable,
            "-c",
            PEAK_SCRIPT,
            "inspect",
            str(work_dir),
            "-q",
            "--json",
            *options,
        ]
        process = subprocess.run(command, capture_output=True, text=True, timeout=MAX_S, check=True)
        peaks.append(int(process.stderr))
        (tensor,) = json.loads(process.stdout)["tensors"]
    assert tensor["stats"] == {"min": 0, "max": 0, "mean": 0, "nan": 0, "inf": 0, "zeros": n}
    assert peaks[1] - peaks[0] < 64 << 10  # KiB
