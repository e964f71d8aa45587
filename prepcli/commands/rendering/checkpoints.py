"""Results about checkpoints as text and JSON: conversions, comparisons, locks, maps and aliases."""

from __future__ import annotations

import json
import math
import textwrap
from typing import TYPE_CHECKING

from prepcli.commands.console.ui import Report, Ui
from prepcli.commands.operations.conversion import dropped_text
from prepcli.core.errors import GET_AGAIN_HINT, Option, PrepError, text
from prepcli.core.formatting import MAX_NAMES, count_text, format_bytes, join_names, shorten
from prepcli.core.json_values import json_fields
from prepcli.core.observer import LEAVES
from prepcli.core.tables import Block, Cell, Paragraph, Table
from prepcli.models.registry import FAMILIES
from prepcli.models.verbatim import CANNOT_TRAIN
from prepcli.sources.source import TensorLabel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prepcli.commands.operations.results import (
        Chain,
        ChainLink,
        Conversion,
        LockedModel,
        MapSuggestion,
        Roundtrip,
    )
    from prepcli.commands.operations.verification_results import (
        LogitComparison,
        SettingDifference,
        TensorDifference,
        Verification,
    )
    from prepcli.sources.aliases import Alias

# A template or a list of a setting may have any length.
MAX_VALUE_CHARS = 60
# Names of tensors in a line about a map.
MAX_LISTED = 8
LOGITS_HEADER = ("prompt", "KL mean", "KL max", "top 1", "top 5", "logits", "parts at")
CHAIN_HEADER = ("link", "equal digests", "status")
ROUNDTRIP_HEADER = ("way", "status", "tensors", "bytes", "digest")
# Common numbers of devices. The table of aliases has the number of equal shards of the vocabulary on each.
DEVICE_COUNTS = (8, 128)
# Columns of text without a terminal.
TEXT_WIDTH = 120
# Columns of aliases that a narrow terminal leaves out, the first one first.
OPTIONAL_COLUMNS = ("shards on 128", "shards on 8", "vocabulary", "parameters", "family", "size")


def _note_lines(lines: Sequence[str], ui: Ui) -> None:
    """Print lines. At the normal verbosity print the first ones, and the number of the others."""
    num_shown = len(lines) if ui.level >= LEAVES else MAX_NAMES
    for line in lines[:num_shown]:
        ui.note(line)
    if len(lines) > num_shown:
        ui.note(f"and {len(lines) - num_shown:,} more; `-v` or `--json` lists all")


def conversion_report(conversion: Conversion, level: int) -> Report:
    """Return the printed text about a conversion.

    At the verbosity LEAVES and above, the JSON object lists the leaves of the output.
    """
    plan = conversion.plan
    output = str(conversion.details["output"])
    fields = dict(conversion.details)
    if level >= LEAVES:
        leaves: list[dict[str, object]] = []
        for leaf in plan.leaves:
            grid = leaf.grid
            shapes = {"shape": grid.shape, "dtype": leaf.dtype, "chunk": grid.chunk_shape}
            leaves.append({"name": leaf.name, **shapes})
        fields["leaves"] = leaves
    if "dry_run" not in fields:
        return Report(output, fields, conversion.next_command)
    line = f"would write {format_bytes(plan.write_nbytes)}"
    if plan.leaves:
        line += f" in {count_text(plan.chunk_count, 'chunk')} of {count_text(len(plan.leaves), 'leaf', 'leaves')}"
    written = {stream.name for stream in plan.streams if stream.writes}
    line += f" to {output}: {count_text(len(written), 'tensor')}"
    dropped = dropped_text(plan)
    if dropped:
        line += f", {dropped}"
    return Report(f"{line}; plan {conversion.plan_digest}", fields)


# --- Comparisons


def verification_report(verification: Verification, ui: Ui) -> Report:
    """Return the report of a comparison, and print a line per difference. It has an error if there are differences."""
    is_quick = bool(verification.checked)
    fields: dict[str, object] = {"differences": verification.differences}
    if verification.is_equal:
        fields = {"tensors": verification.tensors, "values": verification.values}
        fields |= {"checked": list(verification.checked)} if is_quick else {"differences": []}
    # A quick check of one checkpoint reads no vocabulary.
    if verification.against is not None or not is_quick:
        fields["ignored_padding_rows"] = verification.ignored_padding_rows
    if verification.accepted:
        fields["accepted"] = verification.accepted
    if verification.against is not None:
        fields |= {"settings": verification.settings, "left_out": verification.left_out}
    if verification.distances:
        fields["distances"] = verification.distances
        ui.note(_distance_table(verification, ui))
    for setting in verification.settings:
        ui.note(_setting_text(setting))
    left_out: list[str] = []
    for tensor in verification.left_out:
        name = f"{tensor['tensor']} of {tensor['checkpoint']}"
        left_out.append(f"not compared  {name}: {tensor['why']}")
    _note_lines(left_out, ui)
    if verification.is_equal:
        return Report(f"ok: {_checked_text(verification)} ({verification.seconds:.1f} s)", fields)
    differences = verification.differences
    _note_lines([f"differs  {_label(each)}  {each['what']}" for each in differences], ui)
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


