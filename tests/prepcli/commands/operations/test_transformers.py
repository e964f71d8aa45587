"""Round trips of models through transformers and torch, where installed: equal files, tensors and logits.

`tests/prepcli/commands/testing/test_checks.py` tests every family in other dtypes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.tiny_checkpoints import ALL_CONFIGS, FAMILY_CONFIGS, make_checkpoint

torch = lazy_module("torch")
transformers = lazy_module("transformers")

T5 = FAMILY_CONFIGS["t5"]
FAMILIES = pytest.mark.parametrize(
    "base", ALL_CONFIGS[:3], ids=[base["model_type"] for base in ALL_CONFIGS[:3]]
)


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


def auto_class(base: dict[str, Any]) -> Any:
    """Return the auto class for models of this config."""
    return (
        transformers.AutoModelForSeq2SeqLM
        if base["model_type"] == "t5"
        else transformers.AutoModelForCausalLM
    )


def load_model(folder: str) -> Any:
    """Load a model. Fail if tensors are missing, unexpected or of another shape."""
    model, loading_info = auto_class(
        json.loads(Path(folder, "config.json").read_text())
    ).from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert {key: list(value) for key, value in loading_info.items() if value} == {}
    return model.eval()


def compute_logits(model: Any, true_vocab: int) -> Any:
    ids = torch.arange(300).reshape(2, 150)[:, :60] % true_vocab
    more = {"decoder_input_ids": ids.flip(0)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(ids, **more).logits[..., :true_vocab]


@FAMILIES
def test_model_saved_by_transformers_round_trips(base: dict[str, Any]):
    kind = transformers.AutoConfig.for_model(**base)
    torch.manual_seed(0)
    model = auto_class(base).from_config(kind, dtype=torch.float16)
    model.save_pretrained("saved", max_shard_size="40KB")
    assert main(["save-init", "./saved", "--pad-vocab", "8", "--mesh", "1,4,2", "-q"]) == 0
    assert main(["export", "saved-init", "--out", "back", "-q"]) == 0
    again = auto_class(base).from_pretrained("back", dtype="auto")
    expected, actual = model.state_dict(), again.state_dict()
    assert actual.keys() == expected.keys()
    assert [
        n
        for n in actual
        if actual[n].dtype != expected[n].dtype or not torch.equal(actual[n], expected[n])
    ] == []
    assert json.loads(Path("back/config.json").read_text()) == json.loads(
        Path("saved/config.json").read_text()
    )


@FAMILIES
def test_exported_model_has_the_same_logits(base: dict[str, Any]):
    make_checkpoint(Path("m"), base, legacy=True)
    assert main(["save-init", "./m", "--pad-vocab", "128", "-q"]) == 0
    assert main(["export", "m-init", "-q"]) == 0
    weights = auto_class(base).from_pretrained(
        "m", attn_implementation="eager", dtype=torch.float32
    )
    assert torch.equal(compute_logits(weights.eval(), 131), compute_logits(load_model("m-hf"), 131))


def test_untied_t5_head_stays_untied():
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
    expected, actual = model.eval(), load_model("back")
    assert not torch.equal(actual.lm_head.weight, actual.shared.weight)
    assert all(
        torch.equal(tensor, expected.state_dict()[name])
        for name, tensor in actual.state_dict().items()
    )
    assert torch.equal(compute_logits(expected, 131), compute_logits(actual, 131))
