"""Tests of format detection."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from prepcli.core.errors import FAILED, PrepError
from prepcli.formats.registry import Kind
from prepcli.sources.detect import detect, detect_file
from prepcli.sources.open_folder import OpenFolder
from prepcli.stores.files import MAX_CONFIG_NBYTES


def fill(folder: Path, *names: str, config: object = None) -> Path:
    """Create a folder with empty files of these names and a config.json."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def detect_folder(folder: Path) -> Kind:
    return detect(OpenFolder("./m", folder)).kind


def detect_error(path: Path, display_name: str = "./m") -> PrepError:
    with pytest.raises(PrepError) as caught:
        _ = (
            detect_file(path, display_name)
            if path.is_file()
            else detect(OpenFolder(display_name, path))
        )
    assert caught.value.code == FAILED
    return caught.value


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors"],
        ["model.safetensors.index.json", "model-00001-of-00002.safetensors"],
        ["weights.safetensors"],
        [
            "model.safetensors",
            "pytorch_model.bin",
            "flax_model.msgpack",
            "model.gguf",
            "adapter_config.json",
        ],
    ],
)
def test_detect_prefers_safetensors(tmp_path: Path, names: list[str]) -> None:
    assert detect_folder(fill(tmp_path, *names, config={"model_type": "llama"})) == "safetensors"


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["pytorch_model.bin", "training_args.bin", "flax_model.msgpack", "tf_model.h5"], "torch"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "torch"),
        (["pytorch_model-00001-of-00002.bin"], "torch"),
        (["model.pth", "optimizer.pt"], "torch"),
        (["consolidated.00.pth", "params.json"], "meta"),
        (["consolidated.00.pth", "pytorch_model.bin"], "torch"),
    ],
)
def test_detect_separates_torch_from_meta(tmp_path: Path, names: list[str], kind: str) -> None:
    assert detect_folder(fill(tmp_path, *names, config={"model_type": "llama"})) == kind


def test_detect_accepts_safetensors_without_config(tmp_path: Path) -> None:
    assert detect_folder(fill(tmp_path, "model.safetensors")) == "safetensors"


@pytest.mark.parametrize("name", ["_METADATA", "state/_METADATA", "100/state/_METADATA"])
def test_detect_accepts_orbax_item_step_or_run(tmp_path: Path, name: str) -> None:
    assert detect_folder(fill(tmp_path, name, "manifest.ocdbt")) == "orbax"


def test_folder_without_checkpoint_lists_its_files(tmp_path: Path) -> None:
    prefix = (
        "looked for *.safetensors, *.bin, *.pth, *.pt, *.msgpack, *.distcp, "
        "Orbax `_METADATA`, EasyLM stream; found "
    )
    error = detect_error(fill(tmp_path / "x"), "./x")
    assert (error.what, error.why, error.hint) == (
        "`./x` holds no checkpoint",
        prefix + "nothing",
        "name the folder with the weights",
    )
    error = detect_error(fill(tmp_path / "x", "notes.txt"), "./x")
    assert error.why == prefix + "notes.txt"
    error = detect_error(fill(tmp_path / "x", *(f"{n}.txt" for n in range(9))), "./x")
    assert error.why == prefix + "0.txt, 1.txt, 2.txt, 3.txt, 4.txt, 5.txt and 4 more"


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["model-Q4_K_M.gguf"], "./m is in GGUF format"),
        (["MODEL.GGUF"], "./m is in GGUF format"),
        (["__0_0.distcp"], "./m is an incomplete torch distributed checkpoint"),
        (["imatrix.bin", "model.gguf"], "./m is in GGUF format"),
        (["training_args.bin", "optimizer.pt"], "./m holds no model"),
        (["optimizer.json", "rng_state_0.pth"], "./m holds no model"),
    ],
)
def test_unsupported_format_error_has_a_hint(tmp_path: Path, names: list[str], what: str) -> None:
    error = detect_error(fill(tmp_path, *names, config={"model_type": "llama"}))
    assert error.what == what
    assert names[-1] in error.why or names[0] in error.why
    assert error.hint
    assert "{" not in error.hint


