"""The report of `prep check-family`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jax

from prepcli.commands.console.ui import Report, Ui
from prepcli.commands.operations.model_outputs import missing_reference_packages
from prepcli.commands.testing.checks import CHECKS, NUM_HEADS, Check, check_family
from prepcli.commands.testing.tiny_config import scale_down
from prepcli.core.errors import PrepError, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.core.tables import format_table
from prepcli.models.registry import family_of
from prepcli.sources.source import CONFIG, read_config

# Devices of the CPU, for training on a mesh.
NUM_DEVICES = 8


def family_report(path: Path, names: Sequence[str], ui: Ui) -> Report:
    """Check the family of a config.

    Args:
        path: A config.json, or a folder with one.
        names: Checks to run, empty for all.
        ui: Receives notes.

    Returns:
        Report with one line per check. It has an error if a check failed.

    Raises:
        PrepError: The config cannot be read, its family is not supported, or a check is unknown.
    """
    checks = _select_checks(names)
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise usage_error(f"{file} does not exist", hint=f"name a {CONFIG}, or a folder with one")
    config = read_config(file)
    tiny = scale_down(config, NUM_HEADS)
    _prepare_libraries()
    family = family_of(tiny)
    sizes = family.sizes(tiny)
    ui.note(f"{family.name}: {', '.join(f'{axis} {size}' for axis, size in sizes.items())}")
    for axis in ("vocab", "heads"):
        if sizes.get(axis, 1) % 2 == 0:
            ui.warn(f"{axis} of the tiny model is {sizes[axis]}; an odd number finds more mistakes")
    results = check_family(
        config, checks, on_result=lambda result: ui.note(f"{result.outcome}  {result.check}")
    )
    rows = [(result.check, result.outcome, result.text) for result in results]
    table = format_table(rows, (family.name, "", ""), width=ui.columns)
    fields = {
        "family": family.name,
        "config": tiny,
        "checks": [asdict(result) for result in results],
    }
    failed = [result for result in results if result.outcome == "failed"]
    if not failed:
        return Report(table, fields)
    what = f"{family.name} fails {len(failed)} of {len(results)} checks"
    reasons = "\n".join(f"{result.check}: {result.text}" for result in failed)
    hint = "`prep docs add-a-family` lists common causes"
    return Report(table, fields, error=PrepError(what, reasons, hint))


def _select_checks(names: Sequence[str]) -> list[Check]:
    known = [check.name for check in CHECKS]
    if unknown := [name for name in names if name not in known]:
        hint = did_you_mean(unknown[0], known)
        raise usage_error(f"unknown check `{unknown[0]}`", f"known: {', '.join(known)}", hint)
    return [check for check in CHECKS if not names or check.name in names]


def _prepare_libraries() -> None:
    """Give the CPU several devices unless jax has started already, and silence transformers."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    if not missing_reference_packages():
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
