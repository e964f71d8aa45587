"""`prep train` on miniatures of public data sets: five losses of a float64 reference with masks of marked texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK
from tests.helpers.chat_masks import (
    LOSS_PARTS,
    marked_spans,
    mask_of_spans,
    write_tokenizer_of_bytes,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GPT2, make_checkpoint
from tests.helpers.train_runs import read_losses
from tests.trainer.training.test_data_shape import LAYOUTS, TEMPLATE

END = "<|im_end|>"
N_RECORDS = 400
LENGTH = 64
BATCH = 8
STEPS = 5
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
B1, B2, EPS = 0.9, 0.99, 1e-6
LOSS_ATOL = 2e-6
RECIPE = f"""\
mesh = "1,2,4"
[model]
path = "tiny"
[data]
path = "rows.jsonl"
seq_length = {LENGTH}
holdout = 0
shuffle = false
[batch]
size = {BATCH}
[optimizer]
lr = {LEARNING_RATE}
schedule = "constant"
b1 = {B1}
b2 = {B2}
eps = {EPS}
weight_decay = {WEIGHT_DECAY}
clip_norm = 0
[train]
steps = {STEPS}
log_every = 1
[checkpoint]
every = 0
"""
# The question, the answer and the text of the layouts.
NUMBERS = re.compile(r"1\+1|\b2\b|\bOne\b")


def numbered(text: str, number: int) -> str:
    """Return a text of a layout with the numbers of a record."""
    first, second = 7 * number % 100, 3 * number % 50
    texts = {"1+1": f"{first}+{second}", "2": f"{first + second}", "One": f"{first} {second}"}
    return NUMBERS.sub(lambda match: texts[match[0]], text)


def numbered_value(value: Any, number: int) -> Any:
    """Return a value of a layout with the numbers of a record in its texts."""
    if isinstance(value, str):
        return numbered(value, number)
    if isinstance(value, list):
        return [numbered_value(item, number) for item in value]
    if isinstance(value, dict):
        return {key: numbered_value(item, number) for key, item in value.items()}
    return value


class Document:
    """The tokens of a record, and whether each one has loss."""

    def __init__(self, tokenizer: Tokenizer, marked: str, *, has_end: bool) -> None:
        text = LOSS_PARTS.sub(r"\1", marked)
        if has_end:
            text += END
            marked += f"⟦{END}⟧"
        encoded = tokenizer.encode(text, add_special_tokens=False)
        spans = marked_spans(text, marked)
        assert spans is not None
        self.ids = encoded.ids
        self.mask = mask_of_spans(encoded.offsets, spans)


def write_layout(name: str) -> npt.NDArray[np.int64]:
    """Write a model and records in a layout to the current folder.

    Returns:
        The ids and the masks of all steps, [2, steps, batch, length].
    """
    record, (data_format, _), marked = LAYOUTS[name]
    write_tokenizer_of_bytes(Path("tokenizer.json"))
    tokenizer = Tokenizer.from_file("tokenizer.json")
    model = Path("tiny")
    make_checkpoint(model, GPT2 | {"vocab_size": 288, "eos_token_id": tokenizer.token_to_id(END)})
    Path("tokenizer.json").rename(model / "tokenizer.json")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    rows = [numbered_value(record, number) for number in range(N_RECORDS)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    has_end = data_format not in ("chat", "sharegpt", "alpaca")
    documents = [
        Document(tokenizer, numbered(marked, number), has_end=has_end)
        for number in range(N_RECORDS)
    ]
    ids = [token for document in documents for token in document.ids]
    mask = [token for document in documents for token in document.mask]
    shape = (2, STEPS, BATCH, LENGTH)
    return np.array([ids, mask])[:, : STEPS * BATCH * LENGTH].reshape(shape)


class AdamW:
    """AdamW of Loshchilov and Hutter (https://arxiv.org/abs/1711.05101), Algorithm 2, in float64."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        import torch

        self._params = params
        self._first = {name: torch.zeros_like(value) for name, value in params.items()}
        self._second = {name: torch.zeros_like(value) for name, value in params.items()}
        self._step = 0

    def update(self, gradients: Mapping[str, Any]) -> None:
        self._step += 1
        for name, param in self._params.items():
            gradient = gradients[name]
            self._first[name].mul_(B1).add_((1 - B1) * gradient)
            self._second[name].mul_(B2).add_((1 - B2) * gradient**2)
            first = self._first[name] / (1 - B1**self._step)
            second = self._second[name] / (1 - B2**self._step)
            # Biases and norms are not decayed.
            decay = WEIGHT_DECAY if param.ndim > 1 else 0.0
            param.sub_(LEARNING_RATE * (first / (second.sqrt() + EPS) + decay * param))


def reference_losses(ids: npt.NDArray[np.int64], masks: npt.NDArray[np.int64]) -> list[float]:
    """Return the losses of the steps of transformers' model in float64."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.float64).eval()
    params = dict(model.named_parameters())
    optimizer = AdamW(params)
    losses: list[float] = []
    for step_ids, step_mask in zip(torch.tensor(ids), torch.tensor(masks, dtype=torch.float64)):
        logits = model(step_ids, use_cache=False).logits
        assert logits.dtype == torch.float64
        log_probs = logits[:, :-1].log_softmax(-1)
        nll = -log_probs.gather(-1, step_ids[:, 1:, None])[..., 0]
        loss = (nll * step_mask[:, 1:]).sum() / step_mask[:, 1:].sum()
        gradients = torch.autograd.grad(loss, list(params.values()))
        with torch.no_grad():
            optimizer.update(dict(zip(params, gradients)))
        losses.append(loss.item())
    return losses


# All layouts share the compiled steps. The default case has tools, a system text and loss on parts of a document.
@pytest.mark.parametrize("name", slow_except(LAYOUTS, ["glaive-toolcall"]))
def test_losses_of_layouts_equal_float64(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ids, masks = write_layout(name)
    Path("recipe.toml").write_text(RECIPE)
    expected = reference_losses(ids, masks)
    assert main(["train", "recipe.toml"]) == OK
    assert "the columns of the data mean `data.f" in capsys.readouterr().err
    losses = read_losses("runs/recipe")
    errors = np.abs(np.array(losses) - expected)
    print(f"{name}: {' '.join(f'{loss:.6f}' for loss in expected)}, difference {errors.max():.1e}")
    assert errors.max() <= LOSS_ATOL
