"""Values that conversions make: rounding by `--dtype`, and rows of padding."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.operations.options import PadVocabOptions
from prepcli.commands.operations.pad_vocab import make_fill, padded_size
from prepcli.core.errors import FAILED, USAGE, PrepError
from prepcli.core.option_spec import with_defaults
from prepcli.engine.fills import Fill, numpy_dtype
from prepcli.models.registry import FAMILIES
from prepcli.sources.source import Source
from prepcli.sources.tensor_match import TensorNames, Vocabulary
from tests.helpers.llama_trees import read_output
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    GPT2,
    GPT_NEO,
    LLAMA,
    assert_same,
    checkpoint_tensors,
    make_checkpoint,
    read_tensors,
    same_bits,
    write_checkpoint,
)


def run_json_quiet(capsys: Capture, *args: str, code: int = 0) -> dict[str, Any]:
    """Run a command and return its JSON."""
    capsys.readouterr()
    assert main([*args, "--json", "-q"]) == code
    return json.loads(capsys.readouterr().out)


def cast_with_numpy(tensors: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Cast each tensor with NumPy."""
    return {name: value.astype(numpy_dtype(dtype)) for name, value in tensors.items()}


def sorted_bits(tensors: Mapping[str, np.ndarray]) -> list[bytes]:
    """Return the sorted bits of each bfloat16 tensor, without names and places."""
    return sorted(np.sort(array.view(np.uint16), axis=None).tobytes() for array in tensors.values())


def with_outliers(values: list[float]) -> dict[str, np.ndarray]:
    """Make a checkpoint `outliers`, in which the final norm starts with these values."""
    tensors = make_checkpoint(Path("m"), LLAMA)
    changed = {name: value.copy() for name, value in tensors.items()}
    changed["model.norm.weight"][: len(values)] = values
    write_checkpoint(Path("outliers"), json.loads(Path("m/config.json").read_text()), changed)
    return changed


CASES = [(base, dtype) for base in (GPT2, GPT_NEO, LLAMA) for dtype in ("bfloat16", "float16")]


@pytest.mark.parametrize(("base", "dtype"), slow_except(CASES, [(LLAMA, "float16")]))
def test_save_init_and_export_cast_identically(base: dict[str, Any], dtype: str):
    tensors = make_checkpoint(Path("m"), base)
    run_ok(
        "save-init",
        "./m",
        "--dtype",
        dtype,
        "--mesh",
        "1,2,2",
        "--pad-vocab",
        "8",
        "--out",
        "early",
    )
    run_ok("verify", "early")
    run_ok("export", "early", "--out", "one")
    run_ok("save-init", "./m", "--pad-vocab", "8", "--out", "late", "--no-scan")
    run_ok("export", "late", "--dtype", dtype, "--out", "two")
    for folder in ("one", "two"):
        assert_same(read_tensors(Path(folder)), cast_with_numpy(tensors, dtype))
        assert json.loads(Path(folder, "config.json").read_text())["torch_dtype"] == dtype
        run_ok("verify", folder)
    run_ok("verify", "one", "two")
    run_ok("verify", "early", "two")


@pytest.mark.parametrize("source", slow_except(["bfloat16", "float16"], ["bfloat16"]))
def test_cast_to_float32_and_back_is_exact(source: str, capsys: Capture):
    tensors = make_checkpoint(Path("m"), GPT2, source)
    run_ok("save-init", "./m", "--dtype", "float32")
    report = run_json_quiet(capsys, "export", "m-init", "--dtype", source)
    assert_same(read_tensors(Path("m-hf")), tensors)
    assert report["accounting"]["changed_values"] == 0
    run_ok("verify", "m-hf", "./m")


def test_changed_values_are_counted_in_the_manifest(capsys: Capture):
    tensors = make_checkpoint(Path("m"), LLAMA)
    values = sum(tensor.size for tensor in tensors.values())
    changed = sum(
        int((cast_with_numpy({"": t}, "bfloat16")[""].astype(np.float32) != t).sum())
        for t in tensors.values()
    )
    planned = run_json_quiet(capsys, "save-init", "./m", "--dtype", "bfloat16", "--dry-run")
    assert planned["casts"] == [
        {"from": "float32", "to": "bfloat16", "tensors": len(tensors), "values": values}
    ]
    assert planned["accounting"]["changed_values"] is None
    for already in (False, True):
        report = run_json_quiet(capsys, "save-init", "./m", "--dtype", "bfloat16")
        (entry,) = report["casts"]
        assert report["already"] is already
        assert (entry["values"], entry["changed"]) == (values, changed)
        assert report["accounting"]["changed_values"] == changed
        assert 0 < entry["worst"] <= 2**-8
        assert entry["overflowed"] == entry["underflowed"] == entry["nan"] == 0
    assert planned["plan_digest"] == report["plan_digest"]
    assert json.loads(Path("m-init/prep-manifest.json").read_text())["casts"] == [entry]


