"""Maps of users: tensors under names that no family knows, read as the model of a family and written back."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import xxhash

import prepcli as prep
from prepcli.commands.cli.main import main
from tests.helpers.damage import flip_bit
from tests.helpers.foreign_names import (
    CONFIG,
    FAMILY_MAP,
    LAYERS,
    foreign_tensors,
    write_foreign_folder,
)
from tests.helpers.hf_folders import write_hf_folder
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.run_cli import Capture, exported_tensors, run_failing, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    LLAMA,
    assert_same,
    make_checkpoint,
    read_tensors,
)

serialization = lazy_module("flax.serialization")
torch = lazy_module("torch")
Write = Callable[[Path, dict[str, np.ndarray]], None]


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    """Write a LLaMA as `llama`, as `own` under foreign names, and its map. Return its tensors."""
    make_checkpoint(Path("llama"), LLAMA)
    tensors = read_tensors(Path("llama"))
    write_foreign_folder(Path("own"), tensors)
    Path("own.map").write_text(FAMILY_MAP)
    return tensors


def test_save_init_with_a_map_writes_the_family(tensors: dict[str, np.ndarray]):
    options = ("--mesh", "1,2,2", "--pad-vocab", "auto")
    run_ok("save-init", "own", "--map", "own.map", *options, "--out", "init")
    run_ok("verify", "init")
    run_ok("verify", "init", "llama")
    run_ok("export", "init", "--out", "hf")
    assert_same(read_tensors(Path("hf")), tensors)


def test_verify_reads_the_other_checkpoint_through_the_map(tensors: dict[str, np.ndarray]):
    run_ok("save-init", "own", "--map", "own.map", "--out", "init")
    run_ok("verify", "init", "own", "--map", "own.map")
    run_ok("verify", "llama", "own", "--map", "own.map")
    foreign = foreign_tensors(tensors)
    foreign["gate_up"][1, 7, 3] += 1
    write_hf_folder(Path("changed"), {"model.safetensors": foreign}, CONFIG)
    assert main(["verify", "init", "changed", "--map", "own.map", "-q"]) == 1


def write_torch(folder: Path, foreign: dict[str, np.ndarray]) -> None:
    """Write a PyTorch file with some tensors as transposed views."""
    folder.mkdir()
    state = {}
    for name, value in foreign.items():
        tensor = torch.tensor(value)
        state[name] = tensor.t().contiguous().t() if value.ndim == 2 else tensor
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(CONFIG))


def write_orbax(folder: Path, foreign: dict[str, np.ndarray]) -> None:
    """Write an Orbax item with several chunks per leaf, and a config."""
    saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    save_args: dict[str, ocp.SaveArgs] = {}
    for name, value in foreign.items():
        save_args[name] = ocp.SaveArgs(chunk_byte_size=max(4, value.nbytes // 2))
    saver.save(folder.absolute(), args=ocp.args.PyTreeSave(foreign, save_args=save_args))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def write_flax(folder: Path, foreign: dict[str, np.ndarray]) -> None:
    folder.mkdir()
    (folder / "flax_model.msgpack").write_bytes(serialization.msgpack_serialize(dict(foreign)))
    (folder / "config.json").write_text(json.dumps(CONFIG))


@pytest.mark.parametrize(
    "write", slow_except([write_orbax, write_torch, write_flax], [write_torch])
)
def test_maps_read_every_format(tensors: dict[str, np.ndarray], write: Write):
    write(Path("other"), foreign_tensors(tensors))
    run_ok("save-init", "other", "--map", "own.map", "--out", "init")
    run_ok("verify", "init", "llama")
    assert_same(exported_tensors("init"), tensors)


OWN_TREE_MAP = """
size vocab = vocab_size
size embed = hidden_size
size heads = num_attention_heads
size kv_heads = 4
size head_dim = hidden_size / num_attention_heads
size layers = 3
size side = 2
size mlp = intermediate_size
drop rotary.inv_freq
embed.tokens: vocab embed <- tok: embed vocab
final_norm.scale: embed <- norm: 1 embed
head: embed vocab <- out: vocab embed
layers.norms: layers embed side <- norms: side layers embed
layers.q: layers heads head_dim embed <- h.{layers}.qkv: embed (>heads head_dim | kv_heads head_dim | kv_heads head_dim)
layers.kv: layers (>kv_heads head_dim | kv_heads head_dim) embed <- h.{layers}.qkv: embed (heads head_dim | >kv_heads head_dim | kv_heads head_dim)
layers.kv: layers (kv_heads head_dim | >kv_heads head_dim) embed <- h.{layers}.qkv: embed (heads head_dim | kv_heads head_dim | >kv_heads head_dim)
layers.{layers}.out: (heads head_dim) embed <- h.{layers}.out: heads head_dim embed
layers.{layers}.gate: mlp embed <- gate_up: layers (mlp side=0) embed
layers.{layers}.up: mlp embed <- gate_up: layers (mlp side=1) embed
layers.{layers}.down: embed mlp <- h.{layers}.down: embed mlp
"""  # noqa: E501 - a row is one line


def test_map_without_a_family_writes_the_users_tree(tensors: dict[str, np.ndarray]):
    Path("tree.map").write_text(OWN_TREE_MAP)
    run_ok("save-init", "own", "--map", "tree.map", "--mesh", "1,2,1", "--out", "init")
    run_ok("verify", "init")
    foreign = foreign_tensors(tensors)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(Path("init").absolute())["params"]
    assert np.array_equal(tree["embed.tokens"], foreign["tok"].T)
    assert np.array_equal(tree["layers.norms"], foreign["norms"].transpose(1, 2, 0))
    qkv = np.stack([foreign[f"h.{layer}.qkv"].T for layer in range(LAYERS)])
    assert np.array_equal(tree["layers.q"], qkv[:, :32].reshape(LAYERS, 8, 4, 32))
    assert np.array_equal(tree["layers.kv"], qkv[:, 32:])
    gates = foreign["gate_up"].reshape(LAYERS, 48, 2, 32)
    assert np.array_equal(tree["layers.*.gate"], gates[:, :, 0])
    run_ok("export", "init", "--out", "hf")
    assert read_tensors(Path("hf"))["layers.1.up"].tobytes() == gates[1, :, 1].tobytes()


# Change of FAMILY_MAP -> part of the error. An empty change removes the line.
MISFITS = {
    ("family llama", "family lama"): "the family `lama` is unknown",
    ("drop rotary.*", ""): "rotary.inv_freq is in no row and no `drop` line",
    ("size side = 2", ""): "line 10: the atom `side` has no size",
    ("size side = 2", "size side = 3"): "line 10: norms has shape [2, 3, 32], the row [3, 3, 32]",
    ("size side = 2", "size side = 2\nsize mlp = 47"): "two sizes: 47, and 48 in config.json",
    ("model.norm.weight:", "model.nrm.weight:"): "no row fills model.norm.weight [32]",
    ("norm.weight: embed <-", "nrm.weight: embed <-"): "model.nrm.weight is no tensor of family",
    ("side=1 layers", "side=0 layers"): "lines 10, 11: norms is covered twice",
    ("tok: embed vocab", "tok: vocab embed"): "line 7: tok has shape [32, 131], the row [131, 32]",
    ("gate_up: layers (mlp side=0)", "gate: layers (mlp side=0)"): "line 16: gate does not exist",
}


@pytest.mark.parametrize("change", MISFITS)
def test_map_that_does_not_fit_names_lines_and_tensors(
    tensors: dict[str, np.ndarray], change: tuple[str, str], capsys: Capture
):
    before, after = change
    Path("own.map").write_text(FAMILY_MAP.replace(before, after, 1))
    error = run_failing(capsys, 1, "save-init", "own", "--map", "own.map", "--out", "init")
    assert MISFITS[change] in error
    assert "Traceback" not in error
    assert not Path("init").exists()


def test_map_needs_a_config_for_a_family(tensors: dict[str, np.ndarray], capsys: Capture):
    Path("own/config.json").unlink()
    error = run_failing(capsys, 1, "save-init", "own", "--map", "own.map", "--out", "init")
    assert "the map own.map needs the config of own" in error
    run_ok("save-init", "own", "--map", "own.map", "--config", "llama", "--out", "init")
    run_ok("verify", "init", "llama")


def test_map_of_a_known_family_has_no_effect(tensors: dict[str, np.ndarray], capsys: Capture):
    run_ok("save-init", "llama", "--out", "init")
    error = run_failing(capsys, 2, "reshard", "init", "--map", "own.map", "--out", "new")
    assert "`--map` has no effect for init" in error
    error = run_failing(
        capsys, 2, "save-init", "own", "--map", "own.map", "--verbatim", "--out", "new"
    )
    assert "`--map` and `--verbatim` exclude each other" in error
    error = run_failing(capsys, 2, "verify", "init", "--map", "own.map")
    assert "`--map` requires a second checkpoint" in error


def test_map_files_that_are_no_text_are_refused(tensors: dict[str, np.ndarray], capsys: Capture):
    for data in (b"\xff\xfe", b"", b"\0" * 100, b"x" * (5 << 20)):
        Path("bad.map").write_bytes(data)
        error = run_failing(capsys, 1, "save-init", "own", "--map", "bad.map", "--out", "init")
        assert "bad.map" in error
        assert "Traceback" not in error
    error = run_failing(capsys, 1, "save-init", "own", "--map", "absent.map", "--out", "init")
    assert "absent.map" in error


def test_lock_of_a_mapped_checkpoint_covers_its_files(
    tensors: dict[str, np.ndarray], capsys: Capture
):
    """The lock has the tensors of the files, and not those of the map."""
    run_ok("lock", "own")
    words = ("save-init", "own", "--map", "own.map", "--lock", "own.lock.json", "--out")
    run_ok(*words, "init")
    run_ok("verify", "init", "llama")
    flip_bit(Path("own/model-2.safetensors"), -5)
    error = run_failing(capsys, 1, *words, "new")
    assert "`model-2.safetensors` has the SHA-256" in error
    assert not Path("new").exists()


def test_chain_does_not_prove_the_tensors_of_a_map(tensors: dict[str, np.ndarray], capsys: Capture):
    """The manifest has the digest of the map, and not its rows."""
    run_ok("save-init", "own", "--map", "own.map", "--out", "init")
    run_ok("export", "init", "--map", "own.map", "--out", "back")
    run_ok("save-init", "back", "--out", "again")
    capsys.readouterr()
    result = run_json(capsys, "verify", "again", "--chain")
    links = result["links"]
    assert [link["status"] for link in links] == ["proven", "proven", "not proven"]
    assert links[-1]["not_shown"] == "read through a map"
    assert links[-1]["check"].startswith("prep save-init own --map own.map --out AGAIN && ")
    run_ok("verify", "again", "--chain", "--allow-unproven")


def identity_map(names: Iterable[str]) -> str:
    """Return a map of a LLaMA with the names of its own family."""
    dims = {
        r".*(embed_tokens|lm_head)\.weight": "vocab embed",
        r".*norm\.weight": "embed",
        r".*q_proj\.weight": "(heads head_dim) embed",
        r".*[kv]_proj\.weight": "(kv_heads head_dim) embed",
        r".*o_proj\.weight": "embed (heads head_dim)",
        r".*(gate|up)_proj\.weight": "mlp embed",
        r".*down_proj\.weight": "embed mlp",
    }
    lines = ["family llama"]
    for name in sorted({re.sub(r"\.\d+\.", ".{layers}.", name) for name in names}):
        (tensor,) = [f"{name}: {dims[pattern]}" for pattern in dims if re.fullmatch(pattern, name)]
        lines.append(f"{tensor} <- {tensor}")
    return "\n".join(lines) + "\n"


def test_map_of_quantized_weights_needs_decoded_ones(capsys: Capture):
    make_quantized(Path("fp8"), "fp8", base=LLAMA)
    shutil.copytree("fp8", "own")
    config = json.loads(Path("own/config.json").read_text())
    Path("own/config.json").write_text(json.dumps(config | {"model_type": "own"}))
    names = [name for name in read_tensors(Path("own")) if not name.endswith("_scale_inv")]
    Path("own.map").write_text(identity_map(names))
    Path("drop.map").write_text(identity_map(names) + "drop *_scale_inv\n")
    error = run_failing(capsys, 1, "save-init", "own", "--map", "own.map", "--out", "init")
    assert "weight_scale_inv" in error
    # Without their scales the values are those of another model.
    error = run_failing(capsys, 1, "save-init", "own", "--map", "drop.map", "--out", "init")
    assert "would have quantised values (float8_e4m3fn) without their scales" in error
    assert "`prep save-init MODEL --quantized dequantize` decodes them" in error
    decoded = ("--quantized", "dequantize", "--out")
    run_ok("save-init", "own", "--map", "own.map", *decoded, "init")
    run_ok("save-init", "fp8", *decoded, "expected")
    run_ok("verify", "init", "expected")
    run_ok("verify", "init", "own", "--map", "own.map")
    run_ok("verify", "own", "init", "--map", "own.map")


def test_tensors_of_two_dtypes_do_not_fill_one_target(
    tensors: dict[str, np.ndarray], capsys: Capture
):
    parts = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((2, 3), np.float16)}
    write_hf_folder(Path("parts"), {"model.safetensors": parts})
    Path("parts.map").write_text(
        "size x = 2\nsize y = 3\nt: (>x | x) y <- a: x y\nt: (x | >x) y <- b: x y\n"
    )
    error = run_failing(capsys, 1, "save-init", "parts", "--map", "parts.map", "--out", "init")
    assert "line 4: t would be float32 and float16" in error


def without_rotary(foreign: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors without the one that the map drops."""
    return {name: value for name, value in foreign.items() if name != "rotary.inv_freq"}