def _setting_text(setting: SettingDifference) -> str:
    """Describe a setting, such as `config differs: rope_theta 10000, 500000`."""
    values: list[str] = []
    for value in (setting["a"], setting["b"]):
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        shown = shorten(json.dumps(value, ensure_ascii=False), MAX_VALUE_CHARS)
        values.append("absent" if value is None else shown)
    return f"{setting['kind']} differs: {setting['key']} {', '.join(values)}"


def _distance_table(verification: Verification, ui: Ui) -> str:
    """Return a table of the tensors with the largest differences, at the higher verbosity of all tensors."""
    ordered = sorted(verification.distances, key=lambda distance: -distance.max_abs)
    num_shown = len(ordered) if ui.level >= LEAVES else MAX_NAMES
    rows: list[tuple[str, ...]] = []
    for distance in ordered[:num_shown]:
        numbers = (distance.max_abs, distance.mean_abs, distance.cosine)
        rows.append((distance.tensor, *(f"{number:.6g}" for number in numbers)))
    header = ("tensor", "max", "mean", "cosine")
    table = Table(header, rows, right_aligned=header[1:], wrapped=["tensor"]).text(ui.columns)
    if len(ordered) > num_shown:
        table += f"\nand {len(ordered) - num_shown:,} more; `-v` or `--json` lists all"
    return table


def _difference_error(verification: Verification) -> PrepError:
    if verification.against is None:
        what = f"{verification.checkpoint} is damaged"
    else:
        what = f"{verification.checkpoint} is not the same as {verification.against}"
    differences = verification.differences
    if differences:
        # A tensor may have several differences, e.g. one for each range of rows with a digest.
        num_different = len({_label(difference) for difference in differences})
        counts = count_text(num_different, "tensor")
        # Tensors of the other checkpoint alone are not in the total.
        if num_different <= verification.total_tensors:
            counts = f"{num_different} of {verification.total_tensors} tensors"
        why = f"{_label(differences[0])} {differences[0]['what']}"
        return PrepError(f"{what} ({counts})", why, verification.remedy)
    if verification.settings:
        why = _setting_text(verification.settings[0])
    else:
        tensor = verification.left_out[0]
        why = f"{tensor['tensor']} of {tensor['checkpoint']} is not compared: {tensor['why']}"
    hint = text("without {}, such differences are only noted", Option("strict", True))
    return PrepError(what, why, hint)


def _label(difference: TensorDifference) -> TensorLabel:
    return TensorLabel(difference["leaf"], difference["tensor"])


def logits_report(comparison: LogitComparison) -> Report:
    """Return the table and the JSON object of a comparison. It has an error if a logit differs too much."""
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
    blocks: list[Block] = [Table(LOGITS_HEADER, rows, LOGITS_HEADER[1:-1])]
    names = ("checkpoint", "against", "library", "tolerance", "prompts")
    fields = json_fields(comparison, *names) | {"equal": comparison.is_equal}
    largest = max(prompt.max_difference for prompt in comparison.prompts)
    limit = f"the tolerance is {comparison.tolerance:g}"
    if comparison:
        blocks.append(f"ok: largest difference {largest:.3g}, {limit} ({comparison.seconds:.1f} s)")
        return Report(blocks, fields)
    second = comparison.against
    if comparison.library != "prep":
        second = f"{second} in {comparison.library}"
    what = f"{comparison.checkpoint} does not compute the logits of {second}"
    hint = "the last column names the first layer with another result"
    if not any(prompt.layer_differences for prompt in comparison.prompts):
        hint = "compare models with the same layers to find the first one with another result"
    error = PrepError(what, f"they differ by up to {largest:.3g}, {limit}", hint)
    return Report(blocks, fields, error=error)


def chain_report(chain: Chain) -> Report:
    """Return the report of a chain: a table of the links, and their changes. It has an error if a link is broken."""
    blocks: list[Block] = []
    if chain.links:
        rows = [(_link_text(link), link.proof, link.status) for link in chain.links]
        blocks.append(Table(CHAIN_HEADER, rows, wrapped=CHAIN_HEADER[:2]))
    for link in chain.links:
        if link.changed:
            blocks.append(f"changed by {link.command} in {link.output}: {link.changed}")
        if link.not_shown:
            check = f" (`{link.check}` compares it)" if link.check else ""
            blocks.append(f"not shown for {link.output}: {link.not_shown}{check}")
    fields: dict[str, object] = {
        "links": chain.links,
        "origins": chain.origins,
        "proven": all(link.status == "proven" for link in chain.links),
    }
    broken = chain.broken_link
    if broken is None:
        origins = join_names(chain.origins)
        start = f" from {origins}" if origins else ""
        blocks.append(f"ok: {count_text(len(chain.links), 'link')}{start} ({chain.seconds:.1f} s)")
        return Report(blocks, fields)
    if broken.status == "failed":
        error = PrepError(f"the link {_link_text(broken)} failed", broken.reason, GET_AGAIN_HINT)
    else:
        hint = text(
            "{} finds moved checkpoints, {} accepts the link",
            Option("search", "FOLDER"),
            Option("allow_unproven", True),
        )
        error = PrepError(f"the link {_link_text(broken)} is not proven", broken.reason, hint)
    return Report(blocks, fields, error=error)


