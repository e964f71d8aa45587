"""Export of dequantised weights: as their quantised bytes, or as their values."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from dataclasses import replace

from prepcli.commands.operations.conversion import CommonOptions, open_checkpoint
from prepcli.commands.operations.options import ExportOptions
from prepcli.core.errors import Option, text, usage_error
from prepcli.core.observer import Observer
from prepcli.sources.dequantized import has_quantized_weights
from prepcli.sources.source import Source


def open_original(
    options: ExportOptions, common: CommonOptions, observer: Observer
) -> Source | None:
    """Open the model of the option `quantized_source` with the names of its files, or return None without it.

    Raises:
        PrepError: It does not exist, or cannot be read.
    """
    path = options["quantized_source"]
    if path is None:
        return None
    original = replace(
        common,
        checkpoint=str(path),
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
            text("{} has no quantised bytes", Option("quantized_source", path)),
            "its weights are not quantised",
            "name the quantised model that the checkpoint was made from",
        )
    return source


def writes_quantized(options: ExportOptions, source: Source) -> bool:
    """Return whether an export writes quantised bytes.

    Raises:
        UsageError: Other options do not allow it, or the option `quantized_source` has no effect.
    """
    option = Option("quantized_source", options["quantized_source"])
    if not source.quantized or options["quantized"] == "dequantize":
        if options["quantized_source"] is not None:
            why = f"{source.display_name} has no dequantised weights"
            if source.quantized:
                why = text("{} writes the values", Option("quantized", "dequantize"))
            raise usage_error(text("{} has no effect", option), why, text("remove {}", option))
        return False
    conflicts = {"layout": "hf", "dtype": None, "keep_padding": False, "text_only": False}
    for name, default in conflicts.items():
        value = options[name]
        if value != default:
            raise usage_error(
                text("{} is not supported for quantised weights", Option(name, value)),
                f"the export of {source.display_name} has the quantised bytes of its source",
                text("{} writes the values", Option("quantized", "dequantize")),
            )
    return True
