"""`prep train` on pairs, prompts, conversations and packed documents: the losses of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, STOPPED, USAGE
from tests.helpers.manifests import changed_manifest
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, LLAMA, make_checkpoint, read_tensors
from tests.helpers.train_runs import (
    read_losses,
    set_keys,
    train_error,
    train_json,
)
from tests.helpers.training_folder import WORDS, write_tokenizer

# `prep train` on pairs of source and target: bit-exact resumption, and the same loss as transformers.

PAIRS_RECIPE = """\
seed = 3
mesh = "1,2,4"
[model]
path = "tiny-init"
[data]
type = "json"
path = "pairs.jsonl"
fields = "[first], [second], sum"
source_length = 9
source_prefix = "w5 "
seq_length = 6
holdout = 0.1
[batch]
size = 8
[optimizer]
lr = 3e-2
warmup_steps = 2
[train]
steps = 12
log_every = 1
[checkpoint]
every = 3
"""


def make_text_pairs() -> list[dict[str, str]]:
    """Return texts of two fields, with a target that repeats the ends of both. Some exceed the recipe's lengths."""
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(120):
        first, second = (
            [WORDS[n] for n in rng.integers(2, 40, rng.integers(1, 7))] for _ in range(2)
        )
        pairs.append(
            {
                "first": " ".join(first),
                "second": " ".join(second),
                "sum": " ".join(first[-3:] + second[-4:]),
            }
        )
    return pairs


@pytest.fixture
def pairs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_pairs_folder()
    return tmp_path


def make_pairs_folder() -> None:
    """Write a recipe, pairs, a T5 model and its init to the current folder."""
    make_checkpoint(Path("tiny"), FAMILY_CONFIGS["t5"])
    write_tokenizer(Path("tiny"))
    run_ok("save-init", "tiny", "--pad-vocab", "8", "--mesh", "1,2,4")
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in make_text_pairs()))
    Path("recipe.toml").write_text(PAIRS_RECIPE)


def ids_of(text: str, max_length: int) -> list[int]:
    ids = [WORDS.index(word) for word in text.split()] + [1]
    return ids if len(ids) <= max_length else [*ids[: max_length - 1], 1]