def test_closing_line_counts_changed_values(capsys: Capture):
    make_checkpoint(Path("m"), LLAMA)
    assert main(["save-init", "./m", "--dtype", "float16"]) == 0
    stderr = capsys.readouterr().err
    assert "float32 -> float16: 30 tensors, " in stderr
    assert "largest relative error 0.0" in stderr
    assert " 0 values changed" not in stderr
    assert main(["save-init", "./m", "--out", "plain"]) == 0
    assert " 0 values changed" in capsys.readouterr().err


def test_overflow_is_an_error_unless_allowed(capsys: Capture):
    tensors = with_outliers([65519.0, -65520.0, 1e30, np.inf, np.nan, 1e-9])
    assert main(["save-init", "./outliers", "--dtype", "float16", "-q"]) == 1
    stderr = capsys.readouterr().err
    assert "error: 2 values of model.norm.weight are too large for float16" in stderr
    assert "why: its largest value is 65504" in stderr
    assert "--allow-overflow" in stderr
    assert not Path("outliers-init").exists()
    # The allowed run resumes the refused one.
    report = run_json_quiet(
        capsys, "save-init", "./outliers", "--dtype", "float16", "--allow-overflow"
    )
    (entry,) = report["casts"]
    assert (entry["overflowed"], entry["underflowed"], entry["nan"]) == (2, 1, 1)
    run_ok("export", "outliers-init", "--out", "back")
    with np.errstate(over="ignore"):
        assert_same(read_tensors(Path("back")), cast_with_numpy(tensors, "float16"))


def test_infinite_source_values_are_not_overflow(capsys: Capture):
    with_outliers([1e30])
    run_ok("save-init", "./outliers", "--dtype", "float16", "--allow-overflow", "--out", "allowed")
    # A value that was infinite before does not count as overflow.
    assert main(["export", "allowed", "--dtype", "bfloat16", "-q"]) == 0
    assert main(["save-init", "./outliers", "--dtype", "bfloat16", "-q"]) == 0  # 1e30 fits


@pytest.mark.parametrize(
    "options", slow_except([["--workers", "2"], ["--memory", "32MiB"]], [["--memory", "32MiB"]])
)
def test_cast_counts_do_not_depend_on_workers_or_memory(options: list[str]):
    make_checkpoint(Path("m"), GPT2, vocab_size=997)
    run_ok("save-init", "./m", "--dtype", "bfloat16", "--out", "a")
    run_ok("save-init", "./m", "--dtype", "bfloat16", "--out", "b", *options)
    assert Path("a/prep-manifest.json").read_bytes() == Path("b/prep-manifest.json").read_bytes()


@pytest.mark.parametrize("init", slow_except(["zeros", "mean", "normal"], ["mean"]))
def test_padding_has_the_output_dtype(init: str):
    tensors = make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--dtype", "bfloat16", "--pad-vocab", "8", "--init", init)
    run_ok("export", "m-init", "--keep-padding", "--out", "back")
    actual = read_tensors(Path("back"))["lm_head.weight"]
    head = tensors["lm_head.weight"]
    assert same_bits(actual[:131], head.astype(actual.dtype))
    if init == "zeros":
        assert not actual[131:].astype(np.float32).any()
    elif init == "mean":
        mean = head.astype(np.float64).mean(axis=0).astype(np.float32).astype(actual.dtype)
        assert all(same_bits(row, mean) for row in actual[131:])
    run_ok("verify", "m-init")


