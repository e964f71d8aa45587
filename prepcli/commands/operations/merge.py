"""`prep merge`: add an adapter to the weights of its base model, and write a Hugging Face folder."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from prepcli.commands.operations.conversion import (
    OUT_PLACEHOLDER,
    PlannedConversion,
    checkpoint_access,
    common_options,
    recorded_values,
    run_conversion,
)
from prepcli.commands.operations.export import plan_copy
from prepcli.commands.operations.export_towers import select_parts
from prepcli.commands.operations.merge_experts import expert_updates
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.options import ExportOptions, MergeOptions
from prepcli.commands.operations.results import Conversion
from prepcli.core.counts import count_text
from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.observer import Observer, observer_of
from prepcli.core.option_spec import PathLike, format_command_line, with_defaults
from prepcli.core.progress import Progress
from prepcli.execution.workers import ProcessOptions
from prepcli.formats.manifest import NO_MANIFEST, SAMPLE_DIGEST_KEY, read_manifest
from prepcli.models.lora import PEFT_PREFIX, WEIGHT, projections
from prepcli.models.peft_names import split_wrappers
from prepcli.planning.manifest_fields import Manifest, MergedAdapter
from prepcli.planning.plan import ExpertUpdate, LowRankUpdate, Plan, Stream
from prepcli.planning.tensors import FLOAT_DTYPES
from prepcli.restore.digest_checks import sample_digest
from prepcli.sources.appended_files import append_files, shift_file_numbers
from prepcli.sources.folders import Access
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.openers.peft_folder import is_adapter, open_adapter, read_checked_header
from prepcli.sources.openers.peft_settings import (
    MATRIX_NAME,
    PeftSettings,
    check_settings,
    check_tying,
    read_settings,
)
from prepcli.sources.source import Source, SourceTensor
from prepcli.stores.paths import AnyPath
from prepcli.targets.tokenizer_files import with_adapter_tokenizer

# Module of older encoders of images between a tower and its layers.
VISION_WRAPPER = "vision_model"


@public
def merge(
    adapter: PathLike,
    base: PathLike,
    out: PathLike | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | Observer | None = None,
    process_options: ProcessOptions | None = None,
    **options: Unpack[MergeOptions],
) -> Conversion:
    """Add a LoRA adapter to the weights of its base model, and write a Hugging Face folder.

    Args:
        adapter: Folder of an adapter in the format of PEFT.
        base: Folder, alias, hub id, or `gs://`/`s3://` URL of the base model.
        out: Output folder. Default: a name made from the base's.
        dry_run: Return the plan from headers only. No weight is read and no file is written.
        progress: Receives the bytes written. Default: none. See `Progress`.
        process_options: Share of this process in the work. Default: all of it.
        **options: See `MergeOptions`.

    Returns:
        The output's path and counts. If an equal output exists, no file is written: `already_done` is True.

    Raises:
        UsageError: An argument is invalid.
        OutputExistsError: `out` exists and is not the result of this request.
        DamagedError: Files of the base are damaged.
        PrepError: The adapter does not fit the base, or the merge failed. An interrupted one resumes when called again.
    """
    adapter = Path(adapter)
    if is_adapter(Path(base)) and not is_adapter(adapter):
        why = f"{base} is an adapter and {adapter} is not one: the first argument is the adapter"
        hint = text("{}", Command("merge", str(base), str(adapter)))
        raise usage_error("adapter and base are exchanged", why, hint)
    common = common_options(base, out, options, dry_run=dry_run, process_options=process_options)
    # A merge computes nothing with the model: the names in the files are enough.
    common = replace(common, verbatim=None)
    observer = observer_of(progress)
    access = checkpoint_access(common, observer)
    return run_conversion(
        common,
        observer,
        # A plan reads only headers.
        lambda source, located: plan_merge(
            adapter,
            source,
            located,
            options,
            access=access,
            check_base=options["verify"] and not dry_run,
        ),
    )


def _unknown_orientation_error(adapter_path: Path, source: Source) -> PrepError:
    """Return the error for an adapter of transposed weights and a base without a family."""
    what = f"{source.display_name} is not supported as a base of {adapter_path}"
    why = "fan_in_fan_out is true, and which weights of this architecture are transposed is unknown"
    return PrepError(what, why, "PEFT's `merge_and_unload()` merges the adapter")


def plan_merge(
    adapter_path: Path,
    source: Source,
    located: LocatedCheckpoint,
    options: MergeOptions,
    *,
    access: Access,
    check_base: bool,
) -> PlannedConversion:
    """Plan the copy of the base's tensors, with the adapter's products added to some of them.

    The plan also has a stream for each matrix of the adapter. It is digested and not written, so that a change of the
    adapter during the merge is noticed, like a change of the base.

    Args:
        adapter_path: Folder of the adapter.
        source: Opened base.
        located: Located base. Its model name determines the output's default name.
        options: Options of the merge.
        access: How a remote model with the towers of the base may be read.
        check_base: Compare the base with the one that the adapter was trained with.

    Returns:
        Plan with the notes and fields of its report.

    Raises:
        PrepError: The adapter is not supported, or does not fit the base.
    """
    _check_complete(source)
    # An export removes the padding of the vocabulary. A merge changes only the tensors of the adapter.
    copy_options = with_defaults(ExportOptions, {"keep_padding": True})
    source = _with_towers(copy_options, source, access, check_digest=check_base)
    settings, adapter, scales = _open_adapter(adapter_path, source)
    if source.family.is_verbatim and settings.fan_in_fan_out:
        raise _unknown_orientation_error(adapter_path, source)
    if check_base:
        _check_base(adapter_path, source)
    combined = _with_adapter(source, adapter)
    adapter_tensors = combined.tensors[len(source.tensors) :]
    whole, unused = _whole_tensors(adapter_tensors, settings, source, adapter_path)
    matrices = _matrix_streams(
        tuple(t for t in adapter_tensors if t.name not in {*whole, *unused}), adapter_path
    )
    copy = plan_copy(copy_options, source, located)
    updates = dict(
        _low_rank_updates(
            copy.plan, matrices, settings=settings, scales=scales, source=source, adapter=adapter
        )
    )
    streams = tuple(
        _with_whole(_with_update(stream, updates.get(stream.name)), whole.get(stream.name))
        for stream in copy.plan.streams
    )
    if whole:
        combined = _with_whole_parts(combined, whole, source)
    merged = _merged_entry(adapter_path, settings, adapter, len(updates) + len(whole))
    plan = replace(
        copy.plan,
        command="merge",
        request=format_command_line(
            f"merge {adapter_path}", source.display_name, MergeOptions, recorded_values(options)
        ),
        source_files=(*copy.plan.source_files, *adapter.file_stamps),
        streams=(*(matrix for pair in matrices.values() for matrix in pair.values()), *streams),
        small_files=with_adapter_tokenizer(copy.plan.small_files, adapter_path),
        settings=copy.plan.settings | Manifest(merged=merged),
    )
    base = settings.base_model_name_or_path
    origin = f" (trained with {base:.60})" if base else ""
    change = _change_text({update.scale for update in updates.values()}, len(updates), len(whole))
    return PlannedConversion(
        plan,
        f"{located.model_name}-merged",
        notes=(f"{adapter_path}{origin} -> {source.display_name}: {change}",),
        fields={**copy.fields, "merged": merged},
        next_command=f"prep verify {OUT_PLACEHOLDER}",
        source_view=combined,
    )


def _check_complete(base: Source) -> None:
    """Raise UsageError if a base has only adapters."""
    if base.tree_manifest.is_adapter:
        raise usage_error(
            f"{base.display_name} is the run of an adapter",
            "it has only adapters; a base is a complete model",
            text("{}", Command("merge", "ADAPTER", "BASE")),
        )


def _merged_entry(
    adapter_path: Path, settings: PeftSettings, adapter: Source, num_tensors: int
) -> MergedAdapter:
    """Return what the output records of the adapter."""
    merged: MergedAdapter = {
        "adapter": str(adapter_path),
        "scaling": settings.lora_config().scaling,
        "tensors": num_tensors,
    }
    # An adapter that PEFT wrote has no manifest.
    if adapter.manifest is not None and adapter.manifest.digest is not None:
        merged["manifest"] = adapter.manifest.digest
    return merged


def _change_text(scales: set[float], num_updated: int, num_replaced: int) -> str:
    """Return how many tensors of the base change, and how."""
    factors = " or ".join(f"{scale:g}" for scale in sorted(scales))
    change = f"{num_updated} tensors change, scaled by {factors}"
    if num_replaced:
        change += f", and {count_text(num_replaced, 'tensor')} of the adapter replaces the base's"
    return change


def _with_towers(
    options: ExportOptions, source: Source, access: Access, *, check_digest: bool
) -> Source:
    """Return the base. A training step of a multimodal model has the towers of its start model.

    Raises:
        PrepError: The towers cannot be read, or differ from the ones of the run's start.
    """
    try:
        return select_parts(options, source, access, check_digest=check_digest)
    except PrepError as error:
        export_step = Command("export", source.display_name, Option("towers", "CHECKPOINT"))
        hint = text("{} writes a base with towers", export_step)
        raise PrepError(error.what, error.why, hint) from error


def _open_adapter(path: Path, source: Source) -> tuple[PeftSettings, Source, dict[str, float]]:
    """Read the settings and the header of an adapter.

    Returns:
        The settings, and the adapter. Its tensors have the names of the base's modules, as far as the base has them.
        Then the factor of each module's product: the patterns of the settings are for the names in the adapter.
    """
    if not is_adapter(path):
        export_run = Command("export", "RUN", Option("out", "ADAPTER"))
        hint = text("{} writes the adapter of a run", export_run)
        raise usage_error(
            f"{path} is not an adapter", "it is not a folder with an adapter_config.json", hint
        )
    settings = read_settings(path)
    header, _ = read_checked_header(path)
    check_settings(path, settings, header.tensors)
    # PEFT writes `base_model.model.` before the name of each module of the class that it trained.
    family = replace(source.family, prefix=PEFT_PREFIX, head_prefix="", unprefixed=())
    adapter = open_adapter(path, family, source.config)
    modules = _weight_modules(source)
    # Renamed tensor -> name in the adapter, without the prefix.
    names: dict[str, str] = {}
    tensors: list[SourceTensor] = []
    scales: dict[str, float] = {}
    for tensor in adapter.tensors:
        renamed = _name_in_base(tensor.name, source, modules)
        if renamed in names:
            why = (
                f"{names[renamed]} and {tensor.name} belong to one tensor of {source.display_name}"
            )
            hint = "get or create the adapter again"
            raise PrepError(f"{path} has two adapters of one tensor", why, hint)
        names[renamed] = tensor.name
        tensors.append(replace(tensor, name=renamed))
        match = MATRIX_NAME.fullmatch(tensor.name)
        renamed_match = MATRIX_NAME.fullmatch(renamed)
        if match is not None and renamed_match is not None:
            scales[renamed_match["module"]] = settings.scaling_of(match["module"])
    return settings, replace(adapter, tensors=tuple(tensors)), scales


def _weight_modules(source: Source) -> dict[str, str]:
    """Return the modules of a base with a weight.

    Returns:
        Name of a module in the files, or its key if no other module has it -> name of the module in the base's tensors.
    """
    modules: dict[str, str] = {}
    by_key: dict[str, list[str]] = {}
    for tensor in (*source.tensors, *source.tower_tensors):
        file_name = source.file_name(tensor)
        if file_name.endswith(WEIGHT):
            module = tensor.name.removesuffix(WEIGHT)
            modules[file_name.removesuffix(WEIGHT)] = module
            by_key.setdefault(_module_key(file_name.removesuffix(WEIGHT), source), []).append(
                module
            )
    unique = {key: names[0] for key, names in by_key.items() if len(names) == 1}
    return unique | modules


def _module_key(name: str, source: Source) -> str:
    """Return the part of a module's name that is equal in all classes of transformers with this module.

    E.g. `model.vision_tower.encoder.layers.0.mlp.fc1` is `vision_tower.vision_model.encoder.layers.0.mlp.fc1` in older
    versions, with the key `vision_tower.encoder.layers.0.mlp.fc1`.
    """
    _, rest = split_wrappers(name, source.family)
    first, *others = rest.split(".")
    return ".".join([first, *(part for part in others if part != VISION_WRAPPER)])


def _name_in_base(name: str, source: Source, modules: Mapping[str, str]) -> str:
    """Return the name of an adapter's tensor with the base's name of its module. Other names stay.

    Args:
        name: Name of the tensor, without the prefix of PEFT.
        source: The base.
        modules: See `_weight_modules`.
    """
    match = MATRIX_NAME.fullmatch(name)
    # Another tensor may be the weight of a module that was trained as a whole.
    module = name.rpartition(".")[0]
    if match is not None:
        module = match["module"]
    target = modules.get(module) or modules.get(_module_key(module, source))
    if target is None:
        return name
    return f"{target}{name.removeprefix(module)}"


def _check_base(adapter: Path, source: Source) -> None:
    """Raise PrepError if the manifest of an adapter has the digest of another base.

    An adapter that PEFT wrote has no manifest, and is not checked.
    """
    base = (read_manifest(adapter) or NO_MANIFEST).base
    recorded = base.get(SAMPLE_DIGEST_KEY)
    if recorded is None or recorded == (digest := sample_digest(source)):
        return
    base_name = f"{base.get('name')!s:.60}"
    why = f"the first rows of its tensors have the digest {digest}, the rows of {base_name} had {recorded}"
    hint = text(
        "name the model that the adapter was trained with, or pass {} to merge with another one",
        Option("verify", False),
    )
    raise PrepError(
        f"{adapter} was trained with another base than {source.display_name}", why, hint
    )


def _with_adapter(source: Source, adapter: Source) -> Source:
    """Return the base with the tensors and the file of an adapter after its own."""
    first = len(source.byte_sources)
    matrices = [shift_file_numbers(tensor, first) for tensor in adapter.tensors]
    return replace(append_files(source, adapter), tensors=(*source.tensors, *matrices))


def _whole_tensors(
    tensors: tuple[SourceTensor, ...], settings: PeftSettings, source: Source, adapter: Path
) -> tuple[dict[str, SourceTensor], list[str]]:
    """Return the tensors of modules that the adapter has whole copies of, by name, and the unused ones.

    A tied head is unused: PEFT ties it to the embedding of the adapter again.

    Raises:
        PrepError: The base has no such tensor, or one of another shape, or the module is tied in the base alone.
    """
    is_tied = source.family.is_tied(source.config) or (
        source.family.is_verbatim and bool(source.config.get("tie_word_embeddings"))
    )
    base_tensors = {tensor.name: tensor for tensor in source.tensors}
    true_size = source.vocabulary().true_size
    whole: dict[str, SourceTensor] = {}
    unused: list[str] = []
    for tensor in tensors:
        if MATRIX_NAME.fullmatch(tensor.name) is not None:
            continue
        module = tensor.name.rpartition(".")[0]
        is_tied_head = is_tied and tensor.name == source.family.tying.head_tensor
        if not settings.saves_module(module) and not is_tied_head:
            continue
        if is_tied and (is_tied_head or tensor.name == source.family.tying.embedding_tensor):
            check_tying(adapter, settings)
        if is_tied_head and tensor.name not in base_tensors:
            unused.append(tensor.name)
            continue
        base = base_tensors.get(tensor.name)
        expected = base.shape if base is not None else ()
        # The adapter has the rows of the vocabulary without the padding of the base.
        shapes = {expected, (true_size, *expected[1:])}
        if base is None or tensor.shape not in shapes or tensor.dtype not in FLOAT_DTYPES:
            found = "no such tensor" if base is None else f"{base.dtype} {list(base.shape)}"
            why = f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}, the base has {found}"
            hint = "name the model that the adapter was trained with"
            raise PrepError(f"{adapter} does not fit the base", why, hint)
        whole[tensor.name] = tensor
    return whole, unused


def _with_whole(stream: Stream, tensor: SourceTensor | None) -> Stream:
    """Return the stream of a tensor that reads its rows from the adapter. Rows of padding stay those of the base."""
    if tensor is None or not (stream.writes and stream.reads) or stream.rows[0] >= tensor.shape[0]:
        return stream
    cast_to = "" if tensor.dtype == stream.written_dtype else stream.written_dtype
    return replace(stream, dtype=tensor.dtype, reads=tensor.placement, cast_to=cast_to)


def _with_whole_parts(
    combined: Source, whole: Mapping[str, SourceTensor], source: Source
) -> Source:
    """Return the base and the adapter, with each replaced tensor of the base made from the parts that are merged.

    The digests of the parts are compared before the merge. Those of a base and an adapter may cover other rows than the
    merge reads from each, and PEFT records none.
    """
    base_names = {tensor.name for tensor in source.tensors}
    tensors: list[SourceTensor] = []
    for number, tensor in enumerate(combined.tensors):
        if tensor.name not in whole or tensor.name not in base_names:
            tensors.append(tensor)
        elif number < len(source.tensors):
            replacement = whole[tensor.name]
            parts = replacement.stored
            if replacement.shape[0] < tensor.shape[0]:
                # Rows of padding stay those of the base.
                parts += tensor.stored
            tensors.append(replace(tensor, digests=(), made_from=parts))
    return replace(combined, tensors=tuple(tensors))


def _matrix_streams(
    tensors: tuple[SourceTensor, ...], adapter: Path
) -> dict[str, dict[str, Stream]]:
    """Return the streams of an adapter's matrices, by module and then by `A` and `B`."""
    streams: dict[str, dict[str, Stream]] = {}
    for tensor in tensors:
        match = MATRIX_NAME.fullmatch(tensor.name)
        if match is None or len(tensor.shape) != 2 or tensor.dtype not in FLOAT_DTYPES:
            supported = "only lora_A and lora_B of projections and modules_to_save are supported"
            why = f"it is {tensor.dtype} {list(tensor.shape)}; {supported}"
            hint = "use a LoRA adapter"
            raise PrepError(f"{adapter}: {tensor.name} cannot be merged", why, hint)
        stream = Stream(
            tensor.name, tensor.dtype, tensor.shape, (0, tensor.shape[0]), tensor.placement, ()
        )
        streams.setdefault(match["module"], {})[match["matrix"]] = stream
    for module, pair in streams.items():
        if len(pair) != 2:
            why = f"{module} has only lora_{'/'.join(pair)}"
            raise PrepError(f"{adapter} is incomplete", why, "get or create the adapter again")
    return streams