def test_seq2seq_loss_equals_transformers(pairs_dir: Path, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    code, report = train_json(capsys, "--set", "mesh=1,4,2")
    assert (code, report["step"]) == (OK, 12)
    assert report["loss"] < read_losses("runs/recipe")[0] - 0.3
    assert report["tokens"] == 12 * 8 * (9 + 6)
    assert main(["plan", "recipe.toml", "--devices", "v5p:8", "--json"]) == OK
    plan = json.loads(capsys.readouterr().out)
    assert plan["tokens"] == 8 * (9 + 6), "the plan counts the tokens of the run"
    (kind,) = plan["kinds"]
    assert kind["tokens_per_s"] == pytest.approx(8 * (9 + 6) / kind["step_s"])
    assert main(["plan", "recipe.toml"]) == OK
    assert "batch 8 x 15 = 120 tokens per step" in capsys.readouterr().out
    run_ok("export", "runs/recipe", "--out", "learned")
    assert read_tensors(Path("learned")).keys() == read_tensors(Path("tiny")).keys()
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        "learned", dtype=torch.float32
    ).eval()
    holdout = make_text_pairs()[-12:]
    sources = [ids_of(f"w5 {pair['first']} {pair['second']}", 9) for pair in holdout]
    targets = [ids_of(pair["sum"], 6) for pair in holdout]
    padded = torch.tensor([ids + [0] * (9 - len(ids)) for ids in sources])
    attention_mask = torch.tensor([[1] * len(ids) + [0] * (9 - len(ids)) for ids in sources])
    labels = torch.tensor([ids + [-100] * (6 - len(ids)) for ids in targets])
    with torch.no_grad():
        loss = float(model(padded, attention_mask=attention_mask, labels=labels).loss)
    assert report["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert report["eval_tokens"] == sum(map(len, targets))


def train_refusal(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, ...]:
    code, what, why, _ = train_error(capsys, *words)
    return code, what, why


def test_mismatch_of_data_and_model_is_rejected(
    pairs_dir: Path, capsys: pytest.CaptureFixture[str]
):
    for words in (("data.fields=sum",), ("data.type=text", "data.path=recipe.toml")):
        cleared = Path("recipe.toml").read_text()
        for line in (
            'fields = "[first], [second], sum"\n',
            "source_length = 9\n",
            'source_prefix = "w5 "\n',
        ):
            cleared = cleared.replace(line, "")
        Path("other.toml").write_text(cleared)
        sets = set_keys(*words)
        capsys.readouterr()
        code = main(["train", "other.toml", "--json", *sets])
        out = capsys.readouterr().out
        assert code == USAGE, out
        error = json.loads(out)["error"]
        assert error["what"] == "t5 has an encoder, but the data has no source column"
        assert "or on text by span corruption" in error["why"]
    make_checkpoint(pairs_dir / "llama", LLAMA)
    write_tokenizer(pairs_dir / "llama")
    run_ok("save-init", "llama", "--pad-vocab", "8", "--mesh", "1,2,4")
    code, what, why = train_refusal(capsys, "--set", "model.path=llama-init")
    assert (code, what) == (USAGE, "`data.source_length` is 9")
    assert why == "llama has no encoder to read the source columns in brackets"
    cleared = Path("recipe.toml").read_text().replace("source_length = 9\n", "")
    Path("other.toml").write_text(cleared)
    assert main(["train", "other.toml", "--json"]) == USAGE
    assert json.loads(capsys.readouterr().out)["error"]["what"] == "`data.source_length` is missing"
    assert train_refusal(capsys, "--set", "data.fields=[first], third")[:2] == (
        FAILED, "pairs.jsonl:1: no column `third`"
    )  # fmt: skip


def change_init_config(**changes: int | None) -> None:
    """Change keys of the config in the init's manifest."""
    with changed_manifest(Path("tiny-init")) as manifest:
        manifest["config"] |= changes


def test_missing_eos_token_is_a_warning(pairs_dir: Path, capsys: pytest.CaptureFixture[str]):
    change_init_config(eos_token_id=None)
    assert main(["train", "recipe.toml", "--set", "mesh=1,4,2", "--stop-after", "1"]) == STOPPED
    assert (
        "config.json has no eos_token_id: targets get no end-of-sequence token"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("start", "padding", "why"),
    [
        (None, 131, "pad_token_id is 131; the vocabulary has 131 tokens"),
        (True, 0, "decoder_start_token_id is True; the vocabulary has 131 tokens"),
        (None, None, "it has neither decoder_start_token_id nor pad_token_id"),
    ],
)
def test_invalid_decoder_start_token_is_an_error(
    start: int | None,
    padding: int | None,
    why: str,
    pairs_dir: Path,
    capsys: pytest.CaptureFixture[str],
):
    change_init_config(decoder_start_token_id=start, pad_token_id=padding)
    assert train_refusal(capsys)[1:] == ("config.json has no valid decoder_start_token_id", why)


def test_tokenize_shows_source_and_target(pairs_dir: Path, capsys: pytest.CaptureFixture[str]):
    pairs = make_text_pairs()
    sources = [f"w5 {pair['first']} {pair['second']}" for pair in pairs]
    capsys.readouterr()
    assert main(["tokenize", "recipe.toml", "--show", "2"]) == OK
    out = capsys.readouterr().out
    blocks = out.split("\n\n")
    for block, pair, source in zip(blocks[:2], pairs, sources):
        # The end token of the model is w1.
        lines = ["source:", f"{source} w1", "target:", f"⟦{pair['sum']} w1⟧"]
        assert block.splitlines()[1:] == lines
    source_lengths = [len(source.split()) + 1 for source in sources]
    target_lengths = [len(pair["sum"].split()) + 1 for pair in pairs]
    is_cut = [a > 9 or b > 6 for a, b in zip(source_lengths, target_lengths)]
    excess = [max(a - 9, 0) + max(b - 6, 0) for a, b in zip(source_lengths, target_lengths)]
    row = blocks[2].splitlines()[1].replace(",", "").split()
    total = sum(source_lengths) + sum(target_lengths)
    longest = max(source_lengths + target_lengths)
    expected = [len(pairs), total, sum(target_lengths), sum(is_cut), sum(excess), longest, 0]
    assert row == ["train", *map(str, expected)]


# `prep train` on prompts and conversations: the loss of transformers on the tokens outside the prompts.

LENGTH, BOS, EOS = 12, 1, 2

PROMPTS_RECIPE = f"""\
mesh = "1,2,4"
[model]
path = "tiny"
[data]
type = "json"
path = "prompts.jsonl"
format = "prompt_completion"
add_bos = true
seq_length = {LENGTH}
holdout = 0.2
shuffle = false
[batch]
size = 8
[optimizer]
lr = 3e-2
[train]
steps = 6
log_every = 1
[eval]
at_start = true
"""

TEMPLATE = """\
{%- for message in messages %}
    {{- 'w3 ' if message.role == 'user' else 'w4 ' }}
    {{- message.content + ' w5 ' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'w4 ' }}{% endif %}
"""


def make_prompts() -> list[tuple[list[int], list[int]]]:
    """Return the token ids of prompts and completions. A completion repeats its prompt."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 30, rng.integers(1, 5)).tolist() for _ in range(80)]
    return [(prompt, prompt[::-1]) for prompt in prompts]


def text_of(ids: list[int]) -> str:
    """Return the text that has these ids."""
    return " ".join(WORDS[token_id] for token_id in ids)


@pytest.fixture
def prompts_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_checkpoint(Path("tiny"), LLAMA | {"bos_token_id": BOS, "eos_token_id": EOS})
    write_tokenizer(Path("tiny"))
    (tmp_path / "tiny" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "recipe.toml").write_text(PROMPTS_RECIPE)
    lines = [
        {
            "prompt": text_of(prompt),
            "completion": text_of(completion),
            "messages": [
                {"role": "user", "content": text_of(prompt)},
                {"role": "assistant", "content": text_of(completion)},
            ],
        }
        for prompt, completion in make_prompts()
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def reference_loss(documents: list[list[tuple[int, int]]]) -> tuple[float, int]:
    """Return loss and number of targets of transformers on the last fifth of the blocks of (id, weight) documents."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    stream = [token for document in documents for token in document]
    n_blocks = len(stream) // LENGTH
    blocks = torch.tensor(stream[: n_blocks * LENGTH]).reshape(n_blocks, LENGTH, 2)[
        -round(n_blocks * 0.2) :
    ]
    labels = blocks[..., 0].masked_fill(blocks[..., 1] == 0, -100)
    model = transformers.AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.float32).eval()
    with torch.no_grad():
        loss = float(model(blocks[..., 0], labels=labels).loss)
    return loss, int((labels[:, 1:] != -100).sum())


