"""The source of an export: the parts of a model with towers, and the bytes of a quantised one.

The towers are the image and audio encoders of a multimodal model, and multi-token prediction. Decoded weights are
exported as the quantised bytes of their original model, or as their values.
"""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prepcli.commands.operations.opening import CommonOptions, open_checkpoint
from prepcli.commands.operations.options import ExportOptions
from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.formatting import count_text
from prepcli.core.json_values import quote_name
from prepcli.core.observer import Observer
from prepcli.restore.digest_checks import towers_digest
from prepcli.sources.dequantized import (
    DECODED_DTYPE,
    has_quantized_weights,
    with_quantized_bytes,
)
from prepcli.sources.folders import Access, cached_model
from prepcli.sources.locate import LocatedCheckpoint, locate
from prepcli.sources.model_family import text_model, text_part_fault, with_towers
from prepcli.sources.opening import open_source
from prepcli.sources.recorded_sources import find_quantized_source
from prepcli.sources.references import HubRepo, parse_reference
from prepcli.sources.source import Source
from prepcli.sources.vocabulary_tensors import prediction_vocabulary

SOURCE_OPTION = Option("quantized_source", "SOURCE")
# A tower is the image or audio encoder of a multimodal model. Multi-token prediction is stored like one.
NO_TOWERS = "it has no vision or audio towers, and no multi-token prediction"
TOWERS_HINT = text(
    "{} names a copy, {} leaves the towers out",
    Option("towers", "CHECKPOINT"),
    Option("text_only", True),
)


def select_parts(
    options: ExportOptions, source: Source, access: Access, *, check_digest: bool
) -> Source:
    """Return the source of an export, with the requested parts of a model with towers.

    Raises:
        PrepError: An option does not fit the source, or the towers differ from the ones at the start of the run.
    """
    recorded = source.tree_manifest.towers
    has_towers = source.wrapper is not None or recorded is not None
    towers = options["towers"]
    if options["text_only"]:
        if not has_towers:
            why = text_part_fault(source) or NO_TOWERS
            raise no_effect_error(Option("text_only", True), source, why)
        if towers is not None:
            why = text("{} leaves them out", Option("text_only", True))
            raise no_effect_error(Option("towers", str(towers)), source, why)
        return text_model(source)
    if not has_towers or source.tower_tensors:
        if towers is not None:
            why = "it has its own towers" if has_towers else NO_TOWERS
            raise no_effect_error(Option("towers", str(towers)), source, why)
        return source
    if towers is None and source.wrapper is not None:
        # The model was saved without its towers.
        return source
    recorded = recorded or {}
    path = recorded.get("path") if towers is None else str(towers)
    if not isinstance(path, str):
        what = f"the manifest of {source.display_name} does not name the model with the towers"
        raise PrepError(what, "its `towers` entry has no `path`", TOWERS_HINT)
    other = _open_towers(source, path, access)
    if check_digest:
        _check_digest(source, other, recorded)
    _check_tokens(source, other)
    return with_towers(source, other)


def no_effect_error(option: Option, source: Source, why: str) -> PrepError:
    """Return the error for an option without effect on the export of a source."""
    what = text("{} has no effect for {}", option, source.display_name)
    return usage_error(what, why, text("remove {}", Option(option.name)))


def _open_towers(source: Source, path: str, access: Access) -> Source:
    """Open the model with the towers of a training step."""
    what = f"the towers of {source.display_name} cannot be read"
    try:
        other = open_source(locate(path, access=access))
    except PrepError as error:
        why = f"{error.what}: {error.why}"
        raise PrepError(what, why, TOWERS_HINT) from error
    if other.wrapper is not None:
        return other
    raise PrepError(what, f"{path} has no towers", TOWERS_HINT)


def _check_tokens(source: Source, other: Source) -> None:
    """Raise PrepError if multi-token prediction has no rows for tokens that were added to a training step."""
    size = source.vocabulary().true_size
    other_size = other.vocabulary().true_size
    if other_size >= size or not any(prediction_vocabulary(other)):
        return
    what = f"the multi-token prediction of {other.display_name} has no rows for new tokens"
    why = f"{other.display_name} has {other_size:,} tokens, {source.display_name} has {size:,}"
    hint = text(
        "{} adds them, then name its output with {}. {} leaves multi-token prediction out",
        Command("add-tokens", other.display_name),
        Option("towers", "CHECKPOINT"),
        Option("text_only", True),
    )
    raise PrepError(what, why, hint)


