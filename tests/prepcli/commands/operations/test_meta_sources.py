"""Conversions of Meta's LLaMA checkpoints, whose files are tensor-parallel shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.lazy_modules import lazy_module
from tests.helpers.llama_trees import expected_output, read_init
from tests.helpers.run_cli import error_lines, exported_tensors, run_json, run_ok
from tests.helpers.tiny_checkpoints import (
    GPT_NEO,
    LLAMA,
    assert_same,
    make_checkpoint,
    read_tensors,
)
from tests.helpers.torch_checkpoints import to_torch, write_meta_folder

torch = lazy_module("torch")

SMALL_LLAMA = LLAMA | {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2,
                 "vocab_size": 132}  # fmt: skip


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


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


@pytest.mark.parametrize(("files", "axis"), [(1, 1), (2, 0), (2, 1), (4, 0), (4, 1)])
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
    assert sorted(path.name for path in Path("meta-init/hf").iterdir()) == [
        "config.json",
        "tokenizer.model",
    ]


def test_single_kv_head_converts() -> None:
    MetaModel(num_key_value_heads=1).write_folder(1)
    run_ok("save-init", "./meta")
    run_ok("verify", "meta-init", "./m")
    assert_same(exported_tensors("meta-init"), read_tensors(Path("m")))


@pytest.mark.parametrize("files", [1, 2, 4])
def test_meta_export_has_the_same_logits(meta: MetaModel, files: int) -> None:
    transformers = pytest.importorskip("transformers")
    meta.write_folder(files)
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


def test_inspect_shows_merged_meta_tensors(
    meta: MetaModel, capsys: pytest.CaptureFixture[str]
) -> None:
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
    least = {t["name"]: t["stats"]["min"] for t in expected["tensors"]}
    assert {
        t["name"]: t["stats"]["min"] for t in report["tensors"] if t["name"] != "rope.freqs"
    } == least
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
    meta: MetaModel,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[], object],
    what: str,
    why: str,
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