def prompt_document(prompt: list[int], completion: list[int]) -> list[tuple[int, int]]:
    """Return the tokens of a pair: bos and the prompt have weight 0."""
    return [
        *((token_id, 0) for token_id in (BOS, *prompt)),
        *((token_id, 1) for token_id in (*completion, EOS)),
    ]


def chat_document(prompt: list[int], completion: list[int]) -> list[tuple[int, int]]:
    """Return the tokens of a conversation: the completion and the end of its turn have weight 1."""
    return [
        *((token_id, 0) for token_id in (3, *prompt, 5, 4)),
        *((token_id, 1) for token_id in (*completion, 5)),
    ]


@pytest.mark.parametrize(
    ("overrides", "document"),
    slow_except(
        [
            ([], prompt_document),
            (set_keys("data.format=chat", "data.add_bos=false"), chat_document),
        ],
        [([], prompt_document)],
    ),
    ids=["prompts", "chat"],
)
def test_loss_outside_prompts_equals_transformers(
    prompts_dir: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], document: Any
):
    capsys.readouterr()
    code, report = train_json(capsys, *overrides)
    assert code == OK, report.get("error")
    lines = map(
        json.loads, (prompts_dir / "runs" / "recipe" / "metrics.jsonl").read_text().splitlines()
    )
    start = next(line for line in lines if "eval_loss" in line)
    loss, n_targets = reference_loss([document(*pair) for pair in make_prompts()])
    assert (start["step"], start["eval_tokens"]) == (0, n_targets)
    assert start["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert report["eval_loss"] < start["eval_loss"] - 0.1
    assert len(read_losses("runs/recipe")) == 6


def test_step_without_loss_is_null_in_the_log(
    prompts_dir: Path, capsys: pytest.CaptureFixture[str]
):
    # The first step of 8 sequences has only a part of the first prompt.
    rows = [{"prompt": "w9 " * 8 * LENGTH, "completion": "w7 " * 8 * LENGTH}] * 3
    Path("long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = ["data.path=long.jsonl", "data.holdout=0", "eval.at_start=false", "train.steps=2"]
    code, report = train_json(capsys, *set_keys(*overrides))
    assert code == OK, report.get("error")
    metrics = prompts_dir / "runs" / "recipe" / "metrics.jsonl"
    first, second = map(json.loads, metrics.read_text().splitlines())
    assert (first["loss"], first["accuracy"], first["skipped"]) == (None, None, 1)
    assert second["loss"] > 0


# `prep train` on packed documents: the same loss as transformers on each document.

END = 0  # the model's end-of-sequence token

PACKED = ("type=json", "path=train.jsonl", "eval_path=eval.jsonl", "holdout=0", "packing=documents")


def write_documents(path: Path, seed: int, count: int) -> list[list[int]]:
    """Write documents of 1 to 24 words that count up by 0, 1 or 2, and return their ids."""
    random = np.random.default_rng(seed)
    documents = [
        (random.integers(100) + np.cumsum(random.integers(0, 3, length))) % len(WORDS)
        for length in random.integers(1, 25, count)
    ]
    texts = [" ".join(WORDS[number] for number in numbers) for numbers in documents]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [[*numbers.tolist(), END] for numbers in documents]


def transformers_loss(documents: Sequence[list[int]], seq_length: int) -> float:
    """Return the mean loss of a token of documents, each cut into pieces of `seq_length`."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained("learned", dtype=torch.float32).eval()
    pieces = [
        ids[low : low + seq_length] for ids in documents for low in range(0, len(ids), seq_length)
    ]
    batches = [torch.tensor([piece]) for piece in pieces if len(piece) > 1]
    with torch.no_grad():
        total = sum(float(model(ids, labels=ids).loss) * (ids.shape[1] - 1) for ids in batches)
    return total / sum(ids.shape[1] - 1 for ids in batches)


def test_loss_of_packed_documents_equals_transformers(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    write_documents(Path("train.jsonl"), 0, 200)
    documents = write_documents(Path("eval.jsonl"), 1, 30)
    capsys.readouterr()
    code = main(
        [
            "train",
            "recipe.toml",
            "--json",
            *set_keys(*(f"data.{key}" for key in PACKED)),
        ]
    )
    captured = capsys.readouterr()
    assert code == OK, captured.out
    report = json.loads(captured.out)
    assert report["loss"] < read_losses("runs/recipe")[0] - 0.1
    assert "sequences of 16" in captured.err
    run_ok("export", "runs/recipe", "--out", "learned")
    assert report["eval_loss"] == pytest.approx(transformers_loss(documents, 16), rel=1e-5)
