"""Adapters that prep wrote: their bytes are checked on every read, and `verify` and `inspect` take them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, USAGE
from prepcli.formats.safetensors import ADAPTER_FILE, read_safetensors_header
from tests.helpers.adapters import PREFIX, make_adapter, write_adapter_manifest
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint

TARGETS = {f"model.layers.{number}.self_attn.q_proj": (32, 32) for number in range(3)}


@pytest.fixture(autouse=True)
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an adapter with a manifest, beside its base."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_checkpoint(Path("base"), LLAMA)
    make_adapter(Path("adapter"), TARGETS)
    write_adapter_manifest(Path("adapter"), LLAMA)
    return Path("adapter")


def flip_bit(path: Path, position: int) -> None:
    """Change the lowest bit of one byte of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def change_values(adapter: Path, suffix: str) -> None:
    """Add 1 to all values of the tensors whose name ends with a suffix."""
    tensors = load_file(adapter / ADAPTER_FILE)
    save_file(
        {name: values + name.endswith(suffix) for name, values in tensors.items()},
        adapter / ADAPTER_FILE,
    )


def data_positions(adapter: Path) -> list[int]:
    """Return the position of the first and the last byte of each tensor."""
    tensors = read_safetensors_header(adapter / ADAPTER_FILE, 0).tensors
    return [position for t in tensors for position in (t.offset, t.offset + t.nbytes - 1)]


def test_merge_refuses_a_flipped_bit_in_each_tensor(
    adapter: Path, capsys: pytest.CaptureFixture[str]
):
    for position in data_positions(adapter):
        flip_bit(adapter / ADAPTER_FILE, position)
        assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == FAILED
        error = capsys.readouterr().err
        assert "q_proj.lora_" in error
        assert "in adapter is damaged" in error
        assert not Path("merged").exists()
        flip_bit(adapter / ADAPTER_FILE, position)
        shutil.rmtree("merged.partial", ignore_errors=True)
    assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == OK


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
    path, (first, second) = (
        adapter / ADAPTER_FILE,
        (f"layers.{number}.self_attn.q_proj.lora_A".encode() for number in (0, 1)),
    )
    content = path.read_bytes().replace(first, b"\0" * len(first)).replace(second, first)
    path.write_bytes(content.replace(b"\0" * len(first), second))


def change_dtype(adapter: Path) -> None:
    """Declare another dtype of the same size."""
    path = adapter / ADAPTER_FILE
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))


@pytest.mark.parametrize("damage", [rename_tensor, swap_names, change_dtype])
@pytest.mark.parametrize(
    "command", [["verify", "adapter"], ["merge", "adapter", "base", "--out", "merged"]]
)
def test_header_that_differs_from_the_manifest_is_damage(
    adapter: Path, damage: object, command: list[str], capsys: pytest.CaptureFixture[str]
):
    assert callable(damage)
    damage(adapter)
    assert main([*command, "-q"]) == FAILED
    assert "damaged" in capsys.readouterr().err


def test_adapter_without_a_manifest_is_not_checked(adapter: Path):
    (adapter / "prep-manifest.json").unlink()
    change_values(adapter, "lora_B.weight")
    assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == OK


def test_verify_reads_every_byte_of_an_adapter(adapter: Path, capsys: pytest.CaptureFixture[str]):
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


def test_verify_compares_adapters(adapter: Path, capsys: pytest.CaptureFixture[str]):
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


def test_inspect_shows_an_adapter(adapter: Path, capsys: pytest.CaptureFixture[str]):
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


@pytest.mark.parametrize(
    "command", [["save-init"], ["export"], ["generate", "--tokens", "1"], ["pad-vocab"]]
)
def test_other_commands_refuse_an_adapter(command: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([command[0], "adapter", *command[1:], "-q"]) == FAILED
    assert "adapter is an adapter, not a model" in capsys.readouterr().err