def _check_digest(source: Source, other: Source, recorded: Any) -> None:
    """Raise PrepError if the towers differ from the record of a training step."""
    # A model that was saved without towers has no record of them.
    if "digest" not in recorded:
        return
    digest = towers_digest(other)
    if recorded.get("digest") == digest:
        return
    what = f"{other.display_name} has other towers than the model of {source.display_name} at its start"
    why = f"their first rows have the digest {digest}, the step records {recorded.get('digest')}"
    hint = text(
        "name the model at the start of the run with {}, or pass {}",
        Option("towers", "CHECKPOINT"),
        Option("text_only", True),
    )
    raise PrepError(what, why, hint)


def take_quantized_bytes(
    options: ExportOptions,
    source: Source,
    located: LocatedCheckpoint,
    common: CommonOptions,
    observer: Observer,
) -> Source:
    """Return a source with the quantised bytes of its original model in place of decoded weights.

    The original is the model of the option `quantized_source`, else the one that the manifest names. If the latter
    cannot be used, a note says why, and the source is returned unchanged: its export has the decoded values.

    Raises:
        PrepError: The model of the option cannot be used, or the option has no effect.
    """
    path = options["quantized_source"]
    option = Option("quantized_source", path)
    if not source.quantized or options["quantized"] == "dequantize":
        if path is not None:
            why = f"{source.display_name} has no decoded weights"
            if source.quantized:
                why = text("{} writes the values", Option("quantized", "dequantize"))
            raise usage_error(text("{} has no effect", option), why, text("remove {}", option))
        return source
    true_vocab = options["true_vocab"]
    # An option that changes the weights, so that their quantised bytes do not fit
    conflict: Option | None = None
    unchanged = {"layout": "hf", "dtype": None, "keep_padding": False, "text_only": False}
    for name, default in unchanged.items():
        if conflict is None and options[name] != default:
            conflict = Option(name, options[name])
    if path is not None:
        if conflict is not None:
            raise usage_error(
                text("{} is not supported for quantised weights", conflict),
                text("{} takes the weights unchanged", option),
                text("remove {}", option),
            )
        # The recorded values are compared while they are read, so any copy of the model may be named.
        original = _open_original(str(path), common, observer)
        return with_quantized_bytes(source, original, true_vocab=true_vocab)
    if conflict is not None:
        reason = text("{} is not supported for quantised weights", conflict)
    else:
        try:
            original = _open_recorded_original(source, located, common, observer)
            return with_quantized_bytes(source, original, true_vocab=true_vocab)
        except PrepError as error:
            why = f": {error.why}" if error.why else ""
            reason = text("{}{}. {} names the quantised model", error.what, why, SOURCE_OPTION)
    count = count_text(len(source.quantized), "decoded weight")
    manifest = source.tree_manifest
    # The dtype of the decoded weights is the same for all.
    record = manifest.tensors.get(next(iter(manifest.quantized))) or {}
    dtype = options["dtype"] or record.get("dtype", DECODED_DTYPE)
    observer.note(text("{} in {}, without the quantised bytes: {}", count, dtype, reason))
    return source


def _open_recorded_original(
    source: Source, located: LocatedCheckpoint, common: CommonOptions, observer: Observer
) -> Source:
    """Open the quantised model of the manifest. A model of the hub is not downloaded.

    Raises:
        PrepError: It is not found, cannot be read, or has changed.
    """
    name, manifest = find_quantized_source(source.tree_manifest, located.files.path)
    reference = parse_reference(name)
    if isinstance(reference, HubRepo):
        name = str(cached_model(reference, manifest.origin.get("commit")))
    original = _open_original(name, common, observer)
    present = [(stamp.path, stamp.size, stamp.digest) for stamp in original.file_stamps]
    for stamp in manifest.source_files:
        if (stamp.get("path"), stamp.get("size"), stamp.get("digest")) not in present:
            path = quote_name(str(stamp.get("path")))
            raise PrepError(
                f"{original.display_name} has changed",
                f"it has no {path} with the recorded size and header",
                text("{} names the quantised model", SOURCE_OPTION),
            )
    return original


def _open_original(name: str, common: CommonOptions, observer: Observer) -> Source:
    """Open a quantised model with the names of its files.

    Raises:
        PrepError: It does not exist, cannot be read, or is not quantised.
    """
    original = replace(
        common,
        checkpoint=name,
        step=None,
        revision=None,
        config=None,
        ema=False,
        # Quantised weights have the names of their files anyway. An init has its own names.
        verbatim=None,
        copied_files=(),
        # The option `lock` is for the exported checkpoint. Its records also have the digests of the decoded values, so
        # the original is checked by them.
        lock=None,
        quantized="stored",
    )
    _, source = open_checkpoint(original, observer)
    if not has_quantized_weights(source):
        raise usage_error(
            f"{name} has no quantised bytes",
            "its weights are not quantised",
            text("{}: the quantised model that the checkpoint was made from", SOURCE_OPTION),
        )
    return source
