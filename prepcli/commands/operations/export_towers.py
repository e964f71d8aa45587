"""The parts of a model in an export: its parameters, and the tensors beside them.

These are the towers of a multimodal model (image and audio encoders), and multi-token prediction.
"""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from typing import Any

from prepcli.commands.operations.options import ExportOptions
from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.restore.digest_checks import towers_digest
from prepcli.sources.folders import Access
from prepcli.sources.locate import locate
from prepcli.sources.multimodal import text_model, text_part_fault, with_towers
from prepcli.sources.opening import open_source
from prepcli.sources.source import Source
from prepcli.sources.vocabulary_tensors import prediction_vocabulary

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

    Args:
        options: Options of the export.
        source: Opened source.
        access: How a remote model with the towers may be read.
        check_digest: Whether to compare the towers of a training step with their recorded digest.

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
    path = str(towers) if towers is not None else _recorded_path(source, recorded)
    other = _open_towers(source, path, access)
    if check_digest:
        _check_digest(source, other, recorded)
    _check_tokens(source, other)
    return with_towers(source, other)


def no_effect_error(option: Option, source: Source, why: str) -> PrepError:
    """Return the error for an option without effect on the export of a source."""
    what = text("{} has no effect for {}", option, source.display_name)
    return usage_error(what, why, text("remove {}", Option(option.name)))


def _recorded_path(source: Source, recorded: Any) -> str:
    """Return the path of the start model of a run."""
    path = recorded.get("path")
    if isinstance(path, str):
        return path
    what = f"the manifest of {source.display_name} does not name the model with the towers"
    raise PrepError(what, "its `towers` entry has no `path`", TOWERS_HINT)


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
