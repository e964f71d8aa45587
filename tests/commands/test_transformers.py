"""Against transformers and torch, where they are installed: the folders load with no flag, and nothing changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prepcli.cli import main
from tests.models import GPT2, GPT_NEO, LLAMA, RELATIVES, make

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BASES = [GPT2, GPT_NEO, LLAMA, *RELATIVES.values()]
FAMILIES = pytest.mark.parametrize("base", BASES, ids=[base["model_type"] for base in BASES])


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


def load(folder: str) -> Any:
    """The model, with nothing missing, nothing unexpected and nothing of another shape."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert {key: list(value) for key, value in told.items() if value} == {}
    return model.eval()


def logits(model: Any, true_vocab: int) -> Any:
    ids = torch.arange(300).reshape(2, 150)[:, :60] % true_vocab
    with torch.no_grad():
        return model(ids).logits[..., :true_vocab]


@FAMILIES
def test_true_vocabulary_logits_of_a_padded_model_are_the_same_bits(base: dict[str, Any]):
    make(Path("m"), base)
    assert main(["pad-vocab", "./m", "--multiple", "8", "-q"]) == 0
    before, after = load("m"), load("m-padded")
    assert after.get_output_embeddings().weight.shape[0] == 136
    assert torch.equal(logits(before, 131), logits(after, 131))


@pytest.mark.parametrize(
    ("base", "dtype"),
    [*((base, dtype) for base in BASES[:3] for dtype in ("float32", "float16")), *((b, "bfloat16") for b in BASES)],
)
def test_what_transformers_saved_comes_back_as_it_saved_it(base: dict[str, Any], dtype: str):
    kind = transformers.AutoConfig.for_model(**base)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind, dtype=getattr(torch, dtype))
    model.save_pretrained("saved", max_shard_size="40KB")
    assert main(["save-init", "./saved", "--pad-vocab", "8", "--mesh", "1,4,2", "-q"]) == 0
    assert main(["export", "saved-init", "--out", "back", "-q"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained("back", dtype="auto")
    expected, found = model.state_dict(), again.state_dict()
    assert found.keys() == expected.keys()
    assert [n for n in found if found[n].dtype != expected[n].dtype or not torch.equal(found[n], expected[n])] == []
    assert json.loads(Path("back/config.json").read_text()) == json.loads(Path("saved/config.json").read_text())


@FAMILIES
def test_an_exported_model_has_the_logits_of_its_source(base: dict[str, Any]):
    make(Path("m"), base, legacy=True)
    assert main(["save-init", "./m", "--pad-vocab", "128", "-q"]) == 0
    assert main(["export", "m-init", "-q"]) == 0
    weights = transformers.AutoModelForCausalLM.from_pretrained("m", attn_implementation="eager", dtype=torch.float32)
    assert torch.equal(logits(weights.eval(), 131), logits(load("m-hf"), 131))
