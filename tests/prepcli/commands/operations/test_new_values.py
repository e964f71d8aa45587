"""Values that conversions make: rounding by `--dtype`, rows of padding, and tied weights."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, USAGE
from prepcli.engine.fills import numpy_dtype
from prepcli.models.registry import family_of
from tests.helpers.damage import flip_bit, tensor_place
from tests.helpers.llama_trees import read_output
from tests.helpers.manifests import changed_manifest
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    FAMILY_CONFIGS,
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
from tests.helpers.torch_checkpoints import write_bin_folder


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


PADDED = ("--mesh", "1,2,2", "--pad-vocab", "8")


@pytest.mark.parametrize("dtype", slow_except(["bfloat16", "float16"], ["float16"]))
def test_save_init_and_export_cast_identically(dtype: str):
    tensors = make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--dtype", dtype, *PADDED, "--out", "early")
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


def test_cast_to_float32_and_back_is_exact(capsys: Capture):
    tensors = make_checkpoint(Path("m"), GPT2, "bfloat16")
    run_ok("save-init", "./m", "--dtype", "float32")
    report = run_json_quiet(capsys, "export", "m-init", "--dtype", "bfloat16")
    assert_same(read_tensors(Path("m-hf")), tensors)
    assert report["accounting"]["changed_values"] == 0
    run_ok("verify", "m-hf", "./m")


def test_changed_values_are_counted_in_the_manifest(capsys: Capture):
    tensors = make_checkpoint(Path("m"), LLAMA)
    values = sum(tensor.size for tensor in tensors.values())
    changed = 0
    for name, cast in cast_with_numpy(tensors, "bfloat16").items():
        changed += int((cast.astype(np.float32) != tensors[name]).sum())
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
    words = ("save-init", "./outliers", "--dtype", "float16", "--allow-overflow")
    report = run_json_quiet(capsys, *words)
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


def test_cast_counts_do_not_depend_on_memory():
    make_checkpoint(Path("m"), GPT2, vocab_size=997)
    run_ok("save-init", "./m", "--dtype", "bfloat16", "--out", "a")
    run_ok("save-init", "./m", "--dtype", "bfloat16", "--out", "b", "--memory", "32MiB")
    assert Path("a/prep-manifest.json").read_bytes() == Path("b/prep-manifest.json").read_bytes()


def test_padding_has_the_output_dtype():
    tensors = make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--dtype", "bfloat16", "--pad-vocab", "8", "--init", "mean")
    run_ok("export", "m-init", "--keep-padding", "--out", "back")
    actual = read_tensors(Path("back"))["lm_head.weight"]
    head = tensors["lm_head.weight"]
    assert same_bits(actual[:131], head.astype(actual.dtype))
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


def test_flax_export_is_cast():
    tensors = make_checkpoint(Path("m"), GPT2)
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--layout", "hf-flax", "--dtype", "bfloat16", "--out", "out")
    cast = cast_with_numpy(tensors, "bfloat16")
    write_checkpoint(Path("cast"), json.loads(Path("out/config.json").read_text()), cast)
    run_ok("verify", "out")
    run_ok("verify", "out", "./cast")
    # The layout transposes and reorders values, so the values of each tensor are compared in order of size.
    leaves = read_output("hf-flax", Path("out"))
    assert sorted_bits(leaves) == sorted_bits(cast)


@pytest.mark.parametrize("keys", [["dtype"], ["dtype", "torch_dtype"], []])
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
    flip_bit(data, data.read_bytes().index(norm))
    assert main(["export", "m-init", "--dtype", "bfloat16", "-q"]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_unknown_dtype_is_a_usage_error(capsys: Capture):
    make_checkpoint(Path("m"), LLAMA)
    assert main(["save-init", "./m", "--dtype", "float8_e4m3fn", "-q"]) == 2
    assert "--dtype" in capsys.readouterr().err


# `prep pad-vocab`: the number of new rows and their values


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ("", 136),
        ("--multiple 128", 256),
        ("--multiple 131", 131),
        ("--size 131", 131),
        ("--mesh 1,1,4", 132),
        ("--mesh 1,64,4", 132),
    ],
)
def test_padded_size_starts_from_true_rows(options: str, size: int, capsys: Capture):
    make_checkpoint(Path("m"), GPT_NEO, vocab_size=136, true_vocab_size=131)
    report = run_json(capsys, "pad-vocab", "./m", *options.split(), "--dry-run")
    assert (report["vocab"]["true"], report["vocab"]["padded"]) == (131, size)


@pytest.mark.parametrize(
    ("options", "config", "text", "code"),
    [
        ("--size 130", {}, "`--size 130`", USAGE),
        ("--init ones", {}, "unknown `--init ones`", USAGE),
        ("--init normal --seed 18446744073709551616", {}, "is too large", USAGE),
        ("--init normal", {"initializer_range": None}, "initializer_range is None", FAILED),
        ("--init normal", {"initializer_range": "0.02"}, "initializer_range is '0.02'", FAILED),
        ("--init normal", {"initializer_range": -1}, "initializer_range is -1", FAILED),
        ("--init normal", {"initializer_range": float("nan")}, "initializer_range is nan", FAILED),
    ],
)
def test_unfit_padding_is_refused(
    options: str, config: dict[str, Any], text: str, code: int, capsys: Capture
):
    make_checkpoint(Path("m"), GPT_NEO, **config)
    assert text in run_failing(capsys, code, "pad-vocab", "./m", *options.split())
    assert not Path("m-padded").exists()


def test_normal_padding_has_the_deviation_of_the_config():
    make_checkpoint(Path("m"), GPT_NEO, initializer_range=1)
    make_checkpoint(Path("plain"), GPT_NEO)
    for folder, deviation in (("m", 1.0), ("plain", 0.02)):
        run_ok("pad-vocab", f"./{folder}", "--size", "500", "--init", "normal")
        rows = read_tensors(Path(f"{folder}-padded"))["transformer.wte.weight"][131:]
        assert rows.std() == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize("option", [("--multiple", "1000000"), ("--size", "2147483647")])
def test_lack_of_space_is_found_before_work(
    capsys: Capture, monkeypatch: MonkeyPatch, option: tuple[str, str]
):
    def refuse_work(*_: object) -> None:
        raise AssertionError("the coverage check began")

    make_checkpoint(Path("m"), GPT_NEO)
    monkeypatch.setattr("prepcli.planning.coverage.check", refuse_work)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**6))
    err = run_failing(capsys, FAILED, "pad-vocab", "./m", *option, "--out", "out")
    assert err.startswith("error: not enough room for out\n")
    assert [path.name for path in Path().iterdir()] == ["m"]


def test_copy_without_new_rows_is_announced(capsys: Capture):
    make_checkpoint(Path("m"), GPT_NEO, vocab_size=128)
    assert main(["pad-vocab", "./m", "--multiple", "8", "--out", "out", "--dry-run"]) == 0
    text = r"128 -> 128: nothing to add, the output is a full copy of \S+ \wiB\n"
    assert re.search(text, capsys.readouterr().err)


def test_next_command_of_pad_vocab_works(capsys: Capture) -> None:
    make_checkpoint(Path("m"), GPT_NEO, hidden_size=48, num_heads=6)
    command = run_json(capsys, "pad-vocab", "./m", "--mesh", "1,1,4")["next"]
    assert command == "prep save-init m-padded --mesh 1,1,4 --rule 'heads=mp|none'"
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


# Tied weights: each combination of config and stored tensors


HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
TIED = LLAMA | {"tie_word_embeddings": True}


def write_tied_model(change: Callable[[dict[str, np.ndarray]], object]) -> dict[str, np.ndarray]:
    """Write a tied checkpoint `m` after a change to its tensors, and return the unchanged tensors."""
    tensors = make_checkpoint(Path("unchanged"), LLAMA, tied=True)
    changed = dict(tensors)
    change(changed)
    write_checkpoint(Path("m"), TIED, changed)
    return tensors


def move_embedding_to_head(tensors: dict[str, np.ndarray]) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


def copy_embedding_to_head(tensors: dict[str, np.ndarray]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].copy()


@pytest.mark.parametrize("change", [move_embedding_to_head, copy_embedding_to_head])
def test_tied_head_is_stored_once_and_round_trips(change: Any):
    tensors = write_tied_model(change)
    run_ok("save-init", "./m", "--pad-vocab", "8")
    assert not list(Path("m-init").rglob("*head*"))
    run_ok("verify", "m-init", "./m")
    run_ok("verify", "m-init", "./unchanged")
    run_ok("export", "m-init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)
    assert json.loads(Path("back/config.json").read_text())["tie_word_embeddings"] is True


def test_head_without_embedding_is_padded():
    tensors = write_tied_model(move_embedding_to_head)
    run_ok("pad-vocab", "./m", "--multiple", "8", "--init", "mean")
    actual = read_tensors(Path("m-padded"))
    assert actual.keys() == tensors.keys()
    assert actual[EMBEDDING].shape == (136, 32)
    assert same_bits(actual[EMBEDDING][:131], tensors[EMBEDDING])
    run_ok("verify", "m-padded")


def test_head_and_embedding_are_padded_equally():
    write_tied_model(copy_embedding_to_head)
    run_ok("pad-vocab", "./m", "--multiple", "8", "--init", "normal")
    actual = read_tensors(Path("m-padded"))
    assert actual[HEAD].shape == (136, 32)
    assert same_bits(actual[HEAD], actual[EMBEDDING])


def change_head_value(tensors: dict[str, np.ndarray]) -> None:
    copy_embedding_to_head(tensors)
    tensors[HEAD][77, 3] += 1


def change_head_dtype(tensors: dict[str, np.ndarray]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].astype(np.float16)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (change_head_value, "first difference in row 77"),
        (change_head_dtype, "float16 [131, 32] and float32 [131, 32]"),
    ],
)
@pytest.mark.parametrize("command", ["save-init", "pad-vocab"])
def test_different_head_is_an_error_without_untie(command: str, change: Any, why: str, capsys):
    write_tied_model(change)
    assert main([command, "./m", "--out", "out"]) == 1
    text = capsys.readouterr().err
    assert f"{HEAD} is not equal to {EMBEDDING}" in text
    assert why in text
    assert not Path("out").exists()
    run_ok(command, "./m", "--out", "out", "--untie", "--restart")
    config = Path("out/config.json") if command == "pad-vocab" else Path("out/hf/config.json")
    assert json.loads(config.read_text())["tie_word_embeddings"] is False


def test_export_compares_tied_head_in_true_rows(capsys):
    """The head is not written, but its true rows must equal the embedding's."""
    write_tied_model(copy_embedding_to_head)
    run_ok("pad-vocab", "./m", "--multiple", "8")
    path, start, _ = tensor_place(Path("m-padded"), HEAD)
    flip_bit(path, start + 5 * 128)
    with changed_manifest(Path("m-padded")) as manifest:
        for record in manifest["tensors"].values():
            record["digests"] = []
    assert main(["export", "m-padded", "--out", "out"]) == 1
    assert "first difference in row 5" in capsys.readouterr().err