def test_file_instead_of_folder_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path, "m.gguf", "model.safetensors")
    assert detect_error(tmp_path / "m.gguf", "m.gguf").what == "m.gguf is in GGUF format"
    error = detect_error(tmp_path / "model.safetensors", "model.safetensors")
    assert error.what == "model.safetensors is a file"
    assert str(tmp_path) in error.hint


@pytest.mark.parametrize(
    ("config", "declared"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config: gptq"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: awq"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config: bitsandbytes",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: fp8"),
        ({"quantization_config": {"load_in_8bit": True}}, "quantization_config: no quant_method"),
        (
            {"compression_config": {"quant_method": "compressed-tensors"}},
            "compression_config: compressed-tensors",
        ),
        (
            {"text_config": {"quantization_config": {"quant_method": "awq"}}},
            "quantization_config: awq",
        ),
    ],
)
def test_detect_quantised_config_error_names_key_and_method(
    tmp_path: Path, config: object, declared: str
) -> None:
    error = detect_error(fill(tmp_path, "model.safetensors", config=config))
    assert error.what == "./m is quantised"
    assert error.why.startswith(f"config.json has a {declared};")


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"text_config": {}}, []])
def test_config_without_quantisation_is_accepted(tmp_path: Path, config: object) -> None:
    assert detect_folder(fill(tmp_path, "model.safetensors", config=config)) == "safetensors"


def test_broken_config_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path, "model.safetensors")
    (tmp_path / "config.json").write_text("{")
    assert detect_error(tmp_path).what == "./m has a broken config.json"


def test_config_that_is_a_pipe_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path, "model.safetensors")
    (tmp_path / "config.json").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "config.json")
    assert detect_error(tmp_path).what == f"{tmp_path / 'config.json'} is not a file"


@pytest.mark.parametrize(
    ("name", "tool"), [("quantize_config.json", "GPTQ"), ("quant_config.json", "AWQ")]
)
def test_files_of_quantisation_tools_are_an_error(tmp_path: Path, name: str, tool: str) -> None:
    error = detect_error(fill(tmp_path, "model.safetensors", name, config={}))
    assert error.what == "./m is quantised"
    assert f"{name}" in error.why
    assert tool in error.why


def test_adapter_is_an_error(tmp_path: Path) -> None:
    error = detect_error(fill(tmp_path, "adapter_config.json", "adapter_model.safetensors"))
    assert error.what == "./m is an adapter, not a model"
    assert error.hint.startswith("`prep merge ADAPTER BASE`")


class ListedFolder:
    """A `Folder` of names only: reading any file fails the test."""

    display_name = "./m"

    def __init__(self, *names: str) -> None:
        self._names = names

    def names(self) -> Sequence[str]:
        return self._names

    def read(self, name: str, start: int, stop: int) -> bytes:
        raise AssertionError(f"{name} was read")

    def open_headers(self) -> Path | None:
        raise AssertionError("headers were fetched")

    def checkpoint_folders(self) -> Sequence[Path]:
        return ()


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["b/model.safetensors", "a.safetensors"], "safetensors"),
        (["100/state/_METADATA", "config.json"], "orbax"),
        (["a/b/c/_METADATA", "flax_model.msgpack"], "flax"),
        (["streaming_params_7"], "easylm"),
    ],
)
def test_detect_reads_no_file_without_a_config(names: list[str], kind: str) -> None:
    assert detect(ListedFolder(*names)).kind == kind


def test_config_with_braces_is_quoted_in_the_error(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "{names}{0}"}}
    assert "{0}" in detect_error(fill(tmp_path, "model.safetensors", config=config)).why


def test_config_that_is_too_large_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path, "model.safetensors")
    (tmp_path / "config.json").write_bytes(b" " * (MAX_CONFIG_NBYTES + 1))
    assert detect_error(tmp_path).what == "./m has a broken config.json"


def test_run_without_a_step_is_named_as_a_run(tmp_path: Path) -> None:
    run = fill(tmp_path / "run", "recipe.toml", "environment.json", "metrics.jsonl", "data/lock")
    error = detect_error(run, "runs/a")
    assert error.what == "no step of the run runs/a is saved yet"
    assert error.hint == "`prep train RECIPE --out runs/a` continues it"


def test_folder_with_only_a_recipe_is_not_a_run(tmp_path: Path) -> None:
    assert "holds no checkpoint" in detect_error(fill(tmp_path / "project", "recipe.toml")).what
