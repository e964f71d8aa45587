"""`prep add-tokens` and `prep remove-tokens` for multimodal models, quantised models and Orbax checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from prepcli.core.errors import FAILED, USAGE
from tests.helpers import towers
from tests.helpers.quantized_folders import FORMATS, Arrays, make_quantized
from tests.helpers.run_cli import run_failing_unchanged, run_ok
from tests.helpers.tiny_checkpoints import LLAMA, assert_same, read_tensors
from tests.helpers.tokenizer_folders import side_files, train_tokenizer, write_json, write_model

CONTENTS = ["<tool>", "<end>"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(Path("tokens.json"), CONTENTS)


def write_small_tokenizer(folder: Path) -> int:
    """Write a tokenizer of about 30 words, and return its size."""
    tokenizer = train_tokenizer("wordlevel", 0)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab_size()


@pytest.mark.parametrize("model_type", towers.TYPES)
def test_tokens_of_multimodal_models_come_back(model_type: str):
    towers.write_model(model_type)
    size = write_small_tokenizer(Path("m"))
    # The other rows up to 128 are padding.
    run_ok("pad-vocab", "./m", "--true-vocab", str(size), "--size", "128", "--out", "start")
    before = read_tensors(Path("start"))
    run_ok("add-tokens", "./start", "--tokens", "tokens.json", "--out", "added")
    resized = 0
    for name, tensor in read_tensors(Path("added")).items():
        if "embed_tokens" in name or "lm_head" in name:
            resized += 1
            assert tensor[:size].tobytes() == before[name][:size].tobytes()
            assert tensor[size : size + 2].any(axis=1).all()
            assert not tensor[size + 2 :].any()
        else:
            assert tensor.tobytes() == before[name].tobytes()
    assert resized >= 1
    text_config = json.loads(Path("added/config.json").read_text())
    text_config = text_config.get("text_config", text_config)
    assert (text_config["vocab_size"], text_config["true_vocab_size"]) == (128, size + 2)
    run_ok("verify", "added", "--chain")
    run_ok("remove-tokens", "./added", "--out", "removed")
    removed = read_tensors(Path("removed"))
    assert_same(
        {name: tensor[:size] if len(tensor) == 128 else tensor for name, tensor in removed.items()},
        {name: tensor[:size] if len(tensor) == 128 else tensor for name, tensor in before.items()},
    )
    assert side_files(Path("removed")) == side_files(Path("m"))
    config = json.loads(Path("removed/config.json").read_text())
    assert config == json.loads(Path("start/config.json").read_text())
    run_ok("verify", "removed", "--chain")


def write_quantized(
    kind: str, *, padding: int = 0, change: Callable[[Arrays], object] = lambda stored: None
) -> int:
    """Write a quantised model with a tokenizer, and return the size of the tokenizer."""
    tokenizer = train_tokenizer("byte-level", 0)
    size = tokenizer.get_vocab_size()
    base = LLAMA | {"vocab_size": size + padding}
    make_quantized(Path("m"), kind, base=base, change=change)
    tokenizer.save("m/tokenizer.json")
    return size


@pytest.mark.parametrize("kind", FORMATS)
def test_tokens_of_quantized_models_come_back(kind: str):
    size = write_quantized(kind)
    before = read_tensors(Path("m"))
    run_ok("add-tokens", "./m", "--tokens", "tokens.json", "--out", "added")
    added = read_tensors(Path("added"))
    assert added.keys() == before.keys()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert added[name][:size].tobytes() == before[name].tobytes()
        assert added[name][size:].astype(np.float32).any(axis=1).tolist() == [True, True]
        del added[name]
    for name, tensor in added.items():
        assert tensor.tobytes() == before[name].tobytes()
    config = json.loads(Path("added/config.json").read_text())
    assert config.pop("vocab_size") == size + 2
    assert config == {
        key: value
        for key, value in json.loads(Path("m/config.json").read_text()).items()
        if key != "vocab_size"
    }
    run_ok("verify", "added", "--chain")
    run_ok("save-init", "./added", "--quantized", "dequantize", "--out", "init")
    run_ok("remove-tokens", "./added", "--out", "removed")
    assert_same(read_tensors(Path("removed")), before)
    assert side_files(Path("removed")) == side_files(Path("m"))
    run_ok("verify", "removed", "--chain")


def test_padding_of_a_quantized_model_has_room_for_tokens():
    size = write_quantized("fp8", padding=6)
    run_ok(
        *("add-tokens", "./m", "--tokens", "tokens.json", "--out", "added"),
        *("--true-vocab", str(size)),
    )
    config = json.loads(Path("added/config.json").read_text())
    assert (config["vocab_size"], config["true_vocab_size"]) == (size + 6, size + 2)
    assert len(read_tensors(Path("added"))["lm_head.weight"]) == size + 6
    run_ok("verify", "added", "--chain")
    run_ok("remove-tokens", "./added", "--out", "removed")
    assert json.loads(Path("removed/config.json").read_text())["vocab_size"] == size + 6


@pytest.mark.parametrize("is_renamed", [False, True])
def test_quantized_embedding_is_refused(capsys: pytest.CaptureFixture[str], *, is_renamed: bool):
    def quantize_head(stored: Arrays) -> None:
        head = stored.pop("lm_head.weight")
        stored["lm_head.qweight" if is_renamed else "lm_head.weight"] = head.view(np.int16)

    write_quantized("gptq", change=quantize_head)
    code, lines = run_failing_unchanged(capsys, "add-tokens", "./m", "--tokens", "tokens.json")
    assert code == USAGE
    assert "the vocabulary of ./m is quantised" in lines[0]
    assert "lm_head" in " ".join(lines)


def test_unknown_model_types_are_refused(capsys: pytest.CaptureFixture[str]):
    write_quantized("fp8")
    config = json.loads(Path("m/config.json").read_text())
    write_json(Path("m/config.json"), config | {"model_type": "unheard_of"})
    code, lines = run_failing_unchanged(capsys, "add-tokens", "./m", "--tokens", "tokens.json")
    assert code == FAILED
    assert "unheard_of" in " ".join(lines)


def exported(name: str) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint, exported to a Hugging Face folder."""
    folder = f"{name}-exported"
    run_ok("export", name, "--out", folder)
    return read_tensors(Path(folder))


