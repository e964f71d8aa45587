"""Checkpoints of PyTorch and of Meta, whose files are tensor-parallel shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.sources.openers.tensor_files import MAX_SHARING_TENSORS, safetensors_file_name
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.llama_trees import expected_output, read_init
from tests.helpers.pickle_builder import (
    encode_call,
    encode_mapping,
    encode_storage,
    encode_tensor,
    encode_text,
    make_pickle,
    make_torch_file,
    make_zip_file,
)
from tests.helpers.run_cli import (
    Capture,
    MonkeyPatch,
    error_lines,
    exported_tensors,
    run_json,
    run_ok,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    GPT_NEO,
    LLAMA,
    assert_same,
    make_checkpoint,
    read_tensors,
    same_bits,
)
from tests.helpers.torch_checkpoints import to_torch, write_bin_folder, write_meta_folder

# Tensors of old files that are no parameters.
BUFFERS = {"bias", "masked_bias", "inv_freq"}


@pytest.fixture(autouse=True)
def _work_dir(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def manifest_facts(folder: str) -> dict[str, Any]:
    """Return the entries of a manifest that do not depend on the source's format."""
    manifest = json.loads(Path(folder, "prep-manifest.json").read_text())
    keys = ("tensors", "leaves", "config", "tied", "vocab", "prefixed")
    return {key: manifest.get(key) for key in keys}


def write_weights_folder(folder: str, weights: bytes, file: str = "pytorch_model.bin") -> None:
    """Write a folder with the config of `m` and one file of weights."""
    Path(folder).mkdir()
    Path(folder, "config.json").write_bytes(Path("m/config.json").read_bytes())
    Path(folder, file).write_bytes(weights)


# Without torch
@pytest.mark.parametrize("dtype", slow_except(["float32", "bfloat16", "float16"], ["bfloat16"]))
def test_init_from_bin_equals_safetensors(dtype: str) -> None:
    tensors = make_checkpoint(Path("m"), LLAMA, dtype, legacy=True)
    write_weights_folder("b", make_torch_file(tensors))
    for source in ("m", "b"):
        run_ok("save-init", f"./{source}", "--mesh", "1,2,4", "--pad-vocab", "auto")
    assert manifest_facts("b-init") == manifest_facts("m-init")
    for pair in (("b-init",), ("b-init", "m-init"), ("b-init", "./m"), ("./b", "./m")):
        run_ok("verify", *pair)
    run_ok("export", "b-init", "--out", "back")
    run_ok("export", "m-init", "--out", "other")
    actual = read_tensors(Path("back"))
    assert_same(actual, read_tensors(Path("other")))
    # An export leaves out the buffers of old files.
    assert_same(actual, {key: tensors[key] for key in actual})
    assert {key.rpartition(".")[2] for key in tensors.keys() - actual} <= BUFFERS


def test_export_of_bin_writes_safetensors(capsys: Capture) -> None:
    tensors = make_checkpoint(Path("m"))
    write_weights_folder("b", make_torch_file(tensors))
    run_ok("export", "./b")
    actual = read_tensors(Path("b-hf"))
    assert all(same_bits(array, actual[key]) for key, array in tensors.items())
    capsys.readouterr()
    assert "transformers reads already" in error_lines(capsys, "export", "./m")[1]


def test_safetensors_file_name_of_bin() -> None:
    assert safetensors_file_name("pytorch_model.bin") == "model.safetensors"
    name = safetensors_file_name("pytorch_model-00002-of-00003.bin")
    assert name == "model-00002-of-00003.safetensors"
    assert safetensors_file_name("weights.v2.pth") == "weights.v2.safetensors"


def test_safetensors_take_precedence_over_bin(capsys: Capture) -> None:
    tensors = make_checkpoint(Path("m"), files=1)
    Path("m/pytorch_model.bin").write_bytes(b"broken")
    write_weights_folder("b", make_torch_file(tensors), "weights.pth")
    Path("b/training_args.bin").write_bytes(b"broken")
    run_ok("verify", "./b", "./m")
    assert_same(exported_tensors("./b"), tensors)
    capsys.readouterr()
    Path("b/other.pt").write_bytes(b"")
    assert "does not say which file the model is" in error_lines(capsys, "save-init", "./b")[0]


