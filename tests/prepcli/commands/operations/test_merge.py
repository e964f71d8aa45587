"""`prep merge`: every value is base + scale * B A, rounded once, and all other tensors keep their bits."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, USAGE
from prepcli.engine.fills import numpy_dtype
from prepcli.formats.manifest import read_manifest
from prepcli.formats.safetensors import ADAPTER_FILE, read_safetensors_header
from tests.helpers.adapters import ALPHA, PREFIX, RANK, make_adapter, write_adapter_manifest
from tests.helpers.damage import flip_bit
from tests.helpers.run_cli import Capture, MonkeyPatch, error_lines, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GPT2, LLAMA, make_checkpoint, read_tensors, same_bits

LLAMA_TARGETS = [
    f"model.layers.{number}.{name}"
    for number in range(3)
    for name in ("self_attn.q_proj", "mlp.down_proj")
]
GPT2_TARGETS = [
    f"transformer.h.{number}.{name}"
    for number in range(3)
    for name in ("attn.c_attn", "mlp.c_proj")
]


@pytest.fixture(autouse=True)
def _work_dir(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def product(
    adapter: Mapping[str, np.ndarray], module: str, scale: float = ALPHA / RANK
) -> np.ndarray:
    """Compute scale * B A in float32, summed in the order of the rank."""
    a, b = (adapter[f"{PREFIX}{module}.lora_{matrix}.weight"] for matrix in "AB")
    total = np.zeros((len(b), a.shape[1]), np.float32)
    for number in range(len(a)):
        total += np.outer(b[:, number], a[number])
    return total * np.float32(scale)


def llama_adapter(folder: str = "adapter", **settings: Any) -> dict[str, np.ndarray]:
    """Write an adapter of the tiny LLaMA."""
    shapes = {name: (32, 48 if name.endswith("down_proj") else 32) for name in LLAMA_TARGETS}
    return make_adapter(Path(folder), shapes, **settings)


@pytest.mark.parametrize("dtype", slow_except(["float32", "bfloat16", "float16"], ["bfloat16"]))
def test_merge_adds_the_product_and_rounds_once(dtype: str):
    make_checkpoint(Path("base"), LLAMA, dtype=dtype)
    adapter = llama_adapter()
    assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == OK
    base, merged = read_tensors(Path("base")), read_tensors(Path("merged"))
    assert base.keys() == merged.keys()
    for name, values in base.items():
        module = name.removesuffix(".weight")
        if module in LLAMA_TARGETS:
            expected = (values.astype(np.float32) + product(adapter, module)).astype(
                numpy_dtype(dtype)
            )
            assert same_bits(merged[name], expected)
        else:
            assert same_bits(merged[name], values)


def test_merge_names_the_base_that_the_adapter_names(capsys: Capture):
    make_checkpoint(Path("base"), LLAMA)
    llama_adapter(base_model_name_or_path="me/llama-7b")
    assert main(["merge", "adapter", "base", "--dry-run"]) == OK
    assert "adapter (trained with me/llama-7b) -> base: 6 tensors change" in capsys.readouterr().err


def test_merge_transposes_the_product_for_conv1d():
    make_checkpoint(Path("base"), GPT2)
    adapter = make_adapter(
        Path("adapter"),
        {name: (96, 32) if name.endswith("c_attn") else (32, 128) for name in GPT2_TARGETS},
    )
    assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == OK
    base, merged = read_tensors(Path("base")), read_tensors(Path("merged"))
    assert sum(same_bits(merged[name], values) for name, values in base.items()) == len(base) - len(
        GPT2_TARGETS
    )
    for name, values in base.items():
        module = name if name.startswith("transformer.") else f"transformer.{name}"
        if (module := module.removesuffix(".weight")) in GPT2_TARGETS:
            assert same_bits(merged[name], values + product(adapter, module).T)


def test_merge_records_the_adapter_and_counts_changes(capsys: Capture):
    make_checkpoint(Path("base"), LLAMA)
    llama_adapter(use_rslora=True)
    assert main(["merge", "adapter", "base", "--out", "merged", "--json"]) == OK
    result = json.loads(capsys.readouterr().out)
    num_values = 3 * (32 * 32 + 32 * 48)
    manifest = read_manifest(Path("merged"))
    assert manifest is not None
    assert manifest["merged"] == {"adapter": "adapter", "scaling": ALPHA / RANK**0.5, "tensors": 6}
    (entry,) = manifest.casts
    assert (entry.get("update"), entry["tensors"], entry["values"]) == ("low-rank", 6, num_values)
    changed = entry.get("changed", 0)
    assert 0 < changed <= num_values
    assert result["accounting"]["changed_values"] == changed


def test_second_merge_of_another_adapter_is_another_request():
    make_checkpoint(Path("base"), LLAMA)
    llama_adapter()
    assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == OK
    assert prep.merge("adapter", "base", "merged").already_done
    settings = Path("adapter/adapter_config.json")
    settings.write_text(settings.read_text().replace(str(ALPHA), "9"))
    with pytest.raises(prep.OutputExistsError):
        prep.merge("adapter", "base", "merged")
    assert not prep.merge("adapter", "base", "merged", overwrite=True).already_done


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is 8, but base_model.model.model.layers.0"),
        ({"rank_pattern": {"(?i)q_proj": 8}}, "is not supported"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern is -1, it should be greater than 0"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save has 'lm_head', and no tensor"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": "16"}, "r is '16', it should be a valid integer"),
        ({"r": 7}, "r is 7, but base_model.model.model.layers.0.mlp.down_proj.lora_A.weight is [3"),
        ({"r": 10**30}, "r is an integer above 10^30, it should be"),
        ({"r": 10**400}, "a number has 401 digits"),
        ({"r": True}, "r is True, it should be a valid integer"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, it should be a finite number"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf, it should be a finite number"),
        ({"lora_alpha": 10**299}, "which float32 cannot hold"),
        ({"lora_alpha": 0}, "lora_alpha is 0, it should be greater than 0"),
        ({"lora_alpha": 1e300}, "lora_alpha / r is 3.33333e+299, which float32 cannot hold"),
        ({"lora_alpha": 1e-60, "use_rslora": True}, "lora_alpha / sqrt(r) is 5.7735e-61, which"),
        ({"use_rslora": "false"}, "use_rslora is 'false', it should be a valid boolean"),
        ({"use_rslora": 1}, "use_rslora is 1, it should be a valid boolean"),
        ({"use_dora": 0}, "use_dora = 0 is not supported"),
        (
            {"velora_config": {"num_groups": 4}},
            "velora_config = {'num_groups': 4} is not supported",
        ),
        ({"use_new_lora": True}, "'use_new_lora' = True is unknown"),
        (
            {"target_modules": ["q_proj"]},
            "adapter of model.layers.0.mlp.down_proj, but target_modules",
        ),
        ({"exclude_modules": ["q_proj"]}, "q_proj, but exclude_modules lists it"),
        ({"target_modules": 3}, "target_modules is 3, it should be"),
        (
            {"base_model_name_or_path": 3},
            "base_model_name_or_path is 3, it should be a valid string",
        ),
    ],
)
def test_merge_rejects_other_adapters(settings: dict[str, Any], message: str, capsys: Capture):
    make_checkpoint(Path("base"), LLAMA)
    llama_adapter(**settings)
    assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == FAILED
    assert message in capsys.readouterr().err
    assert not Path("merged").exists()


def test_merge_takes_settings_without_effect():
    make_checkpoint(Path("base"), LLAMA)
    llama_adapter(use_new_lora=False, new_config=None, revision="main", eva_config={"rho": 2.0})
    assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == OK


def fill_matrix(value: float, suffix: str = "layers.1.self_attn.q_proj.lora_B.weight") -> None:
    """Set the first row of a matrix of the adapter to a value."""
    path = Path("adapter/adapter_model.safetensors")
    tensors = load_file(path)
    (name,) = (name for name in tensors if name.endswith(suffix))
    tensors[name][0] = value
    save_file(tensors, path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("dtype", slow_except(["float32", "bfloat16"], ["bfloat16"]))
def test_merge_refuses_values_that_become_infinite_or_nan(
    value: float, dtype: str, capsys: Capture
):
    make_checkpoint(Path("base"), LLAMA, dtype=dtype)
    llama_adapter()
    fill_matrix(value)
    assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == FAILED
    error = capsys.readouterr().err
    assert re.search(
        r"[1-9]\d* values of model.layers.1.self_attn.q_proj.weight become infinite or nan", error
    )
    assert "--allow-overflow" in error
    assert not Path("merged").exists()


def test_merge_counts_the_values_that_are_nan_after_it(capsys: Capture):
    make_checkpoint(Path("base"), LLAMA)
    llama_adapter()
    fill_matrix(float("nan"))
    assert main(["merge", "adapter", "base", "--allow-overflow", "--out", "merged"]) == OK
    assert "32 overflowed, 0 became 0, 32 are nan" in capsys.readouterr().err
    manifest = read_manifest(Path("merged"))
    assert manifest is not None
    (entry,) = manifest.casts
    assert (entry.get("overflowed"), entry.get("nan")) == (32, 32)
    merged = read_tensors(Path("merged"))
    assert sum(int(np.isnan(values).sum()) for values in merged.values()) == 32


def test_merge_rejects_a_matrix_of_another_shape(capsys: Capture):
    make_checkpoint(Path("base"), LLAMA)
    make_adapter(Path("adapter"), {"model.layers.0.self_attn.q_proj": (32, 48)})
    assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == FAILED
    assert "the adapter has B [32, 3] times A [3, 48]" in capsys.readouterr().err


def test_merge_rejects_the_base_layer_of_an_adapted_head(capsys: pytest.CaptureFixture[str]):
    """PEFT stores the weight of an adapted embedding or head beside its matrices."""
    make_checkpoint(Path("base"), LLAMA)
    tensors = make_adapter(Path("adapter"), {"lm_head": (131, 32)})
    tensors[f"{PREFIX}lm_head.base_layer.weight"] = np.zeros((131, 32), np.float32)
    save_file(tensors, "adapter/adapter_model.safetensors")
    assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == FAILED
    error = capsys.readouterr().err
    assert "lm_head.base_layer.weight cannot be merged" in error
    assert "hint: PEFT's `merge_and_unload()` merges other adapters" in error


def test_merge_names_exchanged_arguments(capsys: Capture):
    make_checkpoint(Path("base"), LLAMA)
    llama_adapter()
    assert main(["merge", "base", "adapter", "--out", "merged", "-q"]) == USAGE
    error = capsys.readouterr().err
    assert "adapter and base are exchanged" in error
    assert "`prep merge adapter base`" in error


def test_merge_rejects_a_folder_without_an_adapter(capsys: Capture):
    make_checkpoint(Path("base"), LLAMA)
    assert main(["merge", "base", "base", "--out", "merged", "-q"]) == USAGE
    assert "base is not an adapter" in capsys.readouterr().err


# `prep merge` with whole embeddings and heads of an adapter: a padded base keeps its padding


SIZE = LLAMA["vocab_size"] - 9
# With some rows of padding before prep adds further ones.
CONFIG: dict[str, Any] = LLAMA | {"true_vocab_size": SIZE}
WIDTH = LLAMA["hidden_size"]
HEAD = "lm_head.weight"
NAMES = ("model.embed_tokens.weight", HEAD)
WEIGHTS = Path("adapter/adapter_model.safetensors")


@pytest.fixture
def padded_base() -> None:
    make_checkpoint(Path("base"), CONFIG)


def write_adapter(rows: int, *, has_digests: bool) -> dict[str, np.ndarray]:
    """Write an adapter with an embedding and a head of its own, and return both.

    Args:
        rows: Rows of the embedding and the head.
        has_digests: Whether prep wrote it. PEFT records no digests.
    """
    module = "model.layers.0.self_attn.q_proj"
    saved = ["embed_tokens", "lm_head"]
    tensors = make_adapter(Path("adapter"), {module: (WIDTH, WIDTH)}, modules_to_save=saved)
    random = np.random.default_rng(2)
    whole = {name: random.standard_normal((rows, WIDTH), np.float32) for name in NAMES}
    save_file(tensors | {PREFIX + name: values for name, values in whole.items()}, WEIGHTS)
    if has_digests:
        write_adapter_manifest(Path("adapter"), CONFIG)
    return whole


def flip_row(path: Path, row: np.ndarray) -> None:
    """Change a bit in a row of a tensor in a file."""
    flip_bit(path, path.read_bytes().index(row.tobytes()))


@pytest.mark.usefixtures("padded_base")
@pytest.mark.parametrize("has_digests", [False, True])
def test_merge_keeps_padding_of_replaced_embeddings(has_digests: bool):
    whole = write_adapter(SIZE, has_digests=has_digests)
    run_ok("pad-vocab", "./base", "--size", "200", "--out", "padded")
    run_ok("save-init", "./padded", "--out", "padded-init")
    run_ok("merge", "adapter", "./padded-init", "--out", "merged")
    run_ok("verify", "merged")
    run_ok("export", "merged", "--keep-padding", "--out", "hf")
    before = read_tensors(Path("padded"))
    merged = read_tensors(Path("hf"))
    for name, values in whole.items():
        assert same_bits(merged[name], np.concatenate([values, before[name][SIZE:]]))


@pytest.mark.usefixtures("padded_base")
def test_merge_replaces_padding_by_rows_of_an_adapter():
    whole = write_adapter(LLAMA["vocab_size"], has_digests=True)
    run_ok("merge", "adapter", "./base", "--out", "merged")
    merged = read_tensors(Path("merged"))
    for name, values in whole.items():
        assert same_bits(merged[name], values)


@pytest.mark.usefixtures("padded_base")
@pytest.mark.parametrize("has_digests", [False, True])
def test_merge_refuses_a_base_with_damaged_padding(has_digests: bool, capsys: Capture):
    write_adapter(SIZE, has_digests=has_digests)
    run_ok("pad-vocab", "./base", "--size", "200", "--init", "normal", "--out", "padded")
    for path in Path("padded").glob("*.safetensors"):
        if HEAD in (tensors := load_file(path)):
            flip_row(path, tensors[HEAD][-1])
    capsys.readouterr()
    lines = error_lines(capsys, "merge", "adapter", "./padded", "--out", "merged")
    assert lines[0] == f"error: {HEAD} in ./padded is damaged"
    assert not Path("merged").exists()


@pytest.mark.usefixtures("padded_base")
def test_merge_names_an_adapter_with_a_damaged_head(capsys: Capture):
    whole = write_adapter(SIZE, has_digests=True)
    run_ok("pad-vocab", "./base", "--size", "200", "--out", "padded")
    flip_row(WEIGHTS, whole[HEAD][0])
    capsys.readouterr()
    lines = error_lines(capsys, "merge", "adapter", "./padded", "--out", "merged")
    assert lines[0] == f"error: {HEAD} in adapter is damaged"
    assert not Path("merged").exists()


# Adapters that prep wrote: their bytes are checked on every read, and `verify` and `inspect` take them


TARGETS = {f"model.layers.{number}.self_attn.q_proj": (32, 32) for number in range(3)}


@pytest.fixture
def adapter() -> Path:
    """Return an adapter with a manifest, beside its base."""
    make_checkpoint(Path("base"), LLAMA)
    make_adapter(Path("adapter"), TARGETS)
    write_adapter_manifest(Path("adapter"), LLAMA)
    return Path("adapter")


def change_values(adapter: Path, suffix: str) -> None:
    """Add 1 to all values of the tensors whose name ends with a suffix."""
    tensors = load_file(adapter / ADAPTER_FILE)
    save_file(
        {name: values + name.endswith(suffix) for name, values in tensors.items()},
        adapter / ADAPTER_FILE,
    )


def rename_tensor(adapter: Path) -> None:
    """Rename a tensor in the header without moving a byte."""
    path = adapter / ADAPTER_FILE
    path.write_bytes(
        path.read_bytes().replace(
            b"layers.2.self_attn.q_proj.lora_A", b"layers.2.self_attn.k_proj.lora_A"
        )
    )


def swap_names(adapter: Path) -> None:
    """Exchange the names of two tensors of one shape."""
    path = adapter / ADAPTER_FILE
    first, second = (f"layers.{number}.self_attn.q_proj.lora_A".encode() for number in (0, 1))
    content = path.read_bytes().replace(first, b"\0" * len(first)).replace(second, first)
    path.write_bytes(content.replace(b"\0" * len(first), second))


def change_dtype(adapter: Path) -> None:
    """Declare another dtype of the same size."""
    path = adapter / ADAPTER_FILE
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))


@pytest.mark.parametrize("damage", [rename_tensor, swap_names, change_dtype])
def test_header_that_differs_from_the_manifest_is_damage(
    adapter: Path, damage: Callable[[Path], None], capsys: Capture
):
    damage(adapter)
    assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == FAILED
    assert "damaged" in capsys.readouterr().err


def test_verify_reads_every_byte_of_an_adapter(adapter: Path, capsys: Capture):
    assert main(["verify", "adapter"]) == OK
    assert "ok: 6 tensors, 576 values, 0 different" in capsys.readouterr().out
    change_values(adapter, "layers.1.self_attn.q_proj.lora_B.weight")
    assert main(["verify", "adapter"]) == FAILED
    output = capsys.readouterr()
    assert "adapter is damaged (1 of 6 tensors)" in output.err
    assert (
        f"{PREFIX}model.layers.1.self_attn.q_proj.lora_B.weight rows 0:32 do not match"
        in output.err
    )


def test_verify_compares_adapters(adapter: Path, capsys: Capture):
    shutil.copytree(adapter, "other")
    Path("other/prep-manifest.json").unlink()
    assert main(["verify", "adapter", "other"]) == OK
    assert main(["verify", "other"]) == USAGE
    assert "nothing to verify other against" in capsys.readouterr().err
    change_values(Path("other"), "layers.1.self_attn.q_proj.lora_A.weight")
    assert main(["verify", "adapter", "other"]) == FAILED
    assert "96 of 96 values" in capsys.readouterr().err
    assert main(["verify", "adapter", "base"]) == FAILED
    assert "adapter has only adapters, and base is a model" in capsys.readouterr().err


def test_inspect_shows_an_adapter(adapter: Path, capsys: Capture):
    assert main(["inspect", "adapter"]) == OK
    text = capsys.readouterr().out
    assert "LoRA adapter, rank 3, alpha 7, scaled by 2.33333" in text
    assert f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight" in text
    assert main(["inspect", "adapter", "--json"]) == OK
    source = json.loads(capsys.readouterr().out)["source"]
    assert source["format"] == "adapter"
    assert source["adapter"] == {
        "rank": 3,
        "alpha": 7.0,
        "use_rslora": False,
        "scaling": 7 / 3,
        "base": None,
    }


@pytest.mark.usefixtures("adapter")
@pytest.mark.parametrize(
    "command",
    [["save-init"], ["generate", "--tokens", "1"]],
)
def test_other_commands_refuse_an_adapter(command: list[str], capsys: Capture):
    assert main([command[0], "adapter", *command[1:], "-q"]) == FAILED
    assert "adapter is an adapter, not a model" in capsys.readouterr().err


def data_positions(adapter: Path) -> list[int]:
    """Return the position of the first and the last byte of each tensor."""
    tensors = read_safetensors_header(adapter / ADAPTER_FILE, 0).tensors
    return [position for t in tensors for position in (t.offset, t.offset + t.nbytes - 1)]


def flip_byte(path: Path, position: int) -> None:
    """Change the lowest bit of one byte of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_merge_refuses_a_flipped_bit_in_each_tensor(adapter: Path, capsys: Capture):
    for position in data_positions(adapter):
        flip_byte(adapter / ADAPTER_FILE, position)
        assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == FAILED
        error = capsys.readouterr().err
        assert "q_proj.lora_" in error
        assert "in adapter is damaged" in error
        assert not Path("merged").exists()
        flip_byte(adapter / ADAPTER_FILE, position)
        shutil.rmtree("merged.partial", ignore_errors=True)
    assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == OK
