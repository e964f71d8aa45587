"""The same training in prep, in transformers' Trainer and in plain PyTorch: one model, fixed batches, one schedule."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_folder import write_tokenizer

SEQ_LENGTH = 16
BATCH = 4
STEPS = 8
HALF = STEPS // 2
SETTINGS = {"lr": 2e-2, "b1": 0.8, "b2": 0.95, "eps": 1e-7, "weight_decay": 0.1}
WARMUP = 3
VOCAB = 131
# Losses differ in the last bits of float32: two frameworks add in another order.
ROUNDING = 2e-6
# Without moments, the losses of the same steps differ by about 1e-2.
VISIBLE = 5e-3
HELPERS = Path(__file__).parent
RECIPE = f"""\
mesh = "1,2,4"
[model]
path = "tiny-init"
[data]
path = "ids.npy"
type = "ids"
seq_length = {SEQ_LENGTH}
shuffle = false
[batch]
size = {BATCH}
[optimizer]
lr = {SETTINGS["lr"]}
b1 = {SETTINGS["b1"]}
b2 = {SETTINGS["b2"]}
eps = {SETTINGS["eps"]}
weight_decay = {SETTINGS["weight_decay"]}
warmup_steps = {WARMUP}
decay_steps = {STEPS}
clip_norm = 0
[train]
steps = {STEPS}
log_every = 1
"""


def make_folder(config: dict[str, Any] = LLAMA) -> None:
    """Write a model, its data and a recipe to the current folder."""
    make_checkpoint(Path("tiny"), config, "float32")
    write_tokenizer(Path("tiny"))
    assert main(["save-init", "tiny", "--pad-vocab", "8", "--mesh", "1,2,4", "-q"]) == OK
    np.save("ids.npy", token_ids())
    Path("recipe.toml").write_text(RECIPE)


def token_ids() -> np.ndarray:
    """Return the tokens of all steps, [STEPS * BATCH * SEQ_LENGTH]. Neighbours are similar."""
    steps = np.random.default_rng(0).integers(0, 3, STEPS * BATCH * SEQ_LENGTH)
    return (np.cumsum(steps) % VOCAB).astype(np.int32)


def batches() -> Iterator[np.ndarray]:
    """Yield the tokens of each step, [BATCH, SEQ_LENGTH]."""
    yield from token_ids().reshape(STEPS, BATCH, SEQ_LENGTH)


def train(name: str, *overrides: str, stop_after: int | None = None) -> dict[int, float]:
    """Train with prep, and return the loss of each step of this run."""
    arguments = ["train", "recipe.toml", "--out", name, "-q"]
    for override in overrides:
        arguments += ["--set", override]
    if stop_after is not None:
        arguments += ["--stop-after", str(stop_after)]
    # A stopped run has an exit code of its own.
    assert main(arguments) == (OK if stop_after is None else 75)
    losses: dict[int, float] = {}
    for line in Path(name, "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            losses[record["step"]] = record["loss"]
    return losses


def labelled_row(row: np.ndarray) -> dict[str, np.ndarray]:
    """Return a sequence and its labels, before the shift of transformers. The first token is no target."""
    tokens = row.astype(np.int64)
    labels = tokens.copy()
    labels[0] = -100
    return {"input_ids": tokens, "labels": labels}


class HFTraining:
    """Training of a Hugging Face folder with transformers' Trainer."""

    losses: dict[int, float]

    def __init__(self, folder: str, out: str) -> None:
        """Load the model of a folder, for checkpoints in `out`."""
        import torch
        from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

        rows: Any = [labelled_row(row) for row in token_ids().reshape(-1, SEQ_LENGTH)]
        losses: dict[int, float] = {}
        self.losses = losses

        class FixedBatches(Trainer):
            """A trainer with batches in order and a record of all losses."""

            def _get_train_sampler(self, train_dataset: Any = None) -> Any:
                return torch.utils.data.SequentialSampler(rows)

            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                loss: Any = super().compute_loss(*args, **kwargs)
                losses[self.state.global_step + 1] = loss.detach().item()
                return loss

        arguments = TrainingArguments(
            out,
            use_cpu=True,
            report_to=[],
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            save_steps=STEPS // 2,
            learning_rate=SETTINGS["lr"],
            adam_beta1=SETTINGS["b1"],
            adam_beta2=SETTINGS["b2"],
            adam_epsilon=SETTINGS["eps"],
            weight_decay=SETTINGS["weight_decay"],
            warmup_steps=WARMUP,
            lr_scheduler_type="linear",
            max_grad_norm=0,
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.trainer = FixedBatches(model, arguments, train_dataset=rows)

    def train(self, checkpoint: str | None = None) -> dict[int, float]:
        """Train to the last step, and return the loss of each step."""
        self.trainer.train(resume_from_checkpoint=checkpoint)
        return self.losses


class TorchTraining:
    """A plain loop of PyTorch: AdamW with and without weight decay, and a schedule."""

    def __init__(self, folder: str) -> None:
        """Load the model of a folder."""
        import torch
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        decayed: list[Any] = []
        others: list[Any] = []
        for name, parameter in self.model.named_parameters():
            (others if "norm" in name else decayed).append(parameter)
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=SETTINGS["lr"],
            betas=(SETTINGS["b1"], SETTINGS["b2"]),
            eps=SETTINGS["eps"],
            weight_decay=SETTINGS["weight_decay"],
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, relative_rate)

    def train(self, first: int, last: int) -> dict[int, float]:
        """Take the steps from `first` to `last`, counted from 1, and return their losses."""
        import torch

        losses: dict[int, float] = {}
        for step, batch in enumerate(batches(), 1):
            if not first <= step <= last:
                continue
            tokens = torch.tensor(batch.astype(np.int64))
            for group in self.optimizer.param_groups:
                group["lr"] = SETTINGS["lr"] * relative_rate(step - 1)
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses[step] = loss.item()
        return losses

    def save(self, folder: str) -> None:
        """Save model and optimizer as a torch distributed checkpoint."""
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import save

        model, optimizer = get_state_dict(self.model, self.optimizer)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        """Load model and optimizer from a torch distributed checkpoint."""
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def relative_rate(step: int) -> float:
    """Return the learning rate of an update, counted from 0, as a fraction of the peak."""
    if step < WARMUP:
        return step / WARMUP
    return (STEPS - step) / (STEPS - WARMUP)


def train_elsewhere(trainer: str, name: str, request: dict[str, Any]) -> dict[int, float]:
    """Take steps with another trainer, save the checkpoint NAME, and return the loss of each step.

    Args:
        trainer: `levanter`, `maxtext` or `tunix`. `PREP_<TRAINER>_PYTHON` names a Python with it.
        name: Path of the checkpoint.
        request: The other fields for the script of the trainer.
    """
    paths = {"saved": str(Path(name).absolute()), "losses": f"{name}.json"}
    Path(f"{name}-request.json").write_text(json.dumps(request | paths))
    # The trainer sets its own flags.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "JAX_"))}
    python = os.environ[f"PREP_{trainer.upper()}_PYTHON"]
    script = HELPERS / f"{trainer}_training_oracle.py"
    subprocess.run([python, script, f"{name}-request.json"], check=True, env=env)
    losses = json.loads(Path(f"{name}.json").read_text())
    return {int(step): loss for step, loss in losses.items()}
