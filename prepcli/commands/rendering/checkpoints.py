"""Results about checkpoints as text and JSON: conversions, comparisons, locks, maps and aliases."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

from prepcli.commands.console.ui import Report, Ui
from prepcli.commands.operations.conversion import dropped_text
from prepcli.core.bounded_text import shorten
from prepcli.core.counts import count_text
from prepcli.core.errors import GET_AGAIN_HINT, Option, PrepError, text
from prepcli.core.formatting import format_bytes
from prepcli.core.lists import MAX_NAMES, join_names
from prepcli.core.observer import LEAVES
from prepcli.core.tables import format_table
from prepcli.models.registry import FAMILIES
from prepcli.models.verbatim import CANNOT_TRAIN
from prepcli.sources.tensor_labels import TensorLabel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prepcli.commands.operations.results import (
        Chain,
        ChainLink,
        Conversion,
        LockedModel,
        MapSuggestion,
        Roundtrip,
        RoundtripWay,
    )
    from prepcli.commands.operations.verification_results import (
        LogitComparison,
        SettingDifference,
        TensorDifference,
        Verification,
    )
    from prepcli.planning.plan import Plan
    from prepcli.sources.aliases import Alias


def conversion_report(conversion: Conversion, level: int) -> Report:
    """Return the text that a command prints about a conversion."""
    output = str(conversion.details["output"])
    fields = dict(conversion.details)
    if level >= LEAVES:
        fields["leaves"] = _leaf_fields(conversion.plan)
    if "dry_run" in fields:
        return Report(_dry_run_line(conversion, output), fields)
    return Report(output, fields, conversion.next_command)


def _leaf_fields(plan: Plan) -> list[dict[str, object]]:
    """Return the name, the shapes and the dtype of each leaf."""
    return [
        {
            "name": leaf.name,
            "shape": leaf.grid.shape,
            "dtype": leaf.dtype,
            "chunk": leaf.grid.chunk_shape,
        }
        for leaf in plan.leaves
    ]


def _dry_run_line(conversion: Conversion, output: str) -> str:
    """Describe the output of a plan."""
    plan = conversion.plan
    text = f"would write {format_bytes(plan.write_nbytes)}"
    if plan.leaves:
        text += f" in {count_text(plan.chunk_count, 'chunk')} of {count_text(len(plan.leaves), 'leaf', 'leaves')}"
    written = {stream.name for stream in plan.streams if stream.writes}
    text += f" to {output}: {count_text(len(written), 'tensor')}"
    dropped = dropped_text(plan)
    if dropped:
        text += f", {dropped}"
    return f"{text}; plan {conversion.plan_digest}"


# --- Comparisons of checkpoints as text and JSON


# A template or a list of a setting may have any length.
MAX_VALUE_CHARS = 60


def verification_report(verification: Verification, ui: Ui) -> Report:
    """Return the report of a comparison. It has an error if there are differences."""
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


# --- Comparisons of the logits of two models as text and JSON


LOGITS_HEADER = ("prompt", "KL mean", "KL max", "top 1", "top 5", "logits", "parts at")


def logits_report(comparison: LogitComparison, columns: int | None) -> Report:
    """Return the table and the JSON object of a comparison. It has an error if a logit differs too much."""
    largest = max(prompt.max_difference for prompt in comparison.prompts)
    error = None
    lines = [_logit_table(comparison, columns)]
    limit = f"the tolerance is {comparison.tolerance:g}"
    if comparison:
        lines.append(f"ok: largest difference {largest:.3g}, {limit} ({comparison.seconds:.1f} s)")
    else:
        second = comparison.against
        if comparison.library != "prep":
            second = f"{second} in {comparison.library}"
        what = f"{comparison.checkpoint} does not compute the logits of {second}"
        hint = "the last column names the first layer with another result"
        if not any(prompt.layer_differences for prompt in comparison.prompts):
            hint = "compare models with the same layers to find the first one with another result"
        error = PrepError(what, f"they differ by up to {largest:.3g}, {limit}", hint)
    return Report("\n".join(lines), _logit_fields(comparison), error=error)


def _logit_fields(comparison: LogitComparison) -> dict[str, object]:
    """Return the fields for JSON. Infinity is no JSON number: it becomes null."""
    prompts: list[dict[str, object]] = []
    for prompt in comparison.prompts:
        entry = asdict(prompt)
        for name in ("kl_mean", "kl_max", "max_difference"):
            entry[name] = _finite_or_none(entry[name])
        entry["layer_differences"] = list(map(_finite_or_none, prompt.layer_differences))
        prompts.append(entry)
    return {
        "checkpoint": comparison.checkpoint,
        "against": comparison.against,
        "library": comparison.library,
        "tolerance": _finite_or_none(comparison.tolerance),
        "equal": comparison.is_equal,
        "prompts": prompts,
    }


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _logit_table(comparison: LogitComparison, columns: int | None) -> str:
    rows: list[tuple[str, ...]] = []
    for prompt in comparison.prompts:
        parts_at = prompt.parts_at or "nowhere"
        if not prompt.layer_differences:
            parts_at = "other layers"
        rows.append(
            (
                prompt.name,
                f"{prompt.kl_mean:.2g}",
                f"{prompt.kl_max:.2g}",
                f"{prompt.top1_agreement:.2%}",
                f"{prompt.top5_overlap:.2%}",
                f"{prompt.max_difference:.2g}",
                parts_at,
            )
        )
    return format_table(rows, LOGITS_HEADER, right_aligned=LOGITS_HEADER[1:-1], width=columns)


# --- Chains of checkpoints as text and JSON


CHAIN_HEADER = ("link", "equal digests", "status")


def chain_report(chain: Chain, width: int | None) -> Report:
    """Return the report of a chain: a table of the links, and their changes. It has an error if a link is broken."""
    rows = [(_link_text(link), link.proof, link.status) for link in chain.links]
    lines: list[str] = []
    if rows:
        lines.append(format_table(rows, CHAIN_HEADER, width=width, wrapped=CHAIN_HEADER[:2]))
    for link in chain.links:
        if link.changed:
            lines.append(f"changed by {link.command} in {link.output}: {link.changed}")
        if link.not_shown:
            check = f" (`{link.check}` compares it)" if link.check else ""
            lines.append(f"not shown for {link.output}: {link.not_shown}{check}")
    fields: dict[str, object] = {
        "links": [asdict(link) for link in chain.links],
        "origins": list(chain.origins),
        "proven": all(link.status == "proven" for link in chain.links),
    }
    broken = chain.broken_link
    if broken is not None:
        return Report("\n".join(lines), fields, error=_broken_error(broken))
    origins = join_names(chain.origins)
    start = f" from {origins}" if origins else ""
    lines.append(f"ok: {count_text(len(chain.links), 'link')}{start} ({chain.seconds:.1f} s)")
    return Report("\n".join(lines), fields)


def _link_text(link: ChainLink) -> str:
    """Return the ends of a link, e.g. `m-hf <- export of m-init`."""
    if not link.source:
        return link.output
    return f"{link.output} <- {link.command} of {link.source}"


def _broken_error(link: ChainLink) -> PrepError:
    """Return the error for the first broken link."""
    if link.status == "failed":
        return PrepError(f"the link {_link_text(link)} failed", link.reason, GET_AGAIN_HINT)
    hint = text(
        "{} finds moved checkpoints, {} accepts the link",
        Option("search", "FOLDER"),
        Option("allow_unproven", True),
    )
    return PrepError(f"the link {_link_text(link)} is not proven", link.reason, hint)


# --- Certificates of conversions and their ways back, as text and JSON


ROUNDTRIP_HEADER = ("way", "status", "tensors", "bytes", "digest")
REPORT_HINT = "report it with the certificate"


def roundtrip_report(roundtrip: Roundtrip, width: int | None) -> Report:
    """Return the report of a certificate: a table of the ways. It has an error if a way changed the model."""
    rows = [_way_row(way) for way in roundtrip.ways]
    lines = [
        format_table(
            rows, ROUNDTRIP_HEADER, ROUNDTRIP_HEADER[2:4], width, optional=["digest", "bytes"]
        )
    ]
    for way in roundtrip.ways:
        if way.reason:
            lines.append(f"{way.name}: {way.reason}")
    lines.append(str(roundtrip.path))
    fields = asdict(roundtrip) | {"path": str(roundtrip.path)}
    different = [way for way in roundtrip.ways if way.status == "different"]
    error: PrepError | None = None
    if different:
        what = f"{roundtrip.source} is not the same after the way {different[0].name}"
        error = PrepError(what, different[0].reason, REPORT_HINT)
    return Report("\n".join(lines), fields, error=error)


def _way_row(way: RoundtripWay) -> tuple[str, ...]:
    if way.status == "not available":
        return way.name, way.status, "", "", ""
    size = format_bytes(way.nbytes)
    status = "0 bits changed" if way.status == "equal" else way.status
    return way.name, status, f"{way.tensors:,}", size, way.digest


# --- Written lock files as text and JSON


def lock_report(locked: LockedModel) -> Report:
    """Return the path of a lock file, and what it covers."""
    fields: dict[str, object] = {
        "path": str(locked.path),
        "source": locked.source,
        "revision": locked.revision,
        "files": locked.files,
        "tensors": locked.tensors,
        "bytes": locked.nbytes,
        "already": locked.already_done,
    }
    return Report(str(locked.path), fields)


def lock_line(locked: LockedModel) -> str:
    """Describe what a lock file covers: `locked  9 files, 316 tensors, 4.95 GiB in 6.1 s`."""
    size = format_bytes(locked.nbytes)
    state = "already locked" if locked.already_done else "locked"
    counts = f"{count_text(locked.files, 'file')}, {count_text(locked.tensors, 'tensor')}"
    return f"{state}  {counts}, {size} in {locked.seconds:.1f} s"


# --- Suggested maps, as text and JSON


MAX_LISTED = 8


def suggestion_report(suggestion: MapSuggestion) -> Report:
    """Return the report of a map: its counts, and the tensors that need a decision. An incomplete map is an error."""
    lines = [
        f"{count_text(len(suggestion.rows), 'row')} for {count_text(suggestion.targets, 'tensor')}"
    ]
    other_values = [name for name in suggestion.unmatched if name not in suggestion.ambiguous]
    for title, names in (
        ("ambiguous", [*suggestion.ambiguous]),
        ("not matched", other_values),
        ("not used", [*suggestion.unused]),
    ):
        if names:
            lines.append(f"{title}: {join_names(names, max_names=MAX_LISTED)}")
    if suggestion.cast_to:
        lines.append(f"values are equal after a cast: --dtype {suggestion.cast_to}")
    lines.append(str(suggestion.path))
    fields = asdict(suggestion) | {"path": str(suggestion.path)}
    error: PrepError | None = None
    if not suggestion:
        names = list(suggestion.unmatched or suggestion.unused)
        verb = "has" if len(names) == 1 else "have"
        error = PrepError(
            f"the map {suggestion.path} is not complete",
            f"{join_names(names, max_names=MAX_LISTED)} {verb} no row",
            "write rows or `drop` lines for them",
        )
    return Report("\n".join(lines), fields, error=error)


# --- Aliases of checkpoints as text and JSON


# Common numbers of devices. The table has the number of equal shards of the vocabulary on each.
DEVICE_COUNTS = (8, 128)
# Columns of text without a terminal.
TEXT_WIDTH = 120
# Columns that a narrow terminal leaves out, the first one first.
OPTIONAL_COLUMNS = ("shards on 128", "shards on 8", "vocabulary", "parameters", "family", "size")


def aliases_report(aliases: Sequence[Alias], columns: int | None) -> Report:
    """Return the table of aliases with the supported model types, and fields with sizes in bytes."""
    supported = {"convert": "any", "train": [*FAMILIES], "generate": [*FAMILIES]}
    fields = {
        "models": [_alias_fields(alias) for alias in aliases],
        "families": [*FAMILIES],
        "supported": supported,
    }
    names = ", ".join(FAMILIES)
    families = f"{len(FAMILIES)} model types convert, train and generate: {names}"
    multimodal = (
        "a multimodal model with a text part of such a type (model_type of its text_config) converts with its towers,"
        " and trains and generates as its text part"
    )
    others = f"all other model types convert: {CANNOT_TRAIN}"
    width = columns or TEXT_WIDTH
    lines = [
        _alias_table(aliases, columns),
        "",
        textwrap.fill(families, width),
        textwrap.fill(multimodal, width),
        textwrap.fill(others, width),
    ]
    return Report("\n".join(lines), fields)


def _alias_table(aliases: Sequence[Alias], columns: int | None) -> str:
    """Return the table of aliases, with the vocabulary shards on each number of devices."""
    header = [
        "alias",
        "hub id",
        "family",
        "parameters",
        "size",
        "vocabulary",
        *(f"shards on {count}" for count in DEVICE_COUNTS),
    ]
    rows = [
        [
            alias.name,
            alias.hub_id,
            alias.family,
            alias.parameters,
            format_bytes(alias.nbytes),
            alias.vocab,
            # gcd(50257, 8) = 1: an odd vocabulary stays whole. gcd(50400, 128) = 32: each shard is on 4 devices.
            *(math.gcd(alias.vocab, count) for count in DEVICE_COUNTS),
        ]
        for alias in aliases
    ]
    return format_table(
        rows, header, right_aligned=["size"], width=columns, optional=OPTIONAL_COLUMNS
    )


def _alias_fields(alias: Alias) -> dict[str, object]:
    return {
        "alias": alias.name,
        "hub_id": alias.hub_id,
        "family": alias.family,
        "parameters": alias.parameters,
        "bytes": alias.nbytes,
        "vocab": alias.vocab,
        "gcd": {str(count): math.gcd(alias.vocab, count) for count in DEVICE_COUNTS},
    }
