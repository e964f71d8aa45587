"""`prep save-init` and `prep reshard`: write an Orbax checkpoint, laid out for a mesh."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from prepcli.commands.operations.checkpoint_options import (
    check_allow_overflow,
    common_options,
    make_match_options,
)
from prepcli.commands.operations.conversion import (
    OUT_PLACEHOLDER,
    open_conversion,
    why_not_computed,
)
from prepcli.commands.operations.operation import public, reject_without
from prepcli.commands.operations.options import ReshardOptions, SaveInitOptions
from prepcli.commands.operations.pad_vocab import check_seed, make_fill, padded_vocab_rows
from prepcli.commands.operations.results import Conversion
from prepcli.core.errors import Command, Option, text, usage_error
from prepcli.core.formatting import count_text, format_bytes
from prepcli.core.observer import Observer, Progress
from prepcli.core.option_spec import PathLike, as_tuple, with_defaults
from prepcli.execution.workers import ProcessOptions
from prepcli.formats.codecs import parse_compression
from prepcli.formats.manifest import find_manifest_folder, read_manifest
from prepcli.formats.orbax import find_item
from prepcli.models.mesh import folder_suffix, parse_mesh
from prepcli.models.rules import LeafDims, check_leaf_rules, merge_rules, with_default_preset
from prepcli.models.verbatim import CANNOT_TRAIN
from prepcli.planning.item_storage import ORBAX_STORAGES
from prepcli.planning.plan import DroppedTensor
from prepcli.planning.tensors import OPT_STATE_RULE, is_quantization_tensor
from prepcli.sources.detect import is_quantized
from prepcli.sources.model_family import as_verbatim, truncate_layers
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.orbax_item import (
    OrbaxLayout,
    Partitioning,
    device_nbytes,
    find_fallbacks,
    item_read_amplification,
    tower_leaf,
)
from prepcli.targets.planner import (
    NATIVE_TREE,
    Draft,
    Placed,
    dropped_state,
    start_draft,
    with_rows,
    with_source_state,
)

# A TPU host and many GPU hosts have 4 devices. The number is used to estimate the bytes read by a host.
DEVICES_PER_HOST = 4


@public
def save_init(
    checkpoint: PathLike,
    out: PathLike | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | Observer | None = None,
    process_options: ProcessOptions | None = None,
    **options: Unpack[SaveInitOptions],
) -> Conversion:
    """Convert a Hugging Face folder to an Orbax checkpoint whose chunks are the shards of a mesh.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        out: Output folder or URL. Default: a name made from the checkpoint's.
        dry_run: Return the plan from headers only. No weight is read and no file is written.
        progress: Receives the bytes written. Default: none. See `Progress`.
        process_options: Share of this process in the work. Default: all of it.
        **options: See `SaveInitOptions`.

    Returns:
        The output's path and counts. If an equal output exists, no file is written: `already_done` is True.

    Raises:
        UsageError: An argument is invalid, or the request does not fit the source.
        OutputExistsError: `out` exists and is not the result of this request.
        DamagedError: Files of the source are damaged.
        PrepError: The conversion failed. An interrupted one resumes when called again.
    """
    _check_padding_options(options)
    if options["quantized"] == "keep":
        check_allow_overflow(options["allow_overflow"], options["dtype"])
    opened = open_conversion(
        "save-init",
        common_options(checkpoint, out, options, dry_run=dry_run, process_options=process_options),
        progress,
    )
    source = opened.source
    if source.tree_manifest:
        name = source.display_name
        hint = text(
            "{} changes its mesh, {} writes a Hugging Face folder",
            Command("reshard", name, Option("mesh", "DP,FSDP,MP")),
            Command("export", name),
        )
        what = f"{name} is already an Orbax checkpoint"
        raise usage_error(what, "save-init does not read the format that it writes", hint)
    draft, layout = _draft_item(options, source)
    placed = layout.place(draft)
    name = opened.located.model_name
    return opened.convert(
        draft,
        placed,
        SaveInitOptions,
        options,
        name=name,
        out_name=f"{name}-{'step' if layout.is_training_step else 'init'}",
        notes=_layout_lines(draft, layout, placed),
        fields=_layout_fields(draft, placed),
        next_command=_next_command(source),
    )


def _next_command(source: Source) -> str:
    """Return the command that follows save-init: training, if prep can train the model."""
    if why_not_computed(source) is not None:
        return f"prep reshard {OUT_PLACEHOLDER} --mesh DP,FSDP,MP"
    return f"prep train RECIPE --set model.path={OUT_PLACEHOLDER}"


@public
def reshard(
    checkpoint: PathLike | None = None,
    out: PathLike | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | Observer | None = None,
    process_options: ProcessOptions | None = None,
    **options: Unpack[ReshardOptions],
) -> Conversion:
    """Write an Orbax checkpoint again for another mesh or layer layout.

    Args:
        checkpoint: Folder or URL of an init checkpoint, a training run or a step of one. Default: the only
            checkpoint of prep in the current folder that reshard did not write.
        out: Output folder or URL. Default: a name made from the checkpoint's.
        dry_run: Return the plan from headers only. No weight is read and no file is written.
        progress: Receives the bytes written. Default: none. See `Progress`.
        process_options: Share of this process in the work. Default: all of it.
        **options: See `ReshardOptions`.

    Returns:
        The output's path and counts. If an equal output exists, no file is written: `already_done` is True.

    Raises:
        UsageError: An argument is invalid, or the request does not fit the source.
        OutputExistsError: `out` exists and is not the result of this request.
        DamagedError: Files of the source are damaged.
        PrepError: The conversion failed. An interrupted one resumes when called again.
    """
    opened = open_conversion(
        "reshard",
        common_options(checkpoint, out, options, dry_run=dry_run, process_options=process_options),
        progress,
        _is_unresharded,
    )
    source = opened.source
    if source.tensor_file_names:
        command_line = Command("save-init", source.display_name, Option("mesh", "DP,FSDP,MP"))
        raise usage_error(
            f"{source.display_name} is not an Orbax checkpoint written by prep",
            "reshard reads the output of save-init and training runs",
            text("{}", command_line),
        )
    # `reshard` has none of the options of new rows and casts.
    values = with_defaults(SaveInitOptions, options)
    draft, layout = _draft_item(values, source, params_only=options["params_only"])
    placed = layout.place(draft)
    name = opened.located.model_name
    mesh = layout.partitioning.mesh
    return opened.convert(
        draft,
        placed,
        ReshardOptions,
        options,
        name=name,
        out_name=f"{name}-{'init' if mesh is None else folder_suffix(mesh)}",
        notes=_layout_lines(draft, layout, placed),
        fields=_layout_fields(draft, placed),
    )


def _check_padding_options(options: SaveInitOptions) -> None:
    """Raise UsageError for padding options without effect."""
    if options["pad_vocab"] == "no":
        why = "it sets the values of the padding"
        # The value zeros is the default, and does not count as set.
        init = options["init"] if options["init"] != "zeros" else None
        reject_without(Option("init"), init, Option("pad_vocab"), why)
        reject_without(Option("seed"), options["seed"], Option("pad_vocab"), why)
    if options["mesh"] is None:
        is_auto = options["pad_vocab"] == "auto"
        why = "auto pads to a size that the mesh divides"
        reject_without(Option("pad_vocab", "auto"), is_auto, Option("mesh"), why)
    check_seed(options["init"], options["seed"])


def _is_unresharded(folder: Path) -> bool:
    """Return whether the folder is an Orbax checkpoint of another command than `prep reshard`."""
    manifest = read_manifest(find_manifest_folder(folder))
    return find_item(folder) is not None and manifest is not None and manifest.command != "reshard"


def _draft_item(
    options: SaveInitOptions, source: Source, *, params_only: bool = False
) -> tuple[Draft, OrbaxLayout]:
    """Return the draft of an Orbax item with every tensor of a source, and the layout for its mesh."""
    left: tuple[DroppedTensor, ...] = ()
    if options["training_state"]:
        # Most conversions start without the layouts of optimizer states.
        from prepcli.commands.operations.training_state import check_imported_state

        check_imported_state(options, source)
    else:
        source, left = _without_state(source, params_only)
    if options["layers"] is not None:
        source, later_layers = truncate_layers(source, options["layers"])
        left = (*later_layers, *left)
    if source.family.is_verbatim:
        _check_verbatim_options(options, source)
        if options["dtype"]:
            source = as_verbatim(source, options["dtype"])
    layout = resolve_layout(options, source, params_only=params_only)
    draft = start_draft(
        source,
        layout.rows(source),
        make_match_options(options),
        true_vocab=options["true_vocab"],
        dtype=options["dtype"],
    )
    # A tied head has no leaf in the output, so a rule for it would have no effect.
    tied_leaf = source.family.tying.head_leaf if draft.match.is_tied else None
    dims: dict[str, LeafDims] = {}
    for path, axis_map in draft.rows.items():
        if path != tied_leaf:
            dims[path] = axis_map.leaf_dims
    for tensor in source.tower_tensors:
        dims[tower_leaf(tensor)] = tuple((f"d{axis}",) for axis in range(len(tensor.shape)))
    check_leaf_rules(layout.partitioning.rules, dims)
    num_rows = padded_vocab_rows(options, draft, layout.partitioning)
    draft = with_rows(draft, num_rows, make_fill(options["init"], options["seed"], source))
    return replace(with_source_state(draft), left=left), layout


def _without_state(source: Source, params_only: bool) -> tuple[Source, tuple[DroppedTensor, ...]]:
    """Return a source without the tensors of the state to drop, and a record of each dropped tensor.

    The optimizer state of a training step and the scales of dequantised weights stay, unless `params_only` is set.
    """
    if params_only:
        dropped = tuple(dropped_state(source))
        return replace(source, state_tensors=(), quantized={}), dropped
    if source.tree_manifest.is_training_step:
        return source, ()
    scales: list[SourceTensor] = []
    others: list[SourceTensor] = []
    for tensor in source.state_tensors:
        kind = scales if is_quantization_tensor(tensor.name) else others
        kind.append(tensor)
    dropped = tuple(dropped_state(replace(source, state_tensors=tuple(others))))
    return replace(source, state_tensors=tuple(scales)), dropped


def resolve_layout(options: SaveInitOptions, source: Source, *, params_only: bool) -> OrbaxLayout:
    """Resolve the layout options, with the source's layout for options not given."""
    source_manifest = source.tree_manifest
    mesh_text = source_manifest.mesh if options["mesh"] is None else options["mesh"]
    mesh = None if mesh_text is None else parse_mesh(mesh_text)
    if mesh is not None and -1 in mesh.sizes:
        raise usage_error(
            text("{} has an axis of size -1", Option("mesh", mesh_text)),
            "conversions use no devices",
            "give it a number",
        )
    rules = as_tuple(options["rules"]) or tuple(source_manifest.rules)
    if source.family.is_verbatim:
        rules = with_default_preset(rules)
    scan = source_manifest.scan if options["scan"] is None else options["scan"]
    if not scan:
        reject_without(
            Option("scan_axis"),
            options["scan_axis"],
            Option("scan", True),
            "unstacked layers have no layer axis",
        )
    scan_axis = options["scan_axis"]
    return OrbaxLayout(
        partitioning=Partitioning(mesh, merge_rules(rules)),
        rule_texts=rules,
        scan=scan,
        scan_axis=source_manifest.scan_axis if scan_axis is None else scan_axis,
        storage=ORBAX_STORAGES[options["storage"]],
        compression=parse_compression(options["compress"]),
        is_training_step=options["training_state"]
        or (source_manifest.is_training_step and not params_only),
    )


