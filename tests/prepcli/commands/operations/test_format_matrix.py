"""Bit-exact conversions from every supported source format to every output format.

The default suite converts each pair in one dtype, and each format in every dtype. The slow tests have all cases.
"""

from __future__ import annotations

from contextlib import chdir
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.llama_trees import expected_output, read_output
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, assert_same, make_checkpoint, read_tensors
from tests.helpers.torch_checkpoints import to_torch, write_bin_folder, write_meta_folder
from tests.helpers.zarr_items import StorageForm, write_zarr_item
from tests.prepcli.commands.operations.test_orbax_sources import array_metas
from tests.prepcli.commands.operations.test_restore import expected_leaves

CONFIG = LLAMA | {"vocab_size": 136, "num_attention_heads": 4, "num_key_value_heads": 2}
TORCH = ("bin", "meta")
CONVERTED = {
    "init": ("save-init", "hf", "--mesh", "1,2,1"),
    "init-zstd": ("save-init", "hf", "--compress", "zstd", "--mesh", "1,4,1"),
    "unscanned": ("save-init", "hf", "--no-scan"),
    "hf-flax": ("export", "hf", "--layout", "hf-flax"),
    "easylm": ("export", "hf", "--layout", "easylm"),
}
SOURCES = ("hf", *CONVERTED, "zarr3", *TORCH)
SINKS = {
    "hf": ("export",),
    "init": ("save-init", "--mesh", "1,4,1"),
    "init-zstd": ("save-init", "--compress", "zstd"),
    "hf-flax": ("export", "--layout", "hf-flax"),
    "easylm": ("export", "--layout", "easylm"),
}
# Formats converted with reshard instead of save-init.
ORBAX_SOURCES = (
    "init",
    "init-zstd",
    "unscanned",
    "zarr3",
)
DTYPES = ("float32", "bfloat16", "float16")
PAIRS = [(source, sink) for source in SOURCES for sink in SINKS if (source, sink) != ("hf", "hf")]
CASES = [(dtype, source, sink) for dtype in DTYPES for source, sink in PAIRS]


def is_fast(case: tuple[str, str, str]) -> bool:
    """Return whether the default suite has the case: every second pair, and the dtypes take turns along the pairs."""
    dtype, source, sink = case
    turn, is_odd = divmod(SOURCES.index(source) + list(SINKS).index(sink), 2)
    return not is_odd and dtype == DTYPES[turn % len(DTYPES)]


def make_formats(root: Path, dtype: str) -> Path:
    """Make the same LLaMA in every format that needs no PyTorch."""
    tensors = make_checkpoint(root / "hf", CONFIG, dtype, tied=False)
    with chdir(root):
        for name, (command, source, *options) in CONVERTED.items():
            run_ok(command, source, *options, "--out", name)
    leaves = expected_leaves(CONFIG, tensors, True, 0)
    write_zarr_item(
        root / "zarr3",
        array_metas(leaves, pieces=2),
        StorageForm(zarr3=True, chunks_per_shard=2, codec_names=("zstd",)),
    )
    (root / "zarr3/config.json").write_bytes((root / "hf/config.json").read_bytes())
    return root


def make_torch_formats(folder: Path) -> Path:
    """Add the formats that need PyTorch."""
    tensors = {name: to_torch(value) for name, value in read_tensors(folder / "hf").items()}
    write_bin_folder(folder / "hf", folder / "bin", tensors, num_files=2)
    write_meta_folder(folder / "meta", CONFIG, tensors, num_files=2)
    return folder


class FormatFolders:
    """Folders with the same LLaMA in every format, one per dtype, made when a test needs them."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.folder = cache(lambda dtype: make_formats(factory.mktemp(dtype), dtype))
        self.folder_with_torch = cache(lambda dtype: make_torch_formats(self.folder(dtype)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> FormatFolders:
    return FormatFolders(tmp_path_factory)


@pytest.mark.parametrize(("dtype", "source", "sink"), slow_except(CASES, is_fast))
def test_conversion_is_bit_exact(
    folders: FormatFolders, dtype: str, source: str, sink: str, monkeypatch: pytest.MonkeyPatch
):
    if source in TORCH:
        pytest.importorskip("torch")
    monkeypatch.chdir(
        folders.folder_with_torch(dtype) if source in TORCH else folders.folder(dtype)
    )
    command, *options = SINKS[sink]
    if command == "save-init" and source in ORBAX_SOURCES:
        command = "reshard"
    out = f"{source}-to-{sink}"
    run_ok(command, f"./{source}", *options, "--out", out)
    run_ok("verify", f"./{out}", "./hf")
    layout = sink.removesuffix("-zstd")
    # A reshard keeps the layers as they are.
    expected = expected_output(layout, read_tensors(Path("hf")), CONFIG, scan=source != "unscanned")
    assert_same(read_output(layout, Path(out)), expected)