def encode_state(tensors: Mapping[str, np.ndarray]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return float32 tensors as a pickle has them, each with a storage of its own, and the records of the storages."""
    pickled: dict[str, bytes] = {}
    records: dict[str, bytes] = {}
    for number, (key, array) in enumerate(tensors.items()):
        strides = [stride // 4 for stride in array.strides]
        storage = encode_storage(str(number), numel=array.size)
        pickled[key] = encode_tensor(array.shape, strides, storage=storage)
        records[f"data/{number}"] = array.tobytes()
    return pickled, records


def test_state_dict_inside_trainer_file_is_read(capsys: Capture) -> None:
    tensors = make_checkpoint(Path("m"))
    pickled, records = encode_state(tensors)
    content = encode_mapping({"epoch": b"K\x03", "state_dict": encode_mapping(pickled)})
    write_weights_folder("b", make_zip_file(make_pickle(content), records))
    run_ok("verify", "./b", "./m")
    assert_same(exported_tensors("./b"), tensors)
    report = run_json(capsys, "inspect", "./b")
    assert report["source"]["others"] == ["pytorch_model.bin: `epoch` is 3"]
    assert report["source"]["format"] == "torch"


def test_transposed_views_of_one_storage_are_read() -> None:
    """Every matrix is a transposed view, and all tensors share one storage."""
    tensors = make_checkpoint(Path("m"))
    pickled, content = {}, b""
    total = sum(array.size for array in tensors.values())
    for key, array in tensors.items():
        steps = (1, array.shape[0]) if array.ndim == 2 else (1,) * array.ndim
        pickled[key] = encode_tensor(
            array.shape, steps, len(content) // 4, encode_storage(numel=total)
        )
        content += array.T.tobytes()
    write_weights_folder(
        "b", make_zip_file(make_pickle(encode_mapping(pickled)), {"data/0": content})
    )
    run_ok("save-init", "./b", "--mesh", "1,2,4", "--pad-vocab", "auto")
    run_ok("verify", "b-init", "./m")
    assert_same(exported_tensors("b-init"), tensors)
    run_ok("pad-vocab", "./b")
    run_ok("verify", "b-padded", "./m")
    assert_same(exported_tensors("./b"), tensors)


@pytest.mark.parametrize("sharing", [2, MAX_SHARING_TENSORS, MAX_SHARING_TENSORS + 1])
def test_tensors_may_share_one_storage(capsys: Capture, sharing: int) -> None:
    tensors = make_checkpoint(Path("m"))
    pickled, records = encode_state(tensors)
    shared = pickled["transformer.wte.weight"]
    pickled["lm_head.weight"] = shared
    for i in range(sharing - 2):
        pickled[f"h.{i}.attn.attention.masked_bias"] = shared
    write_weights_folder("b", make_zip_file(make_pickle(encode_mapping(pickled)), records))
    if sharing > MAX_SHARING_TENSORS:
        assert "more than 64 tensors share byte" in error_lines(capsys, "save-init", "./b")[1]
        return
    run_ok("save-init", "./b")
    dropped = json.loads(Path("b-init/prep-manifest.json").read_text())["dropped"]
    rules = {entry["name"]: entry["rule"] for entry in dropped}
    assert rules["lm_head.weight"] == "equal to wte.weight"
    assert len(dropped) == sharing - 1
    run_ok("verify", "b-init", "./m")
    assert_same(exported_tensors("b-init"), tensors)


def test_inspect_of_bin_equals_safetensors(capsys: Capture) -> None:
    tensors = make_checkpoint(Path("m"), files=1)
    write_weights_folder("b", make_torch_file(tensors))
    expected, report = (
        run_json(capsys, "inspect", f"./{source}", "--stats", "--sort", "name")
        for source in ("m", "b")
    )
    kept = ("name", "shape", "dtype", "bytes", "stats")
    assert [{key: t[key] for key in kept} for t in report["tensors"]] == [
        {key: t[key] for key in kept} for t in expected["tensors"]
    ]
    content = Path("b/pytorch_model.bin").read_bytes()
    for entry in report["tensors"]:
        stored = content[entry["offset"] :][: entry["bytes"]]
        assert stored == tensors[entry["name"]].tobytes()
    assert run_json(capsys, "inspect", "./b", "--diff", "./m")["differences"] == []
    assert main(["inspect", "./b", "-q"]) == 0
    assert "PyTorch, 1 file" in capsys.readouterr().out


def test_stats_cover_only_the_elements_of_a_view(capsys: Capture) -> None:
    Path("b").mkdir()
    view = encode_tensor((2, 2), (3, 2), storage=encode_storage())
    Path("b/pytorch_model.bin").write_bytes(make_zip_file(make_pickle(encode_mapping({"w": view}))))
    (entry,) = run_json(capsys, "inspect", "./b", "--stats")["tensors"]
    # The view has the elements 0, 2, 3 and 5.
    assert entry["stats"] == {"min": 0, "max": 5, "mean": 2.5, "nan": 0, "inf": 0, "zeros": 1}
    assert (entry["file"], entry["shape"]) == ("pytorch_model.bin", [2, 2])


def test_pickle_code_in_any_shard_is_rejected(capsys: Capture) -> None:
    tensors = make_checkpoint(Path("m"))
    evil = make_pickle(encode_mapping({"x": encode_call("os.system", encode_text("touch pwned"))}))
    write_weights_folder("b", make_torch_file(tensors), "pytorch_model-00001-of-00002.bin")
    Path("b/pytorch_model-00002-of-00002.bin").write_bytes(make_zip_file(evil))
    for command in ("save-init", "pad-vocab", "inspect"):
        lines = error_lines(capsys, command, "./b")
        assert lines[0] == "error: pytorch_model-00002-of-00002.bin refers to `os.system`"
        assert lines[2].startswith(" hint: if you trust it, load it with PyTorch")
    assert not Path("pwned").exists()
    assert sorted(path.name for path in Path().iterdir()) == ["b", "m"]


# With torch
def test_files_saved_by_torch_convert() -> None:
    tensors = make_checkpoint(Path("m"), LLAMA, "bfloat16", legacy=True)
    state = {key: to_torch(array) for key, array in tensors.items()}
    write_bin_folder(Path("m"), Path("b"), state, 3)
    run_ok("save-init", "./b", "--mesh", "1,4,2", "--pad-vocab", "8")
    run_ok("verify", "b-init", "./m")
    actual = exported_tensors("b-init")
    assert_same(actual, {key: tensors[key] for key in actual})
    assert {key.rpartition(".")[2] for key in tensors.keys() - actual} <= BUFFERS
    run_ok("pad-vocab", "./b")
    run_ok("verify", "b-padded", "./m")
    padded = read_tensors(Path("b-padded"))
    assert all(same_bits(padded[key][: len(array)], array) for key, array in actual.items())
    assert len(list(Path("b-padded").glob("*.safetensors"))) == 3


def test_state_dict_of_transformers_converts() -> None:
    """Buffers and parameters are saved from `state_dict()`."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**LLAMA)
    )
    model.save_pretrained("m")
    Path("b").mkdir()
    Path("b/config.json").write_bytes(Path("m/config.json").read_bytes())
    torch.save(model.state_dict(), "b/pytorch_model.bin")
    run_ok("save-init", "./b")
    run_ok("verify", "b-init", "./m")
    assert_same(exported_tensors("b-init"), read_tensors(Path("m")))