def _low_rank_updates(
    plan: Plan,
    matrices: Mapping[str, Mapping[str, Stream]],
    *,
    settings: PeftSettings,
    scales: Mapping[str, float],
    source: Source,
    adapter: Source,
) -> Iterator[tuple[str, LowRankUpdate]]:
    """Yield the name of each tensor that changes with its update.

    Raise PrepError if the base lacks a tensor.
    """
    written = {stream.name: stream for stream in plan.streams if stream.writes and stream.reads}
    transposed = [
        # `h.{layer}.attn.c_attn` becomes `h\.\d+\.attn\.c_attn`: `re.escape` also escapes the braces of the atom.
        re.compile(re.sub(r"\\{\w+\\}", r"\\d+", re.escape(projection.module)))
        for projection in projections(source.family, source.config)
        if projection.is_transposed
    ]
    digests = {tensor.name: tensor.digests[0][2] for tensor in adapter.tensors if tensor.digests}
    merged: set[str] = set()
    if settings.target_parameters:
        for module, name, update in expert_updates(settings, source, adapter, matrices, digests):
            merged.add(module)
            if name not in written:
                continue
            _check_shapes(written[name], update, adapter.root)
            yield name, update
    for module, pair in matrices.items():
        if module in merged:
            continue
        update = LowRankUpdate(
            pair["A"],
            pair["B"],
            scales[module],
            is_transposed=any(name.fullmatch(module) for name in transposed),
            digests=(digests.get(pair["A"].name, ""), digests.get(pair["B"].name, "")),
        )
        target = written.get(f"{module}.weight")
        if target is None:
            hint = text("{} lists its tensors", Command("inspect", source.display_name))
            why = f"the base has no tensor {module}.weight"
            raise PrepError(f"{adapter.display_name} does not fit the base", why, hint)
        _check_shapes(target, update, adapter.root)
        yield target.name, update