def _link_text(link: ChainLink) -> str:
    """Return the ends of a link, e.g. `m-hf <- export of m-init`."""
    if not link.source:
        return link.output
    return f"{link.output} <- {link.command} of {link.source}"


def roundtrip_report(roundtrip: Roundtrip) -> Report:
    """Return the report of a certificate: a table of the ways. It has an error if a way changed the model."""
    rows: list[tuple[str, ...]] = []
    for way in roundtrip.ways:
        status = "0 bits changed" if way.status == "equal" else way.status
        counts = (f"{way.tensors:,}", format_bytes(way.nbytes), way.digest)
        rows.append(
            (way.name, status, *(("", "", "") if way.status == "not available" else counts))
        )
    header = ROUNDTRIP_HEADER
    blocks: list[Block] = [Table(header, rows, header[2:4], optional=["digest", "bytes"])]
    blocks += [f"{way.name}: {way.reason}" for way in roundtrip.ways if way.reason]
    blocks.append(str(roundtrip.path))
    error: PrepError | None = None
    for way in roundtrip.ways:
        if way.status == "different":
            what = f"{roundtrip.source} is not the same after the way {way.name}"
            error = PrepError(what, way.reason, "report it with the certificate")
            break
    return Report(blocks, json_fields(roundtrip), error=error)


# --- Locks, maps and aliases


def lock_report(locked: LockedModel, ui: Ui) -> Report:
    """Note what a lock file covers, and return its path."""
    size = format_bytes(locked.nbytes)
    state = "already locked" if locked.already_done else "locked"
    counts = f"{count_text(locked.files, 'file')}, {count_text(locked.tensors, 'tensor')}"
    ui.note(f"{state}  {counts}, {size} in {locked.seconds:.1f} s")
    fields = json_fields(locked, "path", "source", "revision", "files", "tensors")
    fields |= {"bytes": locked.nbytes, "already": locked.already_done}
    return Report(str(locked.path), fields)


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
    error: PrepError | None = None
    if not suggestion:
        names = list(suggestion.unmatched or suggestion.unused)
        verb = "has" if len(names) == 1 else "have"
        error = PrepError(
            f"the map {suggestion.path} is not complete",
            f"{join_names(names, max_names=MAX_LISTED)} {verb} no row",
            "write rows or `drop` lines for them",
        )
    return Report(lines, json_fields(suggestion), error=error)


def aliases_report(aliases: Sequence[Alias]) -> Report:
    """Return the table of aliases with the supported model types, and fields with sizes in bytes."""
    entries: list[dict[str, object]] = []
    rows: list[list[Cell]] = []
    for alias in aliases:
        # gcd(50257, 8) = 1: an odd vocabulary stays whole. gcd(50400, 128) = 32: each shard is on 4 devices.
        shards = {str(count): math.gcd(alias.vocab, count) for count in DEVICE_COUNTS}
        names = {"alias": alias.name, "hub_id": alias.hub_id, "family": alias.family}
        sizes = {"parameters": alias.parameters, "bytes": alias.nbytes, "vocab": alias.vocab}
        entries.append({**names, **sizes, "gcd": shards})
        size = format_bytes(alias.nbytes)
        rows.append([*names.values(), alias.parameters, size, alias.vocab, *shards.values()])
    header = ["alias", "hub id", "family", "parameters", "size", "vocabulary"]
    header += [f"shards on {count}" for count in DEVICE_COUNTS]
    table = Table(header, rows, ["size"], optional=OPTIONAL_COLUMNS)
    fields = {
        "models": entries,
        "families": [*FAMILIES],
        "supported": {"convert": "any", "train": [*FAMILIES], "generate": [*FAMILIES]},
    }
    families = ", ".join(FAMILIES)
    paragraphs = (
        f"{len(FAMILIES)} model types convert, train and generate: {families}",
        "a multimodal model with a text part of such a type (model_type of its text_config) converts with its towers,"
        " and trains and generates as its text part",
        f"all other model types convert: {CANNOT_TRAIN}",
    )
    filled = [Paragraph(textwrap.fill(paragraph, TEXT_WIDTH)) for paragraph in paragraphs]
    return Report([table, "", *filled], fields)
