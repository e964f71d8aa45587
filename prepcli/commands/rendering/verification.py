"""Comparisons of checkpoints as text and JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from prepcli.commands.console.ui import Report, Ui
from prepcli.commands.operations.verification_results import (
    SettingDifference,
    TensorDifference,
    Verification,
)
from prepcli.core.errors import Option, PrepError, text
from prepcli.core.formatting import MAX_NAMES, count_text, shorten
from prepcli.core.observer import LEAVES
from prepcli.core.tables import format_table
from prepcli.sources.tensor_labels import TensorLabel

# A template or a list of a setting may have any length.
MAX_VALUE_CHARS = 60


def verification_report(verification: Verification, ui: Ui) -> Report:
    """Return the report of a comparison. It has an error if there are differences.

    Args:
        verification: Result of the operation.
        ui: Receives one line per difference.
    """
    if verification.distances:
        ui.note(_distance_table(verification, ui))
    _note_settings(verification, ui)
    if verification.is_equal:
        line = f"ok: {_checked_text(verification)} ({verification.seconds:.1f} s)"
        return Report(line, _equal_fields(verification))
    _note_differences(verification, ui)
    fields: dict[str, object] = {
        "differences": verification.differences,
        "ignored_padding_rows": verification.ignored_padding_rows,
        **_setting_fields(verification),
        **_distance_fields(verification),
    }
    return Report(fields=fields, error=_difference_error(verification))


def _checked_text(verification: Verification) -> str:
    """Describe what was compared and is equal."""
    padding_rows = verification.ignored_padding_rows
    padding = f"; {count_text(padding_rows, 'padding row')} ignored" if padding_rows else ""
    # Equal checkpoints have a number.
    tensors = count_text(verification.tensors or 0, "tensor")
    if verification.distances:
        largest = max(distance.max_abs for distance in verification.distances)
        return f"{tensors}, largest difference {largest:.3g}{padding}"
    if verification.values is not None:
        return f"{tensors}, {count_text(verification.values, 'value')}, 0 different{padding}"
    *first_checks, last_check = verification.checked
    checked = f"{', '.join(first_checks)} and {last_check} of {tensors}"
    if verification.against is None:
        return f"{checked}, no values read, no digests checked"
    return f"{checked} equal, no values read{padding}"


def _equal_fields(verification: Verification) -> dict[str, object]:
    fields: dict[str, object] = {"tensors": verification.tensors, "values": verification.values}
    if verification.checked:
        fields["checked"] = list(verification.checked)
    else:
        fields["differences"] = []
    # A quick check of one checkpoint reads no vocabulary.
    if verification.against is not None or not verification.checked:
        fields["ignored_padding_rows"] = verification.ignored_padding_rows
    if verification.accepted:
        fields["accepted"] = verification.accepted
    return fields | _setting_fields(verification) | _distance_fields(verification)


def _setting_fields(verification: Verification) -> dict[str, object]:
    """Return the different settings and the tensors left out of a comparison of two checkpoints."""
    if verification.against is None:
        return {}
    return {"settings": verification.settings, "left_out": verification.left_out}


def _note_settings(verification: Verification, ui: Ui) -> None:
    """Print a line for each different setting, and for each tensor that only one checkpoint has."""
    for setting in verification.settings:
        ui.note(_setting_text(setting))
    lines = [
        f"not compared  {tensor['tensor']} of {tensor['checkpoint']}: {tensor['why']}"
        for tensor in verification.left_out
    ]
    num_shown = len(lines) if ui.level >= LEAVES else MAX_NAMES
    for line in lines[:num_shown]:
        ui.note(line)
    if len(lines) > num_shown:
        ui.note(f"and {len(lines) - num_shown:,} more; `-v` or `--json` lists all")


def _setting_text(setting: SettingDifference) -> str:
    """Describe a setting, such as `config differs: rope_theta 10000, 500000`."""
    values = [_value_text(setting[side]) for side in ("a", "b")]
    return f"{setting['kind']} differs: {setting['key']} {', '.join(values)}"


def _value_text(value: object) -> str:
    """Return a value of a setting as JSON of bounded length."""
    if value is None:
        return "absent"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return shorten(json.dumps(value, ensure_ascii=False), MAX_VALUE_CHARS)


def _distance_fields(verification: Verification) -> dict[str, object]:
    """Return the distances for JSON. Infinity is no JSON number: it becomes null."""
    if not verification.distances:
        return {}
    entries: list[dict[str, object]] = []
    for distance in verification.distances:
        entry = asdict(distance)
        for name in ("max_abs", "mean_abs", "cosine"):
            entry[name] = entry[name] if math.isfinite(entry[name]) else None
        entries.append(entry)
    return {"distances": entries}


def _distance_table(verification: Verification, ui: Ui) -> str:
    """Return a table of the tensors with the largest differences, at the higher verbosity of all tensors."""
    ordered = sorted(verification.distances, key=lambda distance: -distance.max_abs)
    num_shown = len(ordered) if ui.level >= LEAVES else MAX_NAMES
    rows: list[tuple[str, ...]] = []
    for distance in ordered[:num_shown]:
        numbers = (distance.max_abs, distance.mean_abs, distance.cosine)
        rows.append((distance.tensor, *(f"{number:.6g}" for number in numbers)))
    header = ("tensor", "max", "mean", "cosine")
    table = format_table(
        rows, header, right_aligned=header[1:], width=ui.columns, wrapped=["tensor"]
    )
    if len(ordered) > num_shown:
        table += f"\nand {len(ordered) - num_shown:,} more; `-v` or `--json` lists all"
    return table


def _note_differences(verification: Verification, ui: Ui) -> None:
    """Print one line per difference, and at the normal verbosity the number of omitted ones."""
    differences = verification.differences
    num_shown = len(differences) if ui.level >= LEAVES else MAX_NAMES
    for difference in differences[:num_shown]:
        ui.note(f"differs  {_difference_label(difference)}  {difference['what']}")
    if len(differences) > num_shown:
        ui.note(f"and {len(differences) - num_shown:,} more; `-v` or `--json` lists all")


def _difference_error(verification: Verification) -> PrepError:
    if verification.against is None:
        what = f"{verification.checkpoint} is damaged"
    else:
        what = f"{verification.checkpoint} is not the same as {verification.against}"
    # A tensor may have several differences, e.g. one for each range of rows with a digest.
    if not verification.differences:
        return _strict_error(verification, what)
    labels = {_difference_label(difference) for difference in verification.differences}
    counts = count_text(len(labels), "tensor")
    # Tensors of the other checkpoint alone are not in the total.
    if len(labels) <= verification.total_tensors:
        counts = f"{len(labels)} of {verification.total_tensors} tensors"
    first = verification.differences[0]
    why = f"{_difference_label(first)} {first['what']}"
    return PrepError(f"{what} ({counts})", why, verification.remedy)


def _strict_error(verification: Verification, what: str) -> PrepError:
    """Return the error for checkpoints of equal tensors with other settings, or without some tensors."""
    if verification.settings:
        why = _setting_text(verification.settings[0])
    else:
        tensor = verification.left_out[0]
        why = f"{tensor['tensor']} of {tensor['checkpoint']} is not compared: {tensor['why']}"
    hint = text("without {}, such differences are only noted", Option("strict", True))
    return PrepError(what, why, hint)


def _difference_label(difference: TensorDifference) -> TensorLabel:
    return TensorLabel(difference["leaf"], difference["tensor"])
