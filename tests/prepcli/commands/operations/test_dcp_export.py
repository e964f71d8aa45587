"""`prep export --format dcp`: torch and transformers load it, and prep reads it back without a changed bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from tests.helpers.run_cli import error_lines, run_failing, run_ok
from tests.helpers.tiny_checkpoints import GROUPED_QUERY, assert_same, make_checkpoint, read_tensors

LLAMA = GROUPED_QUERY | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
MIXTRAL = GROUPED_QUERY | {"model_type": "mixtral", "num_local_experts": 4}


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
@pytest.mark.parametrize("size", ["20000B", "5GB"])
def test_dcp_returns_every_bit(config: dict[str, Any], size: str):
    tensors = make_checkpoint(Path("model"), config, "bfloat16")
    run_ok("save-init", "./model", "--out", "init", "--pad-vocab", "8")
    run_ok("export", "init", "--format", "dcp", "--shard-size", size, "--out", "out")
    assert (len(list(Path("out").glob("*.distcp"))) > 1) == (size == "20000B")
    run_ok("verify", "out")
    run_ok("verify", "out", "./model")
    run_ok("export", "out", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


@pytest.mark.filterwarnings("ignore")
def test_torch_and_transformers_load_the_export():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.distributed.checkpoint.state_dict_loader import load

    make_checkpoint(Path("model"), LLAMA)
    run_ok("export", "./model", "--format", "dcp", "--out", "out")
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained("out")
    )
    state = model.state_dict()
    load(state, checkpoint_id="out")
    model.load_state_dict(state)
    expected = transformers.AutoModelForCausalLM.from_pretrained("model")
    for name, parameter in expected.state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name]), name


def test_default_name_and_report():
    make_checkpoint(Path("model"), LLAMA)
    conversion = prep.export("model", format="dcp")
    assert conversion.path.name == "model-dcp"
    assert prep.export("model", format="dcp").already_done


# Byte 383 is padding before the first payload, and byte 5,000 is in the embedding.
@pytest.mark.parametrize(
    ("name", "position"), [("__0_0.distcp", 5_000), ("__0_0.distcp", 383), (".metadata", 20)]
)
def test_damaged_dcp_is_found(name: str, position: int, capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("model"), LLAMA)
    run_ok("export", "./model", "--format", "dcp", "--out", "out")
    path = Path("out") / name
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    message = run_failing(capsys, 1, "verify", "out")
    if position != 5_000:
        assert f"{name} is" in message


def test_short_file_is_named(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("model"), LLAMA)
    run_ok("export", "./model", "--format", "dcp", "--out", "out")
    path = Path("out/__0_0.distcp")
    path.write_bytes(path.read_bytes()[:-1])
    message = run_failing(capsys, 1, "verify", "out")
    assert "out/__0_0.distcp is broken" in message


def test_dtype_is_cast():
    tensors = make_checkpoint(Path("model"), LLAMA, "bfloat16")
    run_ok("export", "./model", "--format", "dcp", "--dtype", "float32", "--out", "out")
    run_ok("export", "out", "--out", "back")
    wide = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    assert_same(read_tensors(Path("back")), wide)


def test_format_of_another_layout_is_refused(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("model"), LLAMA)
    lines = error_lines(capsys, "export", "./model", "--layout", "easylm", "--format", "dcp")
    assert lines[0] == "error: `--layout easylm` `--format dcp` is not supported"
    assert "the layout easylm has the format stream" in lines[1]


def test_unknown_layout_has_a_suggestion(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("model"), LLAMA)
    lines = error_lines(capsys, "export", "./model", "--layout", "maxtex")
    assert lines[0] == "error: `--layout maxtex` is unknown"
    assert "maxtext" in lines[-1]


@pytest.mark.parametrize("words", [("--format", "dcp"), ("--layout", "maxtext")])
def test_verify_chain_accepts_an_export(words: tuple[str, str]):
    make_checkpoint(Path("model"), LLAMA, "bfloat16")
    run_ok("save-init", "./model", "--out", "init")
    run_ok("export", "init", *words, "--out", "out")
    run_ok("verify", "out", "--chain")
