"""`prep pad-vocab`: add rows to the vocabulary of a Hugging Face folder so that a mesh divides it."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Unpack

from prepcli.algebra.axis_map import ParsedAxisMap
from prepcli.commands.operations.checkpoint_options import common_options, make_match_options
from prepcli.commands.operations.conversion import (
    OUT_PLACEHOLDER,
    OpenedConversion,
    open_conversion,
)
from prepcli.commands.operations.operation import check_mutually_exclusive, public, reject_without
from prepcli.commands.operations.options import PadVocabOptions, SaveInitOptions
from prepcli.commands.operations.results import Conversion
from prepcli.core.errors import Command, Option, PrepError, invalid_config_error, text, usage_error
from prepcli.core.formatting import count_text, did_you_mean, format_bytes
from prepcli.core.observer import Observer, Progress
from prepcli.core.option_spec import PathLike
from prepcli.engine.fills import Fill
from prepcli.execution.workers import ProcessOptions
from prepcli.models.mesh import parse_mesh
from prepcli.models.partition import vocab_multiple
from prepcli.models.rules import PARAM_RULES, format_rule
from prepcli.sources.source import Source, source_rows
from prepcli.sources.tensor_match import Vocabulary, check_padded_size
from prepcli.targets.orbax_item import Partitioning
from prepcli.targets.planner import Draft, start_draft, with_rows
from prepcli.targets.safetensors_folder import place_in_source_files

FILL_KINDS = ("zeros", "mean", "normal")
SEED_LIMIT = 1 << 64
DEFAULT_MULTIPLE = 8
# Digits of the option `pad_vocab`.
MAX_MULTIPLE_DIGITS = 18


@public
def pad_vocab(
    checkpoint: PathLike,
    out: PathLike | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | Observer | None = None,
    process_options: ProcessOptions | None = None,
    **options: Unpack[PadVocabOptions],
) -> Conversion:
    """Pad the vocabulary of a checkpoint and write a Hugging Face folder.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        out: Output folder. Default: a name made from the checkpoint's.
        dry_run: Return the plan from headers only. No weight is read and no file is written.
        progress: Receives the bytes written. Default: none. See `Progress`.
        process_options: Share of this process in the work. Default: all of it.
        **options: See `PadVocabOptions`.

    Returns:
        The output's path and counts. If an equal output exists, no file is written: `already_done` is True.

    Raises:
        UsageError: An argument is invalid, or the request does not fit the source.
        OutputExistsError: `out` exists and is not the result of this request.
        DamagedError: Files of the source are damaged.
        PrepError: The conversion failed. An interrupted one resumes when called again.
    """
    check_mutually_exclusive(
        {"multiple": options["multiple"], "size": options["size"], "mesh": options["mesh"]}
    )
    check_seed(options["init"], options["seed"])
    opened = open_conversion(
        "pad-vocab",
        common_options(checkpoint, out, options, dry_run=dry_run, process_options=process_options),
        progress,
    )
    return _write_padded(opened, options)


def padded_size(options: PadVocabOptions, vocabulary: Vocabulary) -> int:
    """Return the requested number of rows. Raise UsageError if it is too small or too large."""
    size = options["size"]
    if size is not None:
        if size < vocabulary.true_size:
            why = f"the true vocabulary has {vocabulary.true_size} rows"
            raise usage_error(
                text("{} is too small", Option("size", size)),
                why,
                text("{} or more", Option("size", vocabulary.true_size)),
            )
        return check_padded_size(size, Option("size", size))
    if options["mesh"] is not None:
        mesh = parse_mesh(options["mesh"])
        return vocabulary.padded_size(
            math.lcm(*(mesh.size(axis) for axis in PARAM_RULES["vocab"][0]))
        )
    multiple = options["multiple"] or DEFAULT_MULTIPLE
    return check_padded_size(vocabulary.padded_size(multiple), Option("multiple", multiple))


def check_seed(init: str, seed: int | None) -> None:
    """Raise UsageError if a seed is set but the new rows are not random."""
    if init != "normal":
        why = "zeros and mean are not random"
        reject_without(Option("seed"), seed, Option("init", "normal"), why)


def make_fill(init: str, seed: int | None, source: Source) -> Fill:
    """Return the fill of new rows: `init` is one of FILL_KINDS, and the seed of `normal` is 0 if it is None."""
    if init not in FILL_KINDS:
        raise usage_error(
            text("unknown {}", Option("init", init)),
            f"it takes {', '.join(FILL_KINDS)}",
            did_you_mean(init, FILL_KINDS) or text("{}", Option("init", "zeros")),
        )
    if init != "normal":
        return Fill(init)
    seed = seed or 0
    if seed >= SEED_LIMIT:
        raise usage_error(
            text("{} is too large", Option("seed", seed)),
            f"it must be less than {SEED_LIMIT:,}",
            text("{}", Option("seed", 0)),
        )
    std = source.config.get("initializer_range", 0.02)
    if not isinstance(std, int | float) or not 0 <= std < math.inf:
        raise invalid_config_error(f"initializer_range is {std!r}, it must be a finite number >= 0")
    return Fill(init, seed, float(std))


def _write_padded(opened: OpenedConversion, options: PadVocabOptions) -> Conversion:
    """Copy each tensor to the file of the same name, with more rows in the vocabulary's tensors."""
    source = opened.source
    if not source.tensor_file_names:
        hint = text(
            "{} also pads, and {} writes a Hugging Face folder",
            Command("save-init", Option("pad_vocab", "N")),
            Command("export"),
        )
        what = f"{source.display_name} is an Orbax checkpoint"
        raise usage_error(what, "pad-vocab pads Hugging Face folders", hint)
    draft = start_draft(
        source,
        source_rows(source),
        make_match_options(options),
        true_vocab=options["true_vocab"],
        kept={tensor.name for tensor in source.tensors},
    )
    size = padded_size(options, draft.vocabulary)
    draft = with_rows(draft, size, make_fill(options["init"], options["seed"], source))
    multiple = options["multiple"] or DEFAULT_MULTIPLE
    if options["size"] is not None or options["mesh"] is not None:
        multiple = None
    name = f"{opened.located.model_name.removesuffix('-padded')}-padded"
    return opened.convert(
        draft,
        place_in_source_files(draft),
        PadVocabOptions,
        # `pad-vocab m` and `pad-vocab m --multiple 8` write the same output, so both record the multiple.
        {**options, "multiple": multiple},
        name=name,
        notes=(_vocabulary_line(draft, options["init"]),),
        fields={
            "vocab": {
                "true": draft.vocabulary.true_size,
                "padded": size,
                "multiple": multiple,
                "init": options["init"],
            }
        },
        next_command=f"prep save-init {OUT_PLACEHOLDER}{_save_init_options(options, source)}",
    )