def _check_shapes(target: Stream, update: LowRankUpdate, adapter: AnyPath) -> None:
    """Raise PrepError unless the product of the matrices has the shape of the tensor, which must be of floats."""
    # W + scale * B A with A [r, in] and B [out, r], e.g. [8, 2048] and [6144, 8] for W [6144, 2048]. A transposed
    # weight is [in, out] and adds (B A)^T.
    (rank_a, num_inputs), (num_outputs, rank_b) = update.a.shape, update.b.shape
    if isinstance(update, ExpertUpdate):
        num_outputs = update.outputs[1] - update.outputs[0]
    shape = (num_inputs, num_outputs) if update.is_transposed else (num_outputs, num_inputs)
    if isinstance(update, ExpertUpdate) and update.expert is None:
        shape = (update.num_experts, *shape)
    if rank_a != rank_b or target.shape != shape or target.dtype not in FLOAT_DTYPES:
        product = f"B {list(update.b.shape)} times A {list(update.a.shape)}"
        why = f"{target.name} is {target.dtype} {list(target.shape)}, the adapter has {product}"
        raise PrepError(
            f"{adapter} does not fit the base",
            why,
            "name the model that the adapter was trained with",
        )


def _with_update(stream: Stream, update: LowRankUpdate | None) -> Stream:
    return replace(stream, update=update) if update and stream.writes and stream.reads else stream
