"""Tied weights, and T5: each combination of config and stored tensors, stacks of different depth, copies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.models.registry import family_of
from tests.helpers.manifests import changed_manifest
from tests.helpers.run_cli import Capture, run_failing, run_ok
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

HEAD = "lm_head.weight"
EMBEDDINGS = {
    "gpt2": "transformer.wte.weight",
    "gpt_neo": "transformer.wte.weight",
    "llama": "model.embed_tokens.weight",
}
TIED = {"tie_word_embeddings": True}
OTHER_BASES = [
    pytest.param(base | TIED, id=base["model_type"], marks=pytest.mark.slow)
    for base in (GPT2, GPT_NEO)
]
BASES = [*OTHER_BASES, pytest.param(LLAMA | TIED, id="llama")]


def write_tied_model(
    base: dict[str, Any], change: Callable[[dict[str, np.ndarray], str], object]
) -> dict[str, np.ndarray]:
    """Write a tied checkpoint `m` after a change to its tensors, and return the unchanged tensors."""
    tensors = make_checkpoint(Path("unchanged"), base, tied=True)
    changed = dict(tensors)
    change(changed, EMBEDDINGS[base["model_type"]])
    write_checkpoint(Path("m"), base, changed)
    return tensors


def move_embedding_to_head(tensors: dict[str, np.ndarray], embedding: str) -> None:
    tensors[HEAD] = tensors.pop(embedding)


def copy_embedding_to_head(tensors: dict[str, np.ndarray], embedding: str) -> None:
    tensors[HEAD] = tensors[embedding].copy()


@pytest.mark.parametrize("change", [move_embedding_to_head, copy_embedding_to_head])
@pytest.mark.parametrize("base", BASES)
def test_tied_head_is_stored_once_and_round_trips(base: dict[str, Any], change: Any):
    tensors = write_tied_model(base, change)
    run_ok("save-init", "./m", "--pad-vocab", "8")
    assert not list(Path("m-init").rglob("*head*"))
    run_ok("verify", "m-init", "./m")
    run_ok("verify", "m-init", "./unchanged")
    run_ok("export", "m-init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)
    assert json.loads(Path("back/config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("base", BASES)
def test_head_without_embedding_is_padded(base: dict[str, Any]):
    tensors, embedding = (
        write_tied_model(base, move_embedding_to_head),
        EMBEDDINGS[base["model_type"]],
    )
    run_ok("pad-vocab", "./m", "--multiple", "8", "--init", "mean")
    actual = read_tensors(Path("m-padded"))
    assert actual.keys() == tensors.keys()
    assert actual[embedding].shape == (136, 32)
    assert same_bits(actual[embedding][:131], tensors[embedding])
    run_ok("verify", "m-padded")


@pytest.mark.parametrize("base", BASES)
def test_head_and_embedding_are_padded_equally(base: dict[str, Any]):
    write_tied_model(base, copy_embedding_to_head)
    run_ok("pad-vocab", "./m", "--multiple", "8", "--init", "normal")
    actual = read_tensors(Path("m-padded"))
    assert actual[HEAD].shape == (136, 32)
    assert same_bits(actual[HEAD], actual[EMBEDDINGS[base["model_type"]]])


def change_head_value(tensors: dict[str, np.ndarray], embedding: str) -> None:
    copy_embedding_to_head(tensors, embedding)
    tensors[HEAD][77, 3] += 1


def change_head_dtype(tensors: dict[str, np.ndarray], embedding: str) -> None:
    tensors[HEAD] = tensors[embedding].astype(np.float16)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (change_head_value, "first difference in row 77"),
        (change_head_dtype, "float16 [131, 32] and float32 [131, 32]"),
    ],
)
@pytest.mark.parametrize("command", ["save-init", "pad-vocab"])
@pytest.mark.parametrize("base", BASES)
def test_different_head_is_an_error_without_untie(
    base: dict[str, Any], command: str, change: Any, why: str, capsys
):
    write_tied_model(base, change)
    assert main([command, "./m", "--out", "out"]) == 1
    text = capsys.readouterr().err
    assert f"{HEAD} is not equal to {EMBEDDINGS[base['model_type']]}" in text
    assert why in text
    assert not Path("out").exists()
    run_ok(command, "./m", "--out", "out", "--untie", "--restart")
    config = Path("out/config.json") if command == "pad-vocab" else Path("out/hf/config.json")
    assert json.loads(config.read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("base", BASES)
def test_export_compares_tied_head_in_true_rows(base: dict[str, Any], capsys):
    """The head is not written, but its true rows must equal the embedding's."""
    write_tied_model(base, copy_embedding_to_head)
    run_ok("pad-vocab", "./m", "--multiple", "8")
    for path in Path("m-padded").glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        if HEAD in header:
            data[8 + size + header[HEAD]["data_offsets"][0] + 5 * 128] ^= 1
            path.write_bytes(data)
    with changed_manifest(Path("m-padded")) as manifest:
        for record in manifest["tensors"].values():
            record["digests"] = []
    assert main(["export", "m-padded", "--out", "out"]) == 1
    assert "first difference in row 5" in capsys.readouterr().err


# Conversions of T5: stacks of different depth, copies of the embedding, tied and untied heads


T5 = FAMILY_CONFIGS["t5"]
GATED = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
ENCODER_COPY, DECODER_COPY = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
Tensors = dict[str, np.ndarray]