# Conversions of Meta's LLaMA checkpoints, whose files are tensor-parallel shards


torch = lazy_module("torch")
SMALL_LLAMA = LLAMA | {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2,
                 "vocab_size": 132}  # fmt: skip


class MetaModel:
    """LLaMA as safetensors in `m`, which `write_folder` writes in Meta's layout."""

    def __init__(self, **changes: Any) -> None:
        self.config = SMALL_LLAMA | changes
        arrays = make_checkpoint(Path("m"), self.config, "bfloat16")
        self.tensors = {key: to_torch(array) for key, array in arrays.items()}

    def write_folder(self, files: int, embedding_axis: int = 1) -> Path:
        return write_meta_folder(Path("meta"), self.config, self.tensors, files, embedding_axis)


@pytest.fixture
def meta() -> MetaModel:
    return MetaModel()


@pytest.mark.parametrize(
    ("files", "axis"), slow_except([(1, 1), (2, 0), (2, 1), (4, 0), (4, 1)], [(2, 0), (2, 1)])
)
def test_meta_shards_convert_to_the_hf_model(meta: MetaModel, files: int, axis: int) -> None:
    meta.write_folder(files, axis)
    expected = read_tensors(Path("m"))
    leaves = expected_output("init", expected, meta.config)
    for mesh in ((), ("--mesh", "1,2,4")):
        run_ok("save-init", "./meta", *mesh, "--overwrite")
        run_ok("verify", "meta-init", "./m")
        assert_same(read_init(Path("meta-init")), leaves)
    run_ok("verify", "./meta", "./m")
    run_ok("pad-vocab", "./meta", "--multiple", "1")
    tensors = read_tensors(Path("meta-padded")).items()
    assert {key for key, _ in tensors} == {*meta.tensors, "model.rope.freqs"}
    assert_same({key: array for key, array in tensors if key in expected}, expected)
    copied = {path.name for path in Path("meta-init/hf").iterdir()}
    assert copied == {"config.json", "tokenizer.model"}