def test_hf_folder_is_cast_into_hf_folder():
    tensors = make_checkpoint(Path("m"), LLAMA, "float16")
    run_ok("export", "./m", "--dtype", "bfloat16", "--out", "cast")
    wide = {name: value.astype(np.float32) for name, value in tensors.items()}
    assert_same(read_tensors(Path("cast")), cast_with_numpy(wide, "bfloat16"))
    assert json.loads(Path("cast/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert main(["export", "./m", "--out", "same", "-q"]) == 2  # nothing to do


@pytest.mark.parametrize(
    ("base", "layout"),
    slow_except(
        [(GPT2, "hf-flax"), (LLAMA, "hf-flax"), (LLAMA, "easylm")],
        [(GPT2, "hf-flax")],
    ),
)
def test_flax_and_easylm_exports_are_cast(base: dict[str, Any], layout: str):
    tensors = make_checkpoint(Path("m"), base)
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--layout", layout, "--dtype", "bfloat16", "--out", "out")
    write_checkpoint(
        Path("cast"),
        json.loads(Path("out/config.json").read_text()),
        cast_with_numpy(tensors, "bfloat16"),
    )
    run_ok("verify", "out")
    run_ok("verify", "out", "./cast")
    # The layouts transpose and reorder values, so the values of each tensor are compared in order of size.
    leaves = read_output(layout, Path("out"))
    cast = cast_with_numpy(tensors, "bfloat16")
    assert sorted_bits(leaves) == sorted_bits(cast)


@pytest.mark.parametrize(
    "keys",
    slow_except(
        [["dtype"], ["torch_dtype"], ["dtype", "torch_dtype"], []],
        [["dtype"], ["dtype", "torch_dtype"]],
    ),
)
def test_config_keeps_its_dtype_keys(keys: list[str]):
    tensors = make_checkpoint(Path("m"), LLAMA)
    config = json.loads(Path("m/config.json").read_text())
    config.pop("torch_dtype")
    write_checkpoint(Path("other"), config | dict.fromkeys(keys, "float32"), tensors)
    run_ok("save-init", "./other", "--dtype", "bfloat16")
    written = json.loads(Path("other-init/hf/config.json").read_text())
    assert written == config | dict.fromkeys(keys or ["torch_dtype"], "bfloat16")


def test_verify_reports_different_dtypes(capsys: Capture):
    make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--dtype", "bfloat16")
    assert main(["verify", "m-init", "./m", "-v"]) == 1
    stderr = capsys.readouterr().err
    assert "params.final_norm.scale (model.norm.weight)  is bfloat16 and float32" in stderr


def test_damaged_source_is_found_during_a_cast(capsys: Capture):
    norm = make_checkpoint(Path("m"), LLAMA)["model.norm.weight"].tobytes()
    run_ok("save-init", "./m")
    data = next(path for path in Path("m-init/d").iterdir() if norm in path.read_bytes())
    content = bytearray(data.read_bytes())
    content[content.index(norm)] ^= 1
    data.write_bytes(content)
    assert main(["export", "m-init", "--dtype", "bfloat16", "-q"]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_unknown_dtype_is_a_usage_error(capsys: Capture):
    make_checkpoint(Path("m"), LLAMA)
    assert main(["save-init", "./m", "--dtype", "float8_e4m3fn", "-q"]) == 2
    assert "--dtype" in capsys.readouterr().err


# `prep pad-vocab`: the number of new rows and their values


FAMILY = FAMILIES["gpt_neo"]


def padded_rows(**values: Any) -> int:
    """Return the padded size of a vocabulary of 131 tokens, stored with 136 rows."""
    options: Any = with_defaults(PadVocabOptions, values)
    return padded_size(options, Vocabulary(131, 136))


def make_source(**config: Any) -> Source:
    return Source("m", Path("m"), FAMILY, config, TensorNames(FAMILY), (), (), (), (), None)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 136),
        ({"multiple": 128}, 256),
        ({"multiple": 131}, 131),
        ({"size": 131}, 131),
        ({"size": 200}, 200),
        ({"mesh": "1,1,4"}, 132),
        ({"mesh": "1,64,4", "multiple": 1000}, 132),
    ],
)
def test_padded_size_starts_from_true_rows(options: dict[str, Any], size: int):
    assert padded_rows(**options) == size


def test_size_below_true_rows_is_rejected():
    with pytest.raises(PrepError, match="size=130") as caught:
        padded_rows(size=130)
    assert caught.value.code == USAGE


@pytest.mark.parametrize("option", [("--multiple", "1000000"), ("--size", "2147483647")])
def test_lack_of_space_is_found_before_work(
    tmp_path: Path, capsys: Capture, monkeypatch: MonkeyPatch, option: tuple[str, str]
):
    def refuse_work(*_: object) -> None:
        raise AssertionError("the coverage check began")

    make_checkpoint(tmp_path / "m", GPT_NEO)
    monkeypatch.setattr("prepcli.planning.coverage.check", refuse_work)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**6))
    err = run_failing(
        capsys, FAILED, "pad-vocab", str(tmp_path / "m"), *option, "--out", str(tmp_path / "out")
    )
    assert err.startswith("error: not enough room for out\n")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_copy_without_new_rows_is_announced(tmp_path: Path, capsys: Capture):
    make_checkpoint(tmp_path / "m", GPT_NEO, vocab_size=128)
    assert (
        main(
            [
                "pad-vocab",
                str(tmp_path / "m"),
                "--multiple",
                "8",
                "--out",
                str(tmp_path / "out"),
                "--dry-run",
            ]
        )
        == 0
    )
    assert re.search(
        r"128 -> 128: nothing to add, the output is a full copy of \S+ \wiB\n",
        capsys.readouterr().err,
    )