# T5: stacks of different depth, copies of the embedding, tied and untied heads


T5 = FAMILY_CONFIGS["t5"]
GATED = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
ENCODER_COPY, DECODER_COPY = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
Tensors = dict[str, np.ndarray]


def read_config(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "config.json").read_text())


def with_copies(tensors: Tensors, *names: str) -> Tensors:
    return tensors | {name: tensors["shared.weight"].copy() for name in names}


def test_t5_with_layers_on_axis_1_round_trips():
    tensors = make_checkpoint(Path("m"), GATED, "bfloat16", False)
    run_ok("save-init", "./m", "--pad-vocab", "8", "--scan-axis", "1")
    run_ok("verify", "m-init", "./m")
    run_ok("reshard", "m-init", "--mesh", "1,4,2", "--scan", "--out", "other")
    run_ok("verify", "other", "./m")
    run_ok("export", "other", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)
    assert read_config("back") == read_config("m")


def test_embedding_copies_are_compared_and_dropped(capsys: Capture):
    tensors = make_checkpoint(Path("plain"), T5, legacy=True)
    stray = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    names = (ENCODER_COPY, DECODER_COPY, "lm_head.weight")
    write_checkpoint(Path("m"), T5, with_copies(tensors, *names))
    dropped = run_json(capsys, "save-init", "./m")["accounting"]["dropped"]
    assert {entry["name"]: entry["rule"] for entry in dropped} == {
        **dict.fromkeys(names, "equal to shared.weight"), stray: "bias that nothing uses"
    }  # fmt: skip
    run_ok("export", "m-init", "--out", "back")
    assert_same(
        read_tensors(Path("back")),
        {name: tensor for name, tensor in tensors.items() if name != stray},
    )


