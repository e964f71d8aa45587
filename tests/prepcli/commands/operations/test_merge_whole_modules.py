"""`prep merge` with whole embeddings and heads of an adapter: a padded base keeps its padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers.adapters import PREFIX, make_adapter, write_adapter_manifest
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint, read_tensors, same_bits

SIZE = LLAMA["vocab_size"] - 9
# With some rows of padding before prep adds further ones.
CONFIG: dict[str, Any] = LLAMA | {"true_vocab_size": SIZE}
WIDTH = LLAMA["hidden_size"]
HEAD = "lm_head.weight"
NAMES = ("model.embed_tokens.weight", HEAD)
WEIGHTS = Path("adapter/adapter_model.safetensors")


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
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


def flip_bit(path: Path, row: np.ndarray) -> None:
    """Change a bit in a row of a tensor in a file."""
    data = bytearray(path.read_bytes())
    data[data.index(row.tobytes())] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("has_digests", [False, True])
@pytest.mark.parametrize(
    "base", slow_except(["base", "padded", "padded-init"], ["base", "padded-init"])
)
def test_merge_keeps_padding_of_replaced_embeddings(base: str, has_digests: bool):
    whole = write_adapter(SIZE, has_digests=has_digests)
    run_ok("pad-vocab", "./base", "--size", "200", "--out", "padded")
    run_ok("save-init", "./padded", "--out", "padded-init")
    run_ok("merge", "adapter", f"./{base}", "--out", "merged")
    run_ok("verify", "merged")
    run_ok("export", "merged", "--keep-padding", "--out", "hf")
    before = read_tensors(Path("base" if base == "base" else "padded"))
    merged = read_tensors(Path("hf"))
    for name, values in whole.items():
        assert same_bits(merged[name], np.concatenate([values, before[name][SIZE:]]))


def test_merge_replaces_padding_by_rows_of_an_adapter():
    whole = write_adapter(LLAMA["vocab_size"], has_digests=True)
    run_ok("merge", "adapter", "./base", "--out", "merged")
    merged = read_tensors(Path("merged"))
    for name, values in whole.items():
        assert same_bits(merged[name], values)


@pytest.mark.parametrize("has_digests", [False, True])
def test_merge_refuses_a_base_with_damaged_padding(
    has_digests: bool, capsys: pytest.CaptureFixture[str]
):
    write_adapter(SIZE, has_digests=has_digests)
    run_ok("pad-vocab", "./base", "--size", "200", "--init", "normal", "--out", "padded")
    for path in Path("padded").glob("*.safetensors"):
        if HEAD in (tensors := load_file(path)):
            flip_bit(path, tensors[HEAD][-1])
    capsys.readouterr()
    lines = error_lines(capsys, "merge", "adapter", "./padded", "--out", "merged")
    assert lines[0] == f"error: {HEAD} in ./padded is damaged"
    assert not Path("merged").exists()


@pytest.mark.parametrize(
    ("base", "rows"),
    slow_except(
        [("padded", SIZE), ("base", SIZE), ("base", LLAMA["vocab_size"])], [("padded", SIZE)]
    ),
)
def test_merge_names_an_adapter_with_a_damaged_head(
    base: str, rows: int, capsys: pytest.CaptureFixture[str]
):
    whole = write_adapter(rows, has_digests=True)
    run_ok("pad-vocab", "./base", "--size", "200", "--out", "padded")
    flip_bit(WEIGHTS, whole[HEAD][0])
    capsys.readouterr()
    lines = error_lines(capsys, "merge", "adapter", f"./{base}", "--out", "merged")
    assert lines[0] == f"error: {HEAD} in adapter is damaged"
    assert not Path("merged").exists()