def test_export_with_the_map_is_the_way_back(tensors: dict[str, np.ndarray]):
    run_ok("save-init", "own", "--map", "own.map", "--pad-vocab", "8", "--out", "init")
    run_ok("export", "init", "--map", "own.map", "--shard-size", "20KB", "--out", "back")
    assert_same(read_tensors(Path("back")), without_rotary(foreign_tensors(tensors)))
    assert len(list(Path("back").glob("*.safetensors"))) > 1
    run_ok("export", "llama", "--map", "own.map", "--out", "renamed")
    assert_same(read_tensors(Path("renamed")), without_rotary(foreign_tensors(tensors)))
    run_ok("export", "llama", "--map", "own.map", "--dtype", "bfloat16", "--out", "short")
    assert {value.dtype.name for value in read_tensors(Path("short")).values()} == {"bfloat16"}


def test_outputs_of_a_map_need_no_file(tensors: dict[str, np.ndarray]):
    run_ok("save-init", "own", "--map", "own.map", "--out", "init")
    run_ok("export", "init", "--map", "own.map", "--out", "back")
    Path("own.map").unlink()
    run_ok("verify", "back")
    run_ok("verify", "back", "llama")
    run_ok("save-init", "back", "--mesh", "1,2,1", "--pad-vocab", "auto", "--out", "again")
    run_ok("verify", "again", "llama")
    run_ok("reshard", "again", "--mesh", "1,1,1", "--out", "resharded")
    flip_bit(Path("back/model.safetensors"), -5)
    assert main(["verify", "back", "-q"]) == 1
    assert main(["save-init", "back", "--out", "new", "-q"]) == 1
    record = json.loads(Path("again/prep-manifest.json").read_text())["map"]
    assert json.loads(Path("resharded/prep-manifest.json").read_text())["map"] == record
    assert record["xxh3"] == xxhash.xxh3_128_hexdigest(FAMILY_MAP.encode())