def test_make_fill_returns_kind_seed_and_deviation():
    assert make_fill("zeros", 5, make_source()) == Fill("zeros")
    assert make_fill("mean", 5, make_source(initializer_range="odd")) == Fill("mean")
    assert make_fill("normal", 5, make_source()) == Fill("normal", 5, 0.02)
    assert make_fill("normal", 2**64 - 1, make_source(initializer_range=1)) == Fill(
        "normal", 2**64 - 1, 1.0
    )


@pytest.mark.parametrize(
    ("init", "seed", "config", "text", "code"),
    [
        ("ones", 0, {}, "unknown `--init ones`", USAGE),
        ("normal", 2**64, {}, "`--seed 18446744073709551616` is too large", USAGE),
        ("normal", 0, {"initializer_range": None}, "initializer_range is None", FAILED),
        ("normal", 0, {"initializer_range": "0.02"}, "initializer_range is '0.02'", FAILED),
        ("normal", 0, {"initializer_range": -1}, "initializer_range is -1", FAILED),
        ("normal", 0, {"initializer_range": float("nan")}, "initializer_range is nan", FAILED),
    ],
)
def test_make_fill_rejects_invalid_values(
    init: str, seed: int, config: dict[str, Any], text: str, code: int
):
    with pytest.raises(PrepError) as caught:
        make_fill(init, seed, make_source(**config))
    assert text in caught.value.message
    assert caught.value.code == code


@pytest.mark.slow
def test_scalar_and_empty_tensors_are_copied():
    odd = {
        "transformer.h.0.attn.attention.bias": np.zeros((0, 5), np.uint8),
        "transformer.h.1.attn.attention.bias": np.zeros((1, 0), bool),
        "transformer.h.2.attn.attention.masked_bias": np.array(-1e9, np.float32),
        "transformer.h.0.attn.attention.masked_bias": np.zeros((0,), np.float32),
    }
    tensors = checkpoint_tensors(GPT_NEO, "float32", tied=True, legacy=False)
    write_checkpoint(Path("m"), GPT_NEO, {**odd, **tensors})
    assert main(["pad-vocab", "./m", "-q"]) == 0
    actual = read_tensors(Path("m-padded"))
    assert actual.keys() == {*odd, *tensors}
    assert all(same_bits(actual[name], odd[name]) for name in odd)
    assert main(["verify", "m-padded", "-q"]) == 0
    assert main(["save-init", "m-padded", "-q"]) == 0
    assert main(["export", "m-padded-init", "--out", "back", "-q"]) == 0
    assert all(
        same_bits(value, tensors[name]) for name, value in read_tensors(Path("back")).items()
    )


@pytest.mark.parametrize(
    ("heads", "rules"),
    slow_except([(6, " --rule 'heads=mp|none'"), (8, "")], [(6, " --rule 'heads=mp|none'")]),
)
def test_next_command_of_pad_vocab_works(
    heads: int, rules: str, tmp_path: Path, capsys: Capture
) -> None:
    make_checkpoint(tmp_path / "m", GPT_NEO, hidden_size=48, num_heads=heads)
    command = run_json(capsys, "pad-vocab", "./m", "--mesh", "1,1,4")["next"]
    assert command == f"prep save-init m-padded --mesh 1,1,4{rules}"
    run_ok(*shlex.split(command)[1:])


@pytest.mark.parametrize(
    "words",
    [
        ["pad-vocab", "tiny", "--size", str(1 << 31)],
        ["pad-vocab", "tiny", "--multiple", str(1 << 62)],
        ["save-init", "tiny", "--pad-vocab", "9" * 18],
        ["save-init", "tiny", "--pad-vocab", "9" * 30],
        ["save-init", "tiny", "--pad-vocab", "9" * 5000],
    ],
)
def test_huge_vocabulary_is_refused_at_once(words: list[str], capsys: Capture) -> None:
    """It would have a plan of trillions of chunks."""
    make_checkpoint(Path("tiny"))
    err = run_failing(capsys, 2, *words, "--dry-run")
    assert "is too large" in err or "invalid `--pad-vocab 999" in err
    assert len(err) < 400
