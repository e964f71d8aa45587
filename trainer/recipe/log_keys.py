"""The table `log.wandb` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.models.errors import usage_error
from trainer.models.suggest import did_you_mean

WANDB_KEY = "log.wandb"
TEXT_KEYS = ("project", "entity", "group", "name", "notes", "job_type")
WANDB_KEYS = (*TEXT_KEYS, "tags", "offline")


def check_wandb_table(table: Mapping[str, Any] | None) -> None:
    """Check the keys of `log.wandb`, which are arguments of `wandb.init`, and `offline`.

    Raises:
        UsageError: A key is unknown, `project` is missing, or a value has another type.
    """
    if table is None:
        return
    # JSON schemas of a recipe describe two levels, e.g. `log.wandb`. The third level is checked here.
    for key, value in table.items():
        if key not in WANDB_KEYS:
            hint = did_you_mean(key, WANDB_KEYS)
            raise usage_error(
                f"unknown key `{key}` in `{WANDB_KEY}`", f"known: {', '.join(WANDB_KEYS)}", hint
            )
        if not _is_valid(key, value):
            kind = {"tags": "a list of texts", "offline": "true or false"}.get(key, "text")
            raise usage_error(
                f"`{key}` in `{WANDB_KEY}` is {value!r:.60}", f"it takes {kind}", f"change `{key}`"
            )
    if "project" not in table:
        raise usage_error(
            f"`{WANDB_KEY}` has no `project`", "W&B groups runs by project", '`project = "NAME"`'
        )


def _is_valid(key: str, value: object) -> bool:
    if key == "offline":
        return isinstance(value, bool)
    if key == "tags":
        return isinstance(value, list) and all(isinstance(tag, str) for tag in value)
    return isinstance(value, str) and bool(value)