def test_export_of_kept_names_goes_through_the_map(tensors: dict[str, np.ndarray]):
    Path("tree.map").write_text(OWN_TREE_MAP)
    run_ok("save-init", "own", "--map", "tree.map", "--out", "init")
    run_ok("export", "init", "--map", "tree.map", "--out", "back")
    assert_same(read_tensors(Path("back")), without_rotary(foreign_tensors(tensors)))
    run_ok("verify", "back")
    run_ok("verify", "back", "init")


@pytest.mark.slow
def test_tied_head_is_written_where_the_map_names_it(tensors: dict[str, np.ndarray]):
    tied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    write_foreign_folder(Path("tied"), tied)
    Path("tied/config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    run_ok("save-init", "tied", "--map", "own.map", "--out", "init")
    assert "head" not in json.loads(Path("init/prep-manifest.json").read_text())["leaves"]
    run_ok("export", "init", "--map", "own.map", "--out", "back")
    assert_same(read_tensors(Path("back")), without_rotary(foreign_tensors(tied)))


def test_export_refuses_a_map_for_other_models_and_formats(
    tensors: dict[str, np.ndarray], capsys: Capture
):
    Path("tree.map").write_text(OWN_TREE_MAP)
    run_ok("save-init", "own", "--map", "own.map", "--out", "init")
    error = run_failing(capsys, 1, "export", "init", "--map", "tree.map", "--out", "back")
    assert "it has no `family` line, and the model is llama" in error
    Path("gpt2.map").write_text(FAMILY_MAP.replace("family llama", "family gpt2"))
    error = run_failing(capsys, 1, "export", "init", "--map", "gpt2.map", "--out", "back")
    assert "it has the line `family gpt2`, and the model is llama" in error
    short = FAMILY_MAP.replace("model.norm.weight: embed <- norm: 1 embed", "")
    Path("short.map").write_text(short)
    error = run_failing(capsys, 1, "export", "init", "--map", "short.map", "--out", "back")
    assert "model.norm.weight is in no row" in error
    words = ("export", "init", "--map", "own.map", "--layout", "easylm", "--out", "back")
    assert "is not supported for the layout easylm" in run_failing(capsys, 2, *words)


def test_inspect_shows_the_mapped_tensors(tensors: dict[str, np.ndarray], capsys: Capture):
    mapped = run_json(capsys, "inspect", "own", "--map", "own.map", "--stats")
    assert mapped["source"]["family"] == "llama"
    assert mapped["source"]["parameters"] == sum(value.size for value in tensors.values())
    assert {entry["name"]: tuple(entry["shape"]) for entry in mapped["tensors"]} == {
        name: value.shape for name, value in tensors.items()
    }
    for entry in mapped["tensors"]:
        assert entry["stats"]["max"] == pytest.approx(float(tensors[entry["name"]].max()))
    assert (
        main(["inspect", "own", "--map", "own.map", "--shards", "q.weight", "--mesh", "1,1,2"]) == 0
    )
    with_python = prep.inspect("own", map="own.map")
    assert {tensor.name for tensor in with_python.tensors} == tensors.keys()


def test_plan_of_a_mapped_checkpoint_is_that_of_its_family(
    tensors: dict[str, np.ndarray], capsys: Capture
):
    mapped = run_json(capsys, "plan", "own", "--map", "own.map", "--devices", "v5p:4")
    original = run_json(capsys, "plan", "llama", "--devices", "v5p:4")
    assert mapped["memory"] == original["memory"]
    error = run_failing(capsys, 2, "plan", "llama-7b-32k", "--map", "own.map")
    assert "`--map` has no effect for llama-7b-32k" in error


def test_map_that_swaps_names_keeps_no_digest_of_the_other():
    first = np.arange(6, dtype=np.float32).reshape(2, 3)
    swapped = {"a": first, "b": first + 10}
    write_hf_folder(Path("source"), {"model.safetensors": swapped})
    run_ok("save-init", "source", "--out", "kept")
    Path("swap.map").write_text("size x = 2\nsize y = 3\na: y x <- b: x y\nb: x y <- a: x y\n")
    run_ok("reshard", "kept", "--map", "swap.map", "--out", "new")
    run_ok("verify", "new")
    run_ok("export", "new", "--out", "hf")
    assert_same(read_tensors(Path("hf")), {"a": np.ascontiguousarray(swapped["b"].T), "b": first})
