"""`prep train` on prompts and conversations: the loss of transformers on the tokens outside the prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.core.errors import OK
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.train_runs import read_losses, set_keys, train_json
from tests.helpers.training_folder import WORDS, write_tokenizer

LENGTH, BOS, EOS = 12, 1, 2
RECIPE = f"""\
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


def make_pairs() -> list[tuple[list[int], list[int]]]:
    """Return the token ids of prompts and completions. A completion repeats its prompt."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 30, rng.integers(1, 5)).tolist() for _ in range(80)]
    return [(prompt, prompt[::-1]) for prompt in prompts]


def text_of(ids: list[int]) -> str:
    """Return the text that has these ids."""
    return " ".join(WORDS[token_id] for token_id in ids)


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_checkpoint(Path("tiny"), LLAMA | {"bos_token_id": BOS, "eos_token_id": EOS})
    write_tokenizer(Path("tiny"))
    (tmp_path / "tiny" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    lines = [
        {
            "prompt": text_of(prompt),
            "completion": text_of(completion),
            "messages": [
                {"role": "user", "content": text_of(prompt)},
                {"role": "assistant", "content": text_of(completion)},
            ],
        }
        for prompt, completion in make_pairs()
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
    [
        ([], prompt_document),
        (set_keys("data.format=chat", "data.add_bos=false"), chat_document),
    ],
    ids=["prompts", "chat"],
)
def test_loss_outside_prompts_equals_transformers(
    work_dir: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], document: Any
):
    capsys.readouterr()
    code, report = train_json(capsys, *overrides)
    assert code == OK, report.get("error")
    lines = map(
        json.loads, (work_dir / "runs" / "recipe" / "metrics.jsonl").read_text().splitlines()
    )
    start = next(line for line in lines if "eval_loss" in line)
    loss, n_targets = reference_loss([document(*pair) for pair in make_pairs()])
    assert (start["step"], start["eval_tokens"]) == (0, n_targets)
    assert start["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert report["eval_loss"] < start["eval_loss"] - 0.1
    assert len(read_losses("runs/recipe")) == 6


def test_step_without_loss_is_null_in_the_log(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    # The first step of 8 sequences has only a part of the first prompt.
    rows = [{"prompt": "w9 " * 8 * LENGTH, "completion": "w7 " * 8 * LENGTH}] * 3
    Path("long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = ["data.path=long.jsonl", "data.holdout=0", "eval.at_start=false", "train.steps=2"]
    code, report = train_json(capsys, *set_keys(*overrides))
    assert code == OK, report.get("error")
    metrics = work_dir / "runs" / "recipe" / "metrics.jsonl"
    first, second = map(json.loads, metrics.read_text().splitlines())
    assert (first["loss"], first["accuracy"], first["skipped"]) == (None, None, 1)
    assert second["loss"] > 0


def test_samples_of_a_run_may_be_conversations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("tiny"), LLAMA)
    write_tokenizer(Path("tiny"))
    Path("tiny/chat_template.jinja").write_text(TEMPLATE)
    rows = [json.dumps({"prompt": text_of(a), "completion": text_of(b)}) for a, b in make_pairs()]
    Path("prompts.jsonl").write_text("\n".join(rows))
    samples = '[log]\nsample_tokens = 3\nsamples = [{messages = [{role = "user", content = "w7"}]}, "w9"]\n'
    Path("recipe.toml").write_text(RECIPE.replace("steps = 6", "steps = 1") + samples)
    assert train_json(capsys)[0] == OK
    lines = Path("runs/recipe/samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["w3 w7 w5 w4 ", "w9"]
    # The saved recipe is read again.
    assert train_json(capsys)[0] == OK
