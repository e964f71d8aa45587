"""Bit-exact conversions of every family, format and layout, as Orbax and transformers read them."""

from __future__ import annotations

import json
import re
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.testing.checks import FamilyUnderTest, check_same_checkpoint
from prepcli.commands.testing.tiny_model import load_torch_model
from prepcli.models.param_tree import flatten_tree
from prepcli.models.registry import FAMILIES
from tests.helpers.fused_experts import fuse_experts
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.llama_trees import expected_output, read_output
from tests.helpers.native_trees import array_metas, expected_leaves
from tests.helpers.run_cli import Capture, MonkeyPatch, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    ALL_CONFIGS,
    FAMILY_CONFIGS,
    GPT_NEO,
    LLAMA,
    assert_same,
    checkpoint_tensors,
    make_checkpoint,
    read_tensors,
    same_bits,
    write_checkpoint,
)
from tests.helpers.torch_checkpoints import to_torch, write_bin_folder, write_meta_folder
from tests.helpers.zarr_items import StorageForm, write_zarr_item
from tests.prepcli.formats.test_orbax import run_orbax

Tensors = dict[str, np.ndarray]


def without_buffers(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Remove the buffers that old files contain."""
    family = FAMILIES[config["model_type"]]
    rules = [re.escape(rule).replace(r"\{i\}", r"\d+") for rule in family.dropped]
    bare = {name: name.removeprefix(family.prefix) for name in tensors}
    return {
        name: t
        for name, t in tensors.items()
        if not any(re.fullmatch(rule, bare[name]) for rule in rules)
    }


# A bias of the head and buffers, interleaved and fused projections, offset positions, separate, shared, fused and
# grouped experts, a tied head, and two stacks. The check `coverage` of
# tests/prepcli/commands/testing/test_checks.py has all families.
FAST_FAMILIES = ("gptj", "mixtral", "t5")


@pytest.mark.parametrize("name", slow_except(FAMILY_CONFIGS, FAST_FAMILIES))
def test_pad_init_reshard_export_changes_no_bit(name: str):
    config = FAMILY_CONFIGS[name]
    tensors = make_checkpoint(Path("m"), config, "bfloat16", legacy=True)
    run_ok("pad-vocab", "./m", "--multiple", "8", "--init", "normal")
    run_ok("save-init", "m-padded", "--memory", "32MiB", "--mesh", "1,4,1")
    run_ok("reshard", "m-padded-init", "--mesh", "1,2,4", "--out", "other")
    run_ok("export", "other", "--out", "back")
    assert_same(read_tensors(Path("back")), without_buffers(config, tensors))
    before, after = (
        json.loads(Path(folder, "config.json").read_text()) for folder in ("m", "back")
    )
    assert after == before
    run_ok("verify", "back", "./m")
    run_ok("verify", "other", "m-padded")


@pytest.mark.parametrize("name", slow_except(FAMILY_CONFIGS, ["gemma3_text", "t5"]))
def test_other_tying_without_scan_round_trips(name: str):
    config = FAMILY_CONFIGS[name]
    tensors = make_checkpoint(
        Path("m"), config, "float16", not FAMILIES[name].tying.tied_by_default
    )
    run_ok("save-init", "./m", "--pad-vocab", "8", "--no-scan")
    run_ok("export", "m-init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_head_bias_is_padded_with_zeros():
    tensors = make_checkpoint(Path("m"), FAMILY_CONFIGS["gptj"])
    run_ok("pad-vocab", "./m", "--multiple", "8", "--init", "mean")
    actual = read_tensors(Path("m-padded"))
    assert actual["lm_head.bias"].shape == (136,)
    assert not actual["lm_head.bias"][131:].any()
    assert same_bits(actual["lm_head.bias"][:131], tensors["lm_head.bias"])
    assert actual["lm_head.weight"][131:].any()
    assert {name for name in actual if actual[name].shape != tensors[name].shape} == {
        "transformer.wte.weight", "lm_head.weight", "lm_head.bias"
    }  # fmt: skip


def test_padding_leaves_position_embeddings():
    tensors = make_checkpoint(Path("m"), FAMILY_CONFIGS["opt"], tied=False)
    run_ok("pad-vocab", "./m", "--size", "200")
    actual = read_tensors(Path("m-padded"))
    padded = {name for name in actual if actual[name].shape != tensors[name].shape}
    assert padded == {"model.decoder.embed_tokens.weight", "lm_head.weight"}


def alternate_form(name: str) -> Tensors:
    config = FAMILY_CONFIGS[name]
    tensors = checkpoint_tensors(config, "bfloat16", False, False)
    if name == "mixtral":
        return fuse_experts(tensors, "mixtral")
    return {key.replace("embed_out", "lm_head"): tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize("name", slow_except(["mixtral", "gpt_neox"], ["mixtral"]))
def test_alternate_form_round_trips(name: str):
    tensors = alternate_form(name)
    write_checkpoint(Path("m"), FAMILY_CONFIGS[name], tensors)
    run_ok("pad-vocab", "./m", "--multiple", "8")
    run_ok("save-init", "m-padded")
    run_ok("verify", "m-padded-init", "m-padded")
    run_ok("reshard", "m-padded-init", "--mesh", "1,2,4", "--out", "other")
    run_ok("verify", "other", "m-padded")
    run_ok("export", "other", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


@pytest.mark.parametrize("name", slow_except(["mixtral", "gpt_neox"], ["gpt_neox"]))
def test_both_forms_convert_to_the_same_tree(name: str):
    write_checkpoint(
        Path("a"),
        FAMILY_CONFIGS[name],
        checkpoint_tensors(FAMILY_CONFIGS[name], "bfloat16", False, False),
    )
    write_checkpoint(Path("b"), FAMILY_CONFIGS[name], alternate_form(name))
    trees = []
    for folder in ("a", "b"):
        run_ok("save-init", f"./{folder}", "--mesh", "1,2,1")
        trees.append(restore_with_orbax(Path(f"{folder}-init")))
    assert_same(*trees)


def restore_with_orbax(item: Path) -> Tensors:
    """Restore the leaves with Orbax."""
    import orbax.checkpoint as ocp

    return flatten_tree(ocp.PyTreeCheckpointer().restore(item.resolve()))


@pytest.mark.parametrize("name", slow_except(["mixtral", "gpt_neox"], ["mixtral"]))
def test_both_forms_in_one_file_are_an_error(name: str, capsys: Capture):
    both = {
        **checkpoint_tensors(FAMILY_CONFIGS[name], "bfloat16", False, False),
        **alternate_form(name),
    }
    write_checkpoint(Path("m"), FAMILY_CONFIGS[name], both)
    assert main(["save-init", "./m", "-q"]) == 1
    assert "a parameter is stored in two forms" in capsys.readouterr().err


# Orbax restores the outputs of the commands bit for bit


FAST_LAYOUTS = [(LLAMA, "bfloat16", ["--mesh", "1,2,4", "--scan-axis", "1"], True, 1)]
LAYOUTS = [
    *FAST_LAYOUTS,
    (GPT_NEO, "float16", ["--mesh", "1,64,4"], True, 0),
    (GPT_NEO, "float32", [], True, 0),
    (LLAMA, "bfloat16", ["--mesh", "1,8,1", "--no-scan"], False, 0),
]


@pytest.mark.parametrize(
    ("base", "dtype", "options", "scan", "axis"), slow_except(LAYOUTS, FAST_LAYOUTS)
)
def test_orbax_restores_an_init(tmp_path, base, dtype, options, scan, axis):
    tensors = make_checkpoint(Path("m"), base, dtype, hidden_size=64)
    assert main(["save-init", "./m", "--pad-vocab", "8", "-q", *options]) == 0
    if "--mesh" in options and scan and axis == 0:  # via another mesh and back
        assert main(["reshard", "m-init", "--mesh", "1,1,4", "--out", "other", "-q"]) == 0
        assert main(["reshard", "other", *options, "--out", "m-init", "--overwrite", "-q"]) == 0
    config = json.loads(Path("m/config.json").read_text())
    leaves = expected_leaves(config, tensors, scan, axis)
    expected = {
        name: [v.dtype.name, list(v.shape), v.tobytes().hex()] for name, v in leaves.items()
    }
    Path("expected.json").write_text(json.dumps(expected))
    assert not run_orbax("compare", tmp_path / "expected.json", tmp_path / "m-init")


# Bit-exact conversions from every supported source format to every output format


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
ORBAX_SOURCES = ("init", "init-zstd", "unscanned", "zarr3")
DTYPES = ("float32", "bfloat16", "float16")
PAIRS = [(source, sink) for source in SOURCES for sink in SINKS if (source, sink) != ("hf", "hf")]
CASES = [(dtype, source, sink) for dtype in DTYPES for source, sink in PAIRS]


def is_fast(case: tuple[str, str, str]) -> bool:
    """Return whether the default suite has the case: sinks and dtypes take turns along the sources."""
    dtype, source, sink = case
    turn = SOURCES.index(source)
    return (dtype, sink) == (DTYPES[turn % len(DTYPES)], list(SINKS)[(turn + 1) % len(SINKS)])


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
    folders: FormatFolders, dtype: str, source: str, sink: str, monkeypatch: MonkeyPatch
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


# Round trips of models through transformers and torch, where installed: equal files, tensors and logits


torch = lazy_module("torch")
transformers = lazy_module("transformers")
T5 = FAMILY_CONFIGS["t5"]
THREE_FAMILIES = pytest.mark.parametrize(
    "base",
    slow_except(ALL_CONFIGS[:3], ALL_CONFIGS[1:2]),
    ids=[base["model_type"] for base in ALL_CONFIGS[:3]],
)


@pytest.fixture(autouse=True)
def _work_dir(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


def compute_logits(model: Any, true_vocab: int) -> Any:
    ids = torch.arange(300).reshape(2, 150)[:, :60] % true_vocab
    more = {"decoder_input_ids": ids.flip(0)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(ids, **more).logits[..., :true_vocab]


@THREE_FAMILIES
def test_model_saved_by_transformers_round_trips(base: dict[str, Any], tmp_path: Path):
    saved = FamilyUnderTest(base, tmp_path).save_with_transformers("float16")
    assert main(["save-init", str(saved), "--pad-vocab", "8", "--mesh", "1,4,2", "-q"]) == 0
    assert main(["export", "float16-init", "--out", "back", "-q"]) == 0
    check_same_checkpoint(saved, tmp_path / "back")


@THREE_FAMILIES
def test_exported_model_has_the_same_logits(base: dict[str, Any], tmp_path: Path):
    make_checkpoint(Path("m"), base, legacy=True)
    assert main(["save-init", "./m", "--pad-vocab", "128", "-q"]) == 0
    assert main(["export", "m-init", "-q"]) == 0
    # The old buffers of this file have no place in the model.
    model = transformers.AutoModelForCausalLM.from_pretrained("m", attn_implementation="eager")
    exported = load_torch_model(tmp_path / "m-hf")
    expected = compute_logits(model.float().eval(), 131)
    assert torch.equal(expected, compute_logits(exported, 131))


@pytest.mark.slow
def test_untied_t5_head_stays_untied(tmp_path: Path):
    """The saved config states that the head is tied, although it is not."""
    kind = transformers.AutoConfig.for_model(
        **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(kind, attn_implementation="eager")
    model.lm_head.weight = torch.nn.Parameter(torch.randn(131, 64))
    model.save_pretrained("saved")
    assert main(["pad-vocab", "./saved", "--multiple", "8", "-q"]) == 0
    assert main(["save-init", "saved-padded", "-q"]) == 0
    assert main(["export", "saved-padded-init", "--out", "back", "-q"]) == 0
    expected, actual = model.eval(), load_torch_model(tmp_path / "back")
    assert not torch.equal(actual.lm_head.weight, actual.shared.weight)
    assert all(
        torch.equal(tensor, expected.state_dict()[name])
        for name, tensor in actual.state_dict().items()
    )
    assert torch.equal(compute_logits(expected, 131), compute_logits(actual, 131))
