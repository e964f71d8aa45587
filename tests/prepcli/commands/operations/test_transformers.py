"""Round trips of models through transformers and torch, where installed: equal files, tensors and logits.

`tests/prepcli/commands/testing/test_checks.py` tests every family in other dtypes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.testing.checks import FamilyUnderTest, check_same_checkpoint
from prepcli.commands.testing.tiny_model import load_torch_model
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


def compute_logits(model: Any, true_vocab: int) -> Any:
    ids = torch.arange(300).reshape(2, 150)[:, :60] % true_vocab
    more = {"decoder_input_ids": ids.flip(0)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(ids, **more).logits[..., :true_vocab]


@FAMILIES
def test_model_saved_by_transformers_round_trips(base: dict[str, Any], tmp_path: Path):
    saved = FamilyUnderTest(base, tmp_path).save_with_transformers("float16")
    assert main(["save-init", str(saved), "--pad-vocab", "8", "--mesh", "1,4,2", "-q"]) == 0
    assert main(["export", "float16-init", "--out", "back", "-q"]) == 0
    check_same_checkpoint(saved, tmp_path / "back")


@FAMILIES
def test_exported_model_has_the_same_logits(base: dict[str, Any], tmp_path: Path):
    make_checkpoint(Path("m"), base, legacy=True)
    assert main(["save-init", "./m", "--pad-vocab", "128", "-q"]) == 0
    assert main(["export", "m-init", "-q"]) == 0
    # The old buffers of this file have no place in the model.
    model = transformers.AutoModelForCausalLM.from_pretrained("m", attn_implementation="eager")
    exported = load_torch_model(tmp_path / "m-hf")
    expected = compute_logits(model.float().eval(), 131)
    assert torch.equal(expected, compute_logits(exported, 131))


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