@pytest.mark.parametrize("words", [[], ["--mesh", "1,1,4", "--pad-vocab", "auto"], ["--no-scan"]])
def test_init_gets_the_rows_that_the_folder_gets(words: list[str]):
    size = write_model(Path("m")).get_vocab_size()
    run_ok("add-tokens", "./m", "--tokens", "tokens.json", "--out", "expected")
    run_ok("save-init", "./m", "--out", "init", *words)
    run_ok("add-tokens", "./init", "--tokens", "tokens.json", "--out", "added")
    manifest = json.loads(Path("added/prep-manifest.json").read_text())
    assert manifest["vocab"]["true"] == size + len(CONTENTS)
    assert manifest["mesh"] == ("1,1,4" if "--mesh" in words else None)
    assert_same(exported("added"), read_tensors(Path("expected")))
    assert side_files(Path("added-exported")) == side_files(Path("expected"))
    run_ok("verify", "added", "--chain")
    run_ok("remove-tokens", "./added", "--out", "removed")
    assert_same(exported("removed"), read_tensors(Path("m")))
    assert side_files(Path("removed/hf")) == side_files(Path("m"))
    run_ok("verify", "removed", "--chain")


@pytest.mark.parametrize(
    "words", [["--storage", "zarr3"], ["--storage", "files"], ["--compress", "zstd:3"]]
)
def test_output_has_the_storage_of_its_source(words: list[str]):
    write_model(Path("m"))
    run_ok("save-init", "./m", "--out", "init", *words)
    run_ok("add-tokens", "./init", "--tokens", "tokens.json", "--out", "added")
    run_ok("remove-tokens", "./added", "--out", "removed")
    key = words[0].removeprefix("--")
    for folder in ("added", "removed"):
        manifest = json.loads(Path(folder, "prep-manifest.json").read_text())
        assert manifest[key] == words[1]
        run_ok("verify", folder)
    run_ok("verify", "./removed", "./init")


def test_rows_of_a_mesh_stay_divisible():
    size = write_model(Path("m")).get_vocab_size()
    run_ok("save-init", "./m", "--out", "init", "--mesh", "1,1,8", "--pad-vocab", "auto")
    write_json(Path("tokens.json"), [f"<t{number}>" for number in range(9)])
    run_ok("add-tokens", "./init", "--tokens", "tokens.json", "--out", "added")
    vocabulary = json.loads(Path("added/prep-manifest.json").read_text())["vocab"]
    assert vocabulary == {"true": size + 9, "padded": -(-(size + 9) // 8) * 8}