def test_single_kv_head_converts() -> None:
    MetaModel(num_key_value_heads=1).write_folder(1)
    run_ok("save-init", "./meta")
    run_ok("verify", "meta-init", "./m")
    assert_same(exported_tensors("meta-init"), read_tensors(Path("m")))


def test_meta_export_has_the_same_logits(meta: MetaModel) -> None:
    transformers = pytest.importorskip("transformers")
    meta.write_folder(2)
    run_ok("export", "./meta", "--out", "back")
    ids = torch.arange(60).reshape(2, 30)
    logits = []
    for folder in ("m", "back"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(*logits)


def test_inspect_shows_merged_meta_tensors(meta: MetaModel, capsys: Capture) -> None:
    meta.write_folder(2)
    expected, report = (
        run_json(capsys, "inspect", f"./{source}", "--stats", "--sort", "name")
        for source in ("m", "meta")
    )
    entries = [
        {key: t[key] for key in ("name", "shape", "dtype", "bytes")} for t in report["tensors"]
    ]
    extra = {"name": "rope.freqs", "shape": [4], "dtype": "float32", "bytes": 16}
    assert extra in entries
    entries.remove(extra)
    assert entries == [{key: t[key] for key in entries[0]} for t in expected["tensors"]]
    expected_least = {t["name"]: t["stats"]["min"] for t in expected["tensors"]}
    least = {t["name"]: t["stats"]["min"] for t in report["tensors"]}
    assert least == expected_least | {"rope.freqs": least["rope.freqs"]}
    assert {t["file"] for t in report["tensors"]} == {"consolidated.00.pth"}


def remove_file(file: str) -> Callable[[], None]:
    return lambda: Path("meta", file).unlink()


def change_params(**changes: Any) -> Callable[[], None]:
    """Return a function that changes keys of params.json. None removes a key."""

    def edit() -> None:
        path = Path("meta/params.json")
        params = json.loads(path.read_text()) | changes
        path.write_text(
            json.dumps({key: value for key, value in params.items() if value is not None})
        )

    return edit


def change_part(number: int, edit: Callable[[dict[str, Any]], object]) -> Callable[[], None]:
    """Return a function that changes the tensors of one file."""

    def change() -> None:
        path = Path(f"meta/consolidated.{number:02d}.pth")
        state = torch.load(path, weights_only=True)
        edit(state)
        torch.save(state, path)

    return change


WQ, WK = "layers.0.attention.wq.weight", "layers.1.attention.wk.weight"
INVALID_FOLDERS = {
    "no params": (remove_file("params.json"), "./meta has no params.json", "number of heads"),
    "broken params": (lambda: Path("meta/params.json").write_text("{"), "meta/params.json is broken", "JSON"),
    "params of another model": (change_params(moe={}), "meta/params.json is invalid", "it has moe"),
    "other heads": (
        change_params(n_kv_heads=8), "`layers.0.attention.wk.weight` in consolidated.00.pth", "implies [16, 64]",
    ),
    "heads that files do not divide": (
        change_params(n_heads=1, n_kv_heads=1), "attention heads are split across files", "by 4 files",
    ),
    "a file is missing": (remove_file("consolidated.02.pth"), "consolidated.02.pth is missing", "has 3 such files"),
    "the last file is missing": (
        remove_file("consolidated.03.pth"), "attention heads are split across files", "are not divisible by 3",
    ),
    "half of the files": (
        lambda: [Path(f"meta/consolidated.0{i}.pth").unlink() for i in (2, 3)], "`tok_embeddings.weight` in",
        "in each of 2 files",
    ),
    "a part is missing": (
        change_part(2, lambda state: state.pop(WQ)), f"consolidated.02.pth lacks `{WQ}`", "part of each",
    ),
    "a part of another dtype": (
        change_part(1, lambda state: state.update({WK: state[WK].half()})), f"the parts of `{WK}` differ",
        "bfloat16 and float16",
    ),
    "a part of another shape": (
        change_part(1, lambda state: state.update({WK: state[WK][:4]})),
        f"`{WK}` in consolidated.01.pth has shape [4, 64]", "[8, 64]",
    ),
    "a part that is a view": (
        change_part(1, lambda state: state.update({WK: state[WK].t().contiguous().t()})),
        f"`{WK}` is a view", "not contiguous",
    ),
    "a tensor without a place": (
        lambda: [change_part(i, lambda state: state.update(x=state["norm.weight"]))() for i in range(4)],
        "1 tensor of ./meta is not part of family", "x [64]",
    ),
    "a tensor less in all files": (
        lambda: [change_part(i, lambda state: state.pop(WQ))() for i in range(4)],
        "1 tensor of ./meta is missing", "layers.0.self_attn.q_proj.weight",
    ),
    "another model's config": (
        lambda: Path("meta/config.json").write_text(json.dumps(GPT_NEO)), "./meta has the wrong model_type", "gpt_neo",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "what", "why"), INVALID_FOLDERS.values(), ids=INVALID_FOLDERS)
def test_inconsistent_meta_folder_is_rejected(
    meta: MetaModel, capsys: Capture, spoil: Callable[[], object], what: str, why: str
) -> None:
    meta.write_folder(4)
    spoil()
    lines = error_lines(capsys, "save-init", "./meta")
    assert what in lines[0]
    assert why in lines[1]
    assert sorted(path.name for path in Path().iterdir()) == ["m", "meta"]


def test_config_json_overrides_params_json(meta: MetaModel) -> None:
    folder = meta.write_folder(2)
    (folder / "params.json").unlink()
    (folder / "config.json").write_text(json.dumps(meta.config | {"rope_theta": 7.5}))
    run_ok("save-init", "./meta")
    run_ok("verify", "meta-init", "./m")
    assert_same(exported_tensors("meta-init"), read_tensors(Path("m")))
    assert json.loads(Path("meta-init/hf/config.json").read_text())["rope_theta"] == 7.5


def test_meta_folder_without_head_is_tied(meta: MetaModel) -> None:
    folder = meta.write_folder(2)
    for number in range(2):
        change_part(number, lambda state: state.pop("output.weight"))()
    run_ok("save-init", "./meta")
    manifest = json.loads((Path("meta-init/prep-manifest.json")).read_text())
    assert manifest["tied"] is True
    assert folder.exists()
    assert "lm_head.weight" not in manifest["tensors"]