def run_json(capsys: Capture, *args: str) -> Any:
    capsys.readouterr()
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def read_config(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "config.json").read_text())


def with_copies(tensors: Tensors, *names: str) -> Tensors:
    return tensors | {name: tensors["shared.weight"].copy() for name in names}


@pytest.mark.parametrize(
    "form",
    [
        ("--scan-axis", "1"),
        pytest.param(("--no-scan",), marks=pytest.mark.slow),
        pytest.param(("--mesh", "1,2,2"), marks=pytest.mark.slow),
    ],
)
def test_t5_layouts_round_trip(form: tuple[str, ...]):
    tensors = make_checkpoint(Path("m"), GATED, "bfloat16", False)
    run_ok("save-init", "./m", "--pad-vocab", "8", *form)
    run_ok("verify", "m-init", "./m")
    run_ok("reshard", "m-init", "--mesh", "1,4,2", "--scan", "--out", "other")
    run_ok("verify", "other", "./m")
    run_ok("export", "other", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)
    assert read_config("back") == read_config("m")


@pytest.mark.slow
def test_save_init_names_and_shapes_leaves_of_t5(capsys: Capture):
    make_checkpoint(Path("m"), GATED, tied=False)
    run_ok("save-init", "./m", "--mesh", "1,2,2", "--out", "stacked", "--pad-vocab", "auto")
    run_ok("save-init", "./m", "--no-scan", "--out", "apart")
    shapes = {
        entry["name"]: entry["shape"] for entry in run_json(capsys, "inspect", "stacked")["tensors"]
    }
    assert shapes["params.encoder.layers.attn.q.weight"] == [2, 4, 24, 64]
    assert shapes["params.decoder.layers.cross.o.weight"] == [3, 64, 4, 24]
    assert shapes["params.encoder.relative_positions.weight"] == [8, 4]
    assert shapes["params.head.weight"] == [132, 64]
    apart = {
        entry["name"]: entry["shape"] for entry in run_json(capsys, "inspect", "apart")["tensors"]
    }
    assert apart["params.encoder.layers.1.mlp.gate.weight"] == [48, 64]
    assert apart["params.decoder.layers.2.mlp.up.weight"] == [48, 64]
    assert "params.encoder.layers.2.mlp.up.weight" not in apart
    shards = run_json(
        capsys, "inspect", "stacked", "--shards", "encoder.layers.attn.k.weight", "--mesh", "1,2,2"
    )
    assert "encoder.layers.attn.k.weight" in json.dumps(shards)


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


@pytest.mark.parametrize(
    "stored",
    [
        (ENCODER_COPY,),
        pytest.param((DECODER_COPY, ENCODER_COPY), marks=pytest.mark.slow),
        pytest.param(("lm_head.weight", DECODER_COPY), marks=pytest.mark.slow),
    ],
)
def test_embedding_copy_replaces_missing_embedding(stored: tuple[str, ...]):
    tensors = checkpoint_tensors(T5, "float32", True, False)
    stored_tensors = with_copies(tensors, *stored)
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


@pytest.mark.slow
def test_mixed_dtypes_round_trip():
    """Files of Flan-T5 have `wo` in float32 and other tensors in half precision."""
    tensors = checkpoint_tensors(GATED, "bfloat16", False, False)
    tensors |= {
        name: tensor.astype(np.float32)
        for name, tensor in tensors.items()
        if name.endswith(".wo.weight")
    }
    write_checkpoint(Path("m"), GATED, tensors)
    run_ok("save-init", "./m", "--mesh", "1,2,4", "--pad-vocab", "auto")
    run_ok("reshard", "m-init", "--mesh", "1,4,2", "--out", "other")
    run_ok("export", "other", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def head_scale(folder: str) -> float:
    config = read_config(folder)
    return family_of(config).arch_config(config).lm_head_input_scale


@pytest.mark.slow
def test_untied_head_of_transformers_5_round_trips(capsys: Capture):
    """The config of transformers 5 states that every T5 is tied, even with a stored untied head."""
    config = GATED | {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    tensors = checkpoint_tensors(config, "float32", False, False)
    write_checkpoint(Path("m"), config, tensors)
    run_ok("save-init", "./m")
    run_ok("verify", "m-init", "./m")
    run_ok("export", "m-init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)
    assert read_config("back") == read_config("m")
    assert head_scale("back") == 1.0
    shards = run_json(capsys, "inspect", "m-init", "--shards", "head.weight", "--mesh", "1,2,1")
    assert "params.head.weight" in json.dumps(shards)
    run_ok("reshard", "m-init", "--no-scan", "--out", "apart")
    run_ok("verify", "apart", "./m")


@pytest.mark.parametrize("scales", slow_except([False, True], [False]))
def test_untied_head_does_not_replace_missing_embedding(capsys: Capture, scales: bool):
    config = GATED | {"tie_word_embeddings": not scales, "scale_decoder_outputs": scales}
    tensors = checkpoint_tensors(config, "float32", False, False)
    embedding = tensors.pop("shared.weight")
    write_checkpoint(Path("m"), config, tensors)
    assert "shared.weight" in run_failing(capsys, 1, "save-init", "./m")
    write_checkpoint(Path("copied"), config, tensors | {"decoder.embed_tokens.weight": embedding})
    run_ok("save-init", "./copied")
    run_ok("export", "copied-init", "--out", "back")
    assert same_bits(read_tensors(Path("back"))["shared.weight"], embedding)


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