def _check_verbatim_options(options: SaveInitOptions, source: Source) -> None:
    """Raise UsageError for options without support for models of unknown families.

    The tensors of such a model keep their names and shapes.
    """
    if options["dtype"] and options["quantized"] == "keep" and is_quantized(source.root):
        raise usage_error(
            text("{} would cast scales", Option("dtype", options["dtype"])),
            f"the weights of {source.display_name} are quantised, and kept",
            text("{} decodes them", Option("quantized", "dequantize")),
        )
    for name, default in (("pad_vocab", "no"), ("true_vocab", None), ("untie", False)):
        if options[name] != default:
            raise usage_error(
                text("{} is not supported for {}", Option(name), source.display_name),
                CANNOT_TRAIN,
                text("remove {}", Option(name)),
            )


def _layout_fields(draft: Draft, placed: Placed) -> dict[str, object]:
    """Return the fields of a layout for JSON."""
    meshes = {"from": draft.source.tree_manifest.mesh, "to": placed.settings.mesh}
    return {"leaves": len(placed.leaves), "layout": NATIVE_TREE, "mesh": meshes}


def _layout_lines(draft: Draft, layout: OrbaxLayout, placed: Placed) -> Iterator[str]:
    """Yield lines for the user: padding, mesh, unsharded dims, and the training state."""
    source = draft.source
    yield from source.made_files.remarks
    stored_size = draft.resize.vocabulary.stored_size
    vocab_rows = draft.vocabulary.stored_size
    if vocab_rows != stored_size:
        added = vocab_rows - stored_size
        yield f"vocabulary {stored_size} -> {vocab_rows} (+{count_text(added, 'row')})"
    mesh = layout.partitioning.mesh
    if mesh is not None:
        axes = " x ".join(f"{name} {size}" for name, size in zip(mesh.names, mesh.sizes))
        source_mesh = source.tree_manifest.mesh
        # If the number of devices is no multiple of DEVICES_PER_HOST, e.g. 6, they count as one host.
        devices_per_host = (
            DEVICES_PER_HOST if mesh.n_devices % DEVICES_PER_HOST == 0 else mesh.n_devices
        )
        num_hosts = mesh.n_devices // devices_per_host
        amplification = item_read_amplification(placed, mesh, devices_per_host)
        hosts = f"{num_hosts} host{'s' if num_hosts > 1 else ''} of {devices_per_host}"
        size = format_bytes(device_nbytes(placed))
        change = f"{source_mesh} -> {axes}" if source_mesh else axes
        yield (
            f"mesh {change} = {mesh.n_devices} devices; {size} per device;"
            f" {hosts} read {amplification:.2f} x their bytes"
        )
    yield from find_fallbacks(placed)
    dropped = [part.nbytes for part in draft.left if part.rule == OPT_STATE_RULE]
    if sum(dropped):
        yield f"optimizer state ({format_bytes(sum(dropped))}) dropped"
    if source.training_record is not None and layout.is_training_step:
        from prepcli.commands.operations.training_state import imported_state_notes

        yield from imported_state_notes(source.training_record)