def _save_init_options(options: PadVocabOptions, source: Source) -> str:
    """Return the options of `save-init` for the mesh of the padding.

    A dim that the mesh does not divide evenly gets a rule that keeps it whole.
    """
    mesh_text = options["mesh"]
    if mesh_text is None:
        return ""
    mesh = parse_mesh(mesh_text)
    sizes = source.family.sizes(source.config)
    # A dim that the mesh does not divide, e.g. the 25 heads of GPT-2 XL on mp=4, needs a rule that keeps it whole.
    rules = [
        format_rule(dim, (axes, ()))
        for dim, (axes, *alternatives) in PARAM_RULES.items()
        if dim != "vocab"
        and not alternatives
        and sizes.get(dim, 0) % math.prod(map(mesh.size, axes))
    ]
    return "".join([f" --mesh {mesh_text}", *(f" --rule '{rule}'" for rule in rules)])


def _vocabulary_line(draft: Draft, init: str) -> str:
    source = draft.source
    tensor = next(t for t in source.tensors if t.name in draft.resize.tensors)
    stored_size = draft.resize.vocabulary.stored_size
    size = draft.vocabulary.stored_size
    added_rows = size - stored_size
    row_nbytes = tensor.nbytes // tensor.shape[0]
    if added_rows <= 0:
        nbytes = format_bytes(sum(t.nbytes for t in (*source.tensors, *source.tower_tensors)))
        return f"vocabulary {stored_size} -> {size}: nothing to add, the output is a full copy of {nbytes}"
    tie_note = "   embedding and head are tied: padded once" if draft.match.is_tied else ""
    added = f"+{count_text(added_rows, 'row')} of {init}, {format_bytes(added_rows * row_nbytes)}"
    return f"vocabulary {stored_size} -> {size} ({added}){tie_note}"


def padded_vocab_rows(options: SaveInitOptions, draft: Draft, partitioning: Partitioning) -> int:
    """Return the rows of the vocabulary in an Orbax checkpoint, for the padding `no`, `auto` or a multiple."""
    vocabulary = draft.vocabulary
    pad_vocab = str(options["pad_vocab"])
    if pad_vocab == "no":
        return vocabulary.stored_size
    if pad_vocab == "auto":
        # From the stored size, because save-init never removes rows: 50257 rows on mp=4 become 50260.
        return mesh_rows(draft.rows, partitioning, vocabulary.stored_size)
    option = Option("pad_vocab", pad_vocab)
    is_number = pad_vocab.isdecimal() and len(pad_vocab) <= MAX_MULTIPLE_DIGITS
    if not is_number or int(pad_vocab) < 1:
        raise usage_error(
            text("invalid {}", option),
            "it takes no, auto, or a multiple",
            text("{}", Option("pad_vocab", "8")),
        )
    padded = check_padded_size(vocabulary.padded_size(int(pad_vocab)), option)
    if padded < vocabulary.stored_size:
        why = f"the tensors have {vocabulary.stored_size} rows, {vocabulary.true_size} of them for tokens"
        hint = text("{} removes padding", Command("export"))
        raise PrepError(text("{} would remove rows", option), why, hint)
    return padded


def mesh_rows(rows: Mapping[str, ParsedAxisMap], partitioning: Partitioning, num_rows: int) -> int:
    """Return the smallest multiple for the mesh, of at least `num_rows` rows."""
    dims = {path: row.leaf_dims for path, row in rows.items()}
    multiple = vocab_multiple(dims, partitioning.mesh, partitioning.rules)
    return -(-num_rows // multiple) * multiple