def test_different_embedding_copy_is_an_error(capsys: Capture):
    tensors = with_copies(checkpoint_tensors(T5, "float32", True, False), DECODER_COPY)
    tensors[DECODER_COPY][7, 3] += 1
    write_checkpoint(Path("m"), T5, tensors)
    stderr = run_failing(capsys, 1, "save-init", "./m")
    assert f"{DECODER_COPY} is not equal to shared.weight" in stderr
    assert "family t5 stores one tensor under both names, first difference in row 7" in stderr
    assert f"{DECODER_COPY} is tied but not equal" in run_failing(capsys, 1, "verify", "./m", "./m")
    tensors[DECODER_COPY] = tensors[DECODER_COPY].astype(np.float16)
    write_checkpoint(Path("n"), T5, tensors)
    assert "float16 [131, 64] and float32 [131, 64]" in run_failing(capsys, 1, "save-init", "./n")


def test_embedding_copy_replaces_missing_embedding():
    tensors = checkpoint_tensors(T5, "float32", True, False)
    stored_tensors = with_copies(tensors, ENCODER_COPY)
    del stored_tensors["shared.weight"]
    write_checkpoint(Path("m"), T5, stored_tensors)
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_embedding_copies_in_one_torch_storage_convert():
    """Hub checkpoints of T5 store the copies this way."""
    torch = pytest.importorskip("torch")
    tensors = make_checkpoint(Path("m"), T5)
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    state |= dict.fromkeys((ENCODER_COPY, DECODER_COPY, "lm_head.weight"), state["shared.weight"])
    write_bin_folder(Path("m"), Path("bin"), state)
    run_ok("save-init", "./bin", "--pad-vocab", "8")
    run_ok("export", "bin-init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)
    run_ok("pad-vocab", "./bin")
    actual = read_tensors(Path("bin-padded"))
    assert {
        name for name in actual if actual[name].shape[0] == 136
    } == state.keys() - tensors.keys() | {"shared.weight"}


def test_padding_is_equal_in_all_copies():
    """Padding selects tensors by name: a feed-forward layer as wide as the vocabulary is not padded."""
    config = GATED | {"d_ff": 131}
    tensors = with_copies(
        checkpoint_tensors(config, "float32", False, False), ENCODER_COPY, DECODER_COPY
    )
    write_checkpoint(Path("m"), config, tensors)
    run_ok("pad-vocab", "./m", "--multiple", "8", "--init", "mean")
    actual = read_tensors(Path("m-padded"))
    padded = {name for name in actual if actual[name].shape != tensors[name].shape}
    assert padded == {"shared.weight", "lm_head.weight", ENCODER_COPY, DECODER_COPY}
    assert all(
        same_bits(actual[name], actual["shared.weight"]) for name in (ENCODER_COPY, DECODER_COPY)
    )
    assert not same_bits(actual["shared.weight"][131:], actual["lm_head.weight"][131:])
    assert_same({name: tensor[: len(tensors[name])] for name, tensor in actual.items()}, tensors)
    assert {key: read_config("m-padded")[key] for key in ("vocab_size", "true_vocab_size")} == {
        "vocab_size": 136, "true_vocab_size": 131
    }  # fmt: skip


def head_scale(folder: str) -> float:
    config = read_config(folder)
    return family_of(config).arch_config(config).lm_head_input_scale


def test_untied_head_does_not_replace_missing_embedding(capsys: Capture):
    config = GATED | {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    tensors = checkpoint_tensors(config, "float32", False, False)
    embedding = tensors.pop("shared.weight")
    write_checkpoint(Path("m"), config, tensors)
    assert "shared.weight" in run_failing(capsys, 1, "save-init", "./m")
    write_checkpoint(Path("copied"), config, tensors | {"decoder.embed_tokens.weight": embedding})
    run_ok("save-init", "./copied")
    run_ok("export", "copied-init", "--out", "back")
    assert same_bits(read_tensors(Path("back"))["shared.weight"], embedding)


def test_untied_head_keeps_its_scale(capsys: Capture):
    tensors = checkpoint_tensors(T5, "float32", False, False)
    write_checkpoint(Path("m"), T5, tensors)
    assert "`--untie` of save-init and pad-vocab keeps both" in run_failing(
        capsys, 1, "save-init", "./m"
    )
    run_ok("save-init", "./m", "--untie", "--restart")
    run_ok("export", "m-init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)
    assert read_config("back") == read_config("m") | {
        "tie_word_embeddings": False,
        "scale_decoder_outputs": True,
    }
    assert head_scale("back") == head_scale("m") == 64**-0.5


def test_encoder_without_decoder_is_rejected(capsys: Capture):
    tensors = {
        name: t
        for name, t in checkpoint_tensors(T5, "float32", True, False).items()
        if not name.startswith("decoder.")
    }
    write_checkpoint(Path("m"), T5, tensors)
    stderr = run_failing(capsys, 1, "save-init", "./m")
    assert "are missing" in stderr
    assert "decoder.block.0.layer.0.layer_norm.weight [64]" in stderr


@pytest.mark.slow
def test_flax_config_states_untied_head(capsys: Capture):
    config = GATED | {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    write_checkpoint(Path("m"), config, checkpoint_tensors(config, "float32", False, False))
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--layout", "hf-flax", "--out", "flax")
    assert read_config("flax")["tie_word_embeddings"] is False
    write_checkpoint(Path("old"), T5, checkpoint_tensors(T5, "float32", False, False))
    run_ok("save-init", "./old", "--untie")
    assert "scale_decoder_outputs True" in run_failing(
        capsys, 1, "export", "old-init", "--layout", "hf-flax"
    )
