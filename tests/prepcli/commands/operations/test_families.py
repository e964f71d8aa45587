"""Bit-exact conversions of every family, architecture, format and layout, as Orbax and transformers read them."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.testing.checks import FamilyUnderTest, check_same_checkpoint
from prepcli.commands.testing.tiny_model import load_torch_model, model_logits, tiny_transformer
from prepcli.core.errors import PrepError
from prepcli.models.param_tree import flatten_tree
from prepcli.models.registry import FAMILIES
from prepcli.models.text_part import MROPE_FIELDS, TEXT_FAMILIES, read_text_part
from tests.golden.make_architectures import FOLDER, TYPES, make_model, model_types, read_header
from tests.golden.make_towers import FIRST_TOKEN
from tests.golden.make_towers import compute_logits as golden_logits
from tests.helpers.fused_experts import fuse_experts
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.llama_trees import expected_output, read_output
from tests.helpers.native_trees import array_metas, expected_leaves
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import StoredTensor, safetensors_bytes, write_safetensors
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
from tests.helpers.towers import model_values
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


# A bias of the head, buffers, interleaved projections, and separate experts. T5 has two stacks below. The check
# `coverage` of tests/prepcli/commands/testing/test_checks.py has all families.
FAST_FAMILIES = ("gptj", "mixtral")


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


@pytest.mark.parametrize("name", slow_except(FAMILY_CONFIGS, ["t5"]))
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
def test_both_forms_convert_to_the_same_tree(name: str, capsys: Capture):
    first = checkpoint_tensors(FAMILY_CONFIGS[name], "bfloat16", False, False)
    second = alternate_form(name)
    trees: list[Tensors] = []
    for folder, tensors in (("a", first), ("b", second)):
        write_checkpoint(Path(folder), FAMILY_CONFIGS[name], tensors)
        run_ok("save-init", f"./{folder}", "--mesh", "1,2,1")
        trees.append(restore_with_orbax(Path(f"{folder}-init")))
    assert_same(*trees)
    write_checkpoint(Path("both"), FAMILY_CONFIGS[name], first | second)
    error = run_failing(capsys, 1, "save-init", "./both")
    assert "a parameter is stored in two forms" in error


def restore_with_orbax(item: Path) -> Tensors:
    """Restore the leaves with Orbax."""
    import orbax.checkpoint as ocp

    return flatten_tree(ocp.PyTreeCheckpointer().restore(item.resolve()))


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
    with contextlib.chdir(root):
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
THREE_FAMILIES = pytest.mark.parametrize(
    "base",
    slow_except(ALL_CONFIGS[:3], ALL_CONFIGS[1:2]),
    ids=[base["model_type"] for base in ALL_CONFIGS[:3]],
)


@pytest.fixture(autouse=True)
def _work_dir(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


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
@pytest.mark.usefixtures("one_torch_thread")
def test_exported_model_has_the_same_logits(base: dict[str, Any], tmp_path: Path):
    make_checkpoint(Path("m"), base, legacy=True)
    assert main(["save-init", "./m", "--pad-vocab", "128", "-q"]) == 0
    assert main(["export", "m-init", "-q"]) == 0
    # The old buffers of this file have no place in the model.
    model = transformers.AutoModelForCausalLM.from_pretrained("m", attn_implementation="eager")
    exported = load_torch_model(tmp_path / "m-hf")
    expected = compute_logits(model.float().eval(), 131)
    assert torch.equal(expected, compute_logits(exported, 131))


# All multimodal types and architectures of transformers: the same files back

# Types whose text part is computed as a family.
TEXT_TYPES = (
    "audioflamingo3", "deepseek_vl", "deepseek_vl_hybrid", "exaone4_5", "gemma3", "gemma4", "glm46v", "glm4v",
    "glm4v_moe", "glm_ocr", "glmasr", "glmga", "got_ocr2", "granite_docling", "granite_speech",
    "granite_speech_plus", "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "lfm2_vl",
    "lighton_ocr", "llava", "llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr",
    "minicpmv4_6", "minicpmv4_7", "mistral3", "moss_transcribe_diarize", "musicflamingo", "ovis2",
    "paddleocr_vl", "pp_chart2table", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio", "qwen2_vl",
    "qwen3_5", "qwen3_5_moe", "qwen3_asr", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe",
    "smolvlm", "video_llama_3", "video_llava", "vipllava", "voxtral",
)  # fmt: skip
# Types whose whole model transformers 5.24 does not compute from their file and text alone -> family of the text part.
IMAGE_TYPES = {
    "blip-2": "opt",
    "instructblip": "opt",
    "instructblipvideo": "opt",
    "llama4": "llama4_text",
    "shieldgemma2": "gemma3_text",
}
# Part of the reason -> types that keep the names of their files.
VERBATIM_TYPES = {
    "logit_scale": ("aya_vision", "cohere2_vision"),
    "attend to all": ("paligemma",),
    "which is not supported": ("aria", "blip", "fuyu", "kosmos-2", "mllama", "pix2struct"),
    "has none of text_config": ("git", "idefics", "phi4_multimodal"),
}
LENGTH = 12


def save_tiny_model(model_type: str) -> dict[str, Any]:
    """Save a tiny model in the folder `m`, with values that distinguish computations, and return its config."""
    make_model(model_type).save_pretrained("m")
    config = json.loads(Path("m/config.json").read_text())
    _state_mrope(config)
    Path("m/config.json").write_text(json.dumps(config))
    path = Path("m/model.safetensors")
    tensors = load_file(path)
    shapes = {n: e["shape"] for n, e in read_header(path).items() if e["dtype"] == "F32"}
    save_file(tensors | model_values(shapes), path, {"format": "pt"})
    return config


def _state_mrope(config: dict[str, Any]) -> None:
    """Set the sections of M-RoPE, whose defaults are for larger heads."""
    text = config.get("text_config", {})
    rope = text.get("rope_parameters")
    if text.get("model_type") not in TEXT_FAMILIES or not rope:
        return
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    rope[MROPE_FIELDS[0]] = [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]


def convert_and_return() -> dict[str, Any]:
    """Convert the folder `m`, compare the export with it, and return the manifest of the init."""
    run_ok("save-init", "./m", "--mesh", "1,1,2")
    run_ok("export", "m-init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == safetensors_bytes(Path("m"))
    assert Path("hf/config.json").read_bytes() == Path("m/config.json").read_bytes()
    return json.loads(Path("m-init/prep-manifest.json").read_text())


# The default tests compare six types by golden files (`test_towers.py`).
@pytest.mark.slow
@pytest.mark.parametrize("model_type", TEXT_TYPES)
def test_text_part_equals_whole_model_for_text(model_type: str):
    save_tiny_model(model_type)
    config = convert_and_return()["config"]
    rng = np.random.default_rng(0)
    tokens = rng.integers(FIRST_TOKEN, config["vocab_size"], (2, LENGTH), dtype=np.int32)
    expected = golden_logits(Path("m"), tokens.tolist())
    params = prep.load_params("m-init")
    logits = model_logits(tiny_transformer(config).model, params, {"tokens": tokens})
    print(f"{model_type}: {config['model_type']}, error {np.abs(logits - expected).max():.1e}")
    np.testing.assert_allclose(logits, expected, rtol=2e-6, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "family"), IMAGE_TYPES.items())
def test_text_part_of_other_models_converts(model_type: str, family: str):
    save_tiny_model(model_type)
    assert convert_and_return()["family"] == family


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [(name, reason) for reason, names in VERBATIM_TYPES.items() for name in names],
)
def test_other_types_keep_names_of_file(model_type: str, reason: str):
    config = save_tiny_model(model_type)
    with pytest.raises(PrepError) as caught:
        read_text_part(config, read_header(Path("m/model.safetensors")).keys())
    assert reason in caught.value.why
    assert convert_and_return()["family"] == "verbatim"


# Architectures without a family: names of transformers' checkpoints, there and back, compared byte by byte


ITEMSIZES = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1, "U8": 1}


def random_tensors(types: dict[str, Any]) -> dict[str, StoredTensor]:
    """Return tensors of random bytes with these dtypes and shapes."""
    rng = np.random.default_rng(0)
    tensors: dict[str, StoredTensor] = {}
    for name, (code, shape) in types.items():
        nbytes = int(np.prod(shape)) * ITEMSIZES[code]
        tensors[name] = (code, tuple(shape), rng.bytes(nbytes))
    return tensors


def check_verbatim_round_trip(model: Path) -> None:
    """Convert a folder, reshard the result, export it, and compare config and tensors with the folder."""
    run_ok("save-init", str(model), "--verbatim", "--mesh", "1,2,2", "--out", "init")
    run_ok("reshard", "init", "--mesh", "1,1,4", "--no-scan", "--out", "other")
    run_ok("export", "other", "--out", "hf")
    assert Path("hf/config.json").read_bytes() == (model / "config.json").read_bytes()


# The other architectures convert by the same rules.
@pytest.mark.parametrize("model_type", slow_except(TYPES, ["mamba2"]))
def test_architecture_round_trips(model_type: str):
    golden = json.loads((FOLDER / f"{model_type}.json").read_text())
    tensors = random_tensors(golden["tensors"])
    Path("m").mkdir()
    write_safetensors(Path("m/model.safetensors"), tensors)
    Path("m/config.json").write_text(json.dumps(golden["config"]))
    check_verbatim_round_trip(Path("m"))
    assert safetensors_bytes(Path("hf")) == tensors
    manifest = json.loads(Path("other/prep-manifest.json").read_text())
    assert manifest["family"] == "verbatim"


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_type_of_transformers_round_trips(dtype: str, file_format: str):
    converted: list[str] = []
    skipped: dict[str, str] = {}
    for model_type in model_types():
        folder = Path(model_type)
        folder.mkdir()
        with contextlib.chdir(folder):
            try:
                state = _save_model(model_type, dtype)
            except Exception as error:
                skipped[model_type] = f"{type(error).__name__}: {error}"[:200]
            else:
                _check_conversion(state, file_format)
                converted.append(model_type)
        shutil.rmtree(folder)
    print(f"{len(converted)} converted; no tiny model: {json.dumps(skipped, indent=1)}")
    assert len(converted) > 270


def _save_model(model_type: str, dtype: str) -> dict[str, Any]:
    """Save a tiny model with transformers to `expected`, and return its tensors."""
    model = make_model(model_type).to(getattr(torch, dtype))
    model.save_pretrained("expected")
    return model.state_dict()


def _check_conversion(state: dict[str, Any], file_format: str) -> None:
    """Convert the model in `expected` there and back, and compare every tensor."""
    if file_format == "safetensors":
        check_verbatim_round_trip(Path("expected"))
        assert safetensors_bytes(Path("hf")) == safetensors_bytes(Path("expected"))
        return
    Path("bin").mkdir()
    shutil.copyfile("expected/config.json", "bin/config.json")
    torch.save(state, "bin/pytorch_model.bin")
    check_verbatim_round_trip(Path("bin"))
    exported = safetensors_bytes(Path("hf"))
    assert exported.keys() == state.keys()
    for name, tensor in state.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert exported[name][2] == data
