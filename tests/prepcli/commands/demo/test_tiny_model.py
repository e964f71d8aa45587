"""The demo's model, read by prep, tokenizers and transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.commands.demo.tiny_model import CONFIG, VOCABULARY, write_tiny_model
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source

SENTENCE = "ba zul mou fen"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "tiny"
    write_tiny_model(folder)
    return folder


def test_tiny_model_is_a_valid_source(model: Path) -> None:
    source = open_source(locate(str(model)))
    assert source.family.name == "gpt_neo"
    assert len(source.files) == 3
    assert source.vocabulary().true_size == len(set(VOCABULARY)) == 257
    assert [path.name for path in source.side_files] == [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_tiny_model_has_deterministic_bytes(model: Path, tmp_path: Path) -> None:
    nbytes = write_tiny_model(tmp_path / "again")
    assert nbytes == sum(tensor.nbytes for tensor in open_source(locate(str(model))).tensors)
    for path in model.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_tiny_model_tokenizes_every_word(model: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    assert tokenizer.encode(" ".join(VOCABULARY)).ids == list(range(len(VOCABULARY)))
    assert tokenizer.encode("stranger").ids == [VOCABULARY.index("<unk>")]


@pytest.mark.slow
def test_tiny_model_loads_in_transformers(model: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        model, output_loading_info=True
    )
    assert {name: list(problems) for name, problems in info.items() if problems} == {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = tokenizer(SENTENCE, return_tensors="pt")
    assert tokenizer.decode(ids["input_ids"][0]) == SENTENCE
    assert loaded(**ids).logits.shape == (1, 4, 257)
