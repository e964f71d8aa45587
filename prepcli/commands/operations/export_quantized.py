"""Export of decoded weights: as the quantised bytes of their original model, or as their values."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from prepcli.commands.operations.conversion import CommonOptions, open_checkpoint
from prepcli.commands.operations.options import ExportOptions
from prepcli.core.counts import count_text
from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.core.json_values import quote_name
from prepcli.core.observer import Observer
from prepcli.planning.manifest_fields import Manifest
from prepcli.sources.dequantized import DECODED_DTYPE, has_quantized_weights
from prepcli.sources.hub_folders import cached_model
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.quantized_bytes import with_quantized_bytes
from prepcli.sources.recorded_sources import find_quantized_source
from prepcli.sources.references import HubRepo, parse_reference
from prepcli.sources.source import Source

SOURCE_OPTION = Option("quantized_source", "SOURCE")


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
    conflict = _conflict(options)
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
    dtype = options["dtype"] or _decoded_dtype(source.tree_manifest)
    observer.note(text("{} in {}, without the quantised bytes: {}", count, dtype, reason))
    return source


def _conflict(options: ExportOptions) -> Option | None:
    """Return an option that changes the weights, so that their quantised bytes do not fit."""
    unchanged = {"layout": "hf", "dtype": None, "keep_padding": False, "text_only": False}
    for name, default in unchanged.items():
        if options[name] != default:
            return Option(name, options[name])
    return None


def _decoded_dtype(manifest: Manifest) -> str:
    """Return the dtype of the decoded weights, which is the same for all."""
    record = manifest.tensors.get(next(iter(manifest.quantized)))
    return record.get("dtype", DECODED_DTYPE) if record else DECODED_DTYPE


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
    _check_stamps(original, manifest.source_files)
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


def _check_stamps(original: Source, recorded: Sequence[Mapping[str, object]]) -> None:
    """Raise PrepError if a file of the original has another size or header digest than its recorded stamp."""
    present = [(stamp.path, stamp.size, stamp.digest) for stamp in original.file_stamps]
    for stamp in recorded:
        if (stamp.get("path"), stamp.get("size"), stamp.get("digest")) not in present:
            path = quote_name(str(stamp.get("path")))
            raise PrepError(
                f"{original.display_name} has changed",
                f"it has no {path} with the recorded size and header",
                text("{} names the quantised model", SOURCE_OPTION),
            )
