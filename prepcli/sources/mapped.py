"""The tensors of a source in another form: of a user's map, or of another version of transformers.

A map renames, transposes, stacks and takes apart. transformers 4 stores a matrix per expert, and transformers 5 one
tensor with the matrices of all experts:

    layers.3.mlp.experts.7.up_proj.weight    [mlp, embed]
    layers.3.mlp.experts.gate_up_proj        [experts, 2 mlp, embed]

Both are rows of one parameter (`Parameter.row` and `Parameter.alternate`). The elements of one form are views of the
tensors of the other one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from prepcli.algebra.axis_map import AxisMap, bind_row
from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.core.json_values import HFConfig
from prepcli.engine.digest import record_digest
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.models.parameters import Family, StoredShapes, dropped_patterns, parameter_rows
from prepcli.models.registry import FAMILIES, family_of
from prepcli.models.truncation import prediction_names
from prepcli.models.verbatim import verbatim_family
from prepcli.planning.arrays import Location
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import DroppedTensor
from prepcli.planning.tensors import (
    FLOAT_DTYPES,
    PARAMS,
    is_quantization_tensor,
    qualify,
    split_name,
)
from prepcli.quantized.formats import quantization_settings
from prepcli.sources.maps import (
    MAX_NBYTES,
    MapCoverage,
    MapRow,
    TensorMap,
    bind_map,
    compose_location,
    compute_size,
    map_error,
    parse_map,
)
from prepcli.sources.model_family import split_towers, with_bare_names
from prepcli.sources.source import (
    Source,
    SourceTensor,
    file_position,
    match_source_tensors,
    recorded_digests,
    stored_rows,
)
from prepcli.sources.tensor_match import (
    DEFAULT_MATCH_OPTIONS,
    VOCAB_ATOM,
    TensorInfo,
    TensorNames,
    detect_names,
    family_tensors,
)
from prepcli.stores.files import read_small_file
from prepcli.stores.paths import AnyPath

# Rule of the tensors that a map drops, as plans and JSON objects name it.
DROP_RULE = "drop line of --map"
# Rule of the scales of weights that a map transposes, stacks or takes apart.
SCALES_RULE = "--map changes the weights of the scales"
# Key of the text of the map in the record of an export.
CONTENT_KEY = "content"
AtomSizes = dict[str, int | tuple[int, ...]]
# Name and shape of a tensor to make, a stored tensor, and the place of the part of it.
TensorPart = tuple[str, tuple[int, ...], SourceTensor, Location]


def read_map(path: AnyPath) -> TensorMap:
    """Read the file of a map."""
    data = read_small_file(path, MAX_NBYTES)
    try:
        content = data.decode()
    except UnicodeDecodeError as error:
        why = f"byte {error.start:,} is not UTF-8"
        raise map_error(path.name, [why]) from error
    return parse_map(path.name, content)


def recorded_map(manifest: Manifest | None) -> TensorMap | None:
    """Return the recorded map of an export, or None. It leads from the tensors of its files to those of the model."""
    record = (manifest or NO_MANIFEST).map
    content = record.get(CONTENT_KEY)
    if not isinstance(content, str):
        return None
    # An export has no tensor without a row.
    return replace(parse_map(str(record.get("name")), content), drops=())


def map_record(source: Source) -> Manifest:
    """Return the manifest's record of the map of a source, or of the map that made the source. Empty without one."""
    if source.tensor_map is not None:
        record = {
            "name": source.tensor_map.name,
            "xxh3": record_digest(source.tensor_map.content.encode()),
        }
        return Manifest(map=record)
    stored = source.tree_manifest.map
    return Manifest(map=stored) if stored else Manifest()


def is_read_through_map(output: Source, source: Source) -> bool:
    """Return whether an output was made from a source through a user's map. Its manifest does not have the rows."""
    record = (output.manifest or NO_MANIFEST).map
    return bool(record) and CONTENT_KEY not in record and not map_record(source)


def apply_map(source: Source, tensor_map: TensorMap) -> Source:
    """Return a source with the targets of a map as its tensors."""
    family, config = _map_family(tensor_map, source)
    rows, problems = bind_model_map(tensor_map, family, config)
    tensors = {source.names.stored_name(tensor.name): tensor for tensor in source.tensors}
    infos = {name: TensorInfo(t.dtype, t.shape, t.nbytes) for name, t in tensors.items()}
    if problems:
        # Without these rows, the tensors that they name would be listed as unused.
        raise misfit_error(tensor_map, source, problems)
    coverage = MapCoverage(rows, infos)
    coverage.check_elements()
    dropped = coverage.check_unused(tensor_map.drops)
    problems += coverage.problems
    if family:
        problems += _family_problems(family, config, coverage.targets)
    if not problems:
        problems += _dtype_problems(rows, tensors)
    if problems:
        raise misfit_error(tensor_map, source, problems)
    names = detect_names(family, config, full_names=coverage.targets.keys()) if family else None
    mapped = map_tensors(rows, tensors, names)
    if family is not None:
        _check_not_quantized(source, tensor_map, mapped)
    if family is None or names is None:
        types = {tensor.name: (tensor.dtype, tensor.shape) for tensor in mapped}
        family = verbatim_family(types)
        names = TensorNames(family, is_prefixed=False)
    dropped_tensors: list[DroppedTensor] = []
    for name in sorted(dropped):
        dropped_tensors.append(DroppedTensor(name, tensors[name].nbytes, DROP_RULE))
    result = replace(
        source,
        family=family,
        names=names,
        config=config,
        tensor_map=tensor_map,
        tensors=mapped,
        tensor_file_names=_file_names(source, mapped),
        extra_entries=(*source.extra_entries, *dropped_tensors),
    )
    # Without scales, if a decoded weight is no longer a tensor of its own: its codes cannot be
    # written again.
    placements = {result.names.full_name(each.name): each.placement for each in result.tensors}
    if all(placements.get(name) == tensors[name].placement for name in result.quantized):
        return result
    kept: list[SourceTensor] = []
    scales: list[DroppedTensor] = []
    for tensor in result.state_tensors:
        if is_quantization_tensor(tensor.name):
            scales.append(DroppedTensor(tensor.name, tensor.nbytes, SCALES_RULE))
        else:
            kept.append(tensor)
    return replace(
        result,
        state_tensors=tuple(kept),
        quantized={},
        extra_entries=(*result.extra_entries, *scales),
    )


def _check_not_quantized(
    source: Source, tensor_map: TensorMap, mapped: Sequence[SourceTensor]
) -> None:
    """Raise PrepError if the tensors of a family would have quantised values without their scales."""
    if not quantization_settings(source.config):
        return
    for tensor in mapped:
        if tensor.dtype not in FLOAT_DTYPES:
            what = f"the map {tensor_map.name} does not fit {source.display_name}"
            why = f"{tensor.name} would have quantised values ({tensor.dtype}) without their scales"
            command = Command("save-init", "MODEL", Option("quantized", "dequantize"))
            raise PrepError(what, why, text("{} decodes them", command))


def _map_family(tensor_map: TensorMap, source: Source) -> tuple[Family | None, HFConfig]:
    """Return the family of the targets, if the map names one, and the config of the mapped model."""
    if not source.family.is_verbatim:
        what = text("{} has no effect for {}", Option("map"), source.display_name)
        why = f"its tensors already have the names of family {source.family.name}"
        raise usage_error(what, why, text("remove {}", Option("map")))
    if not tensor_map.family:
        return None, source.config
    if tensor_map.family not in FAMILIES:
        hint = did_you_mean(tensor_map.family, FAMILIES) or text(
            "{} lists the families", Command("models")
        )
        what = f"the map {tensor_map.name} is not valid"
        raise PrepError(what, f"the family `{tensor_map.family:.60}` is unknown", hint)
    if not source.config:
        what = f"the map {tensor_map.name} needs the config of {source.display_name}"
        why = f"the sizes of family {tensor_map.family} come from its config.json"
        raise PrepError(what, why, text("{}", Option("config", "CONFIG.json")))
    config = {**source.config, "model_type": tensor_map.family}
    return family_of(config), config


def bind_model_map(
    tensor_map: TensorMap, family: Family | None, config: HFConfig, vocab_rows: int | None = None
) -> tuple[list[MapRow], list[str]]:
    """Give the rows of a map the sizes of a model.

    `vocab_rows` are the rows of the vocabulary, if they differ from those in the config.

    Returns:
        The rows, and the problems of its `size` lines and of the other rows.
    """
    sizes: AtomSizes = {}
    if family is not None:
        sizes |= family.sizes(config)
    problems: list[str] = []
    for atom, line in tensor_map.sizes.items():
        try:
            size = compute_size(line.value, config)
        except ValueError as error:
            problems.append(f"line {line.line}: {error}")
            continue
        if sizes.get(atom, size) != size:
            why = f"the atom `{atom}` has two sizes: {size}, and {sizes[atom]} in config.json"
            problems.append(f"line {line.line}: {why}")
        sizes[atom] = size
    if family is not None and vocab_rows is not None:
        sizes[VOCAB_ATOM] = vocab_rows
    numbers = family.layer_numbers(config) if family else {}
    rows, row_problems = bind_map(tensor_map, sizes, numbers)
    return rows, problems + row_problems


def misfit_error(tensor_map: TensorMap, source: Source, problems: list[str]) -> PrepError:
    """Return the error of a valid map that does not fit this checkpoint."""
    error = map_error(tensor_map.name, problems)
    what = f"the map {tensor_map.name} does not fit {source.display_name}"
    return PrepError(what, error.why, error.hint)


def _dtype_problems(rows: Sequence[MapRow], tensors: Mapping[str, SourceTensor]) -> list[str]:
    """Return the problems of targets made of tensors with several dtypes."""
    dtypes: dict[str, str] = {}
    problems: list[str] = []
    for row in rows:
        for target, name, _ in row.pairs():
            dtype = tensors[name].dtype
            if dtypes.setdefault(target, dtype) != dtype:
                why = f"{target} would be {dtypes[target]} and {dtype}"
                problems.append(f"line {row.line}: {why}")
                break
    return problems


def _family_problems(
    family: Family, config: HFConfig, targets: Mapping[str, Sequence[MapRow]]
) -> list[str]:
    """Return the problems of targets outside of the family, and of its tensors outside of the map."""
    names = detect_names(family, config, full_names=targets.keys())
    by_name = {names.bare_name(name): rows for name, rows in targets.items()}
    targets_of = {name: rows[0].target.source_shape for name, rows in by_name.items()}
    expected: dict[str, tuple[int, ...]] = {}
    for name, axis_map in family_tensors(family, config, targets_of):
        expected[name] = axis_map.source_shape
    ignored = re.compile("|".join(map("({})".format, dropped_patterns(family))) or r"(?!)")
    others = {*family.duplicates, family.tying.head_tensor}
    others |= prediction_names(family, config, by_name)
    problems: list[str] = []
    for name, rows in by_name.items():
        shape = rows[0].target.source_shape
        is_ignored = name in others or ignored.fullmatch(name)
        if name not in expected and not is_ignored:
            why = f"{names.full_name(name)} is no tensor of family {family.name}"
            problems.append(f"line {rows[0].line}: {why}")
        elif expected.get(name, shape) != shape:
            why = f"{names.full_name(name)} has the shape {[*shape]}"
            why += f", family {family.name} has {[*expected[name]]}"
            problems.append(f"line {rows[0].line}: {why}")
    for name in expected.keys() - by_name.keys():
        problems.append(f"no row fills {names.full_name(name)} {[*expected[name]]}")
    return problems


def map_tensors(
    rows: Sequence[MapRow], tensors: Mapping[str, SourceTensor], names: TensorNames | None
) -> tuple[SourceTensor, ...]:
    """Return the targets, in the order of their bytes in the files."""
    copies: list[SourceTensor] = []
    parts: list[TensorPart] = []
    for row in rows:
        for target, source_name, indices in row.pairs():
            stored = tensors[source_name]
            name = names.bare_name(target) if names else target
            if row.is_copy:
                copies.append(replace(stored, name=name))
            else:
                location = None
                if len(stored.placement) == 1:
                    location = compose_location(row, indices, stored.placement[0])
                if location is None:
                    what = f"{stored.name} cannot be transposed or taken apart"
                    why = f"it is stored in parts, and line {row.line} of the map changes its order"
                    hint = text("{} first, and map its output", Option("verbatim", True))
                    raise PrepError(what, why, hint)
                parts.append((name, row.target.source_shape, stored, location))
    return tuple(sorted((*copies, *_join_parts(parts)), key=file_position))


def _join_parts(parts: Iterable[TensorPart]) -> Iterator[SourceTensor]:
    """Yield tensors made of parts of stored ones. The digests of the stored tensors are checked instead."""
    by_name: dict[str, list[TensorPart]] = {}
    for part in parts:
        by_name.setdefault(part[0], []).append(part)
    for name, group in by_name.items():
        made_from: dict[str, SourceTensor] = {}
        for _, _, stored, _ in group:
            made_from.update((tensor.name, tensor) for tensor in stored.stored)
        _, shape, first, _ = group[0]
        yield SourceTensor(
            name,
            first.dtype,
            shape,
            tuple(location for _, _, _, location in group),
            default_dtype=first.default_dtype,
            made_from=tuple(made_from.values()),
        )


def apply_recorded_map(source: Source, tensor_map: TensorMap) -> Source:
    """Return an export with the tensors of the model, and their recorded digests."""
    mapped = apply_map(source, tensor_map)
    records = (source.manifest or NO_MANIFEST).tensors
    tensors: list[SourceTensor] = []
    for tensor in mapped.tensors:
        digests = recorded_digests(records, mapped.names.full_name(tensor.name))
        made_from = () if digests else tensor.made_from
        tensors.append(replace(tensor, digests=digests, made_from=made_from))
    return replace(mapped, tensors=tuple(tensors))


def _file_names(source: Source, mapped: Sequence[SourceTensor]) -> tuple[str, ...]:
    """Return the file name of each target for a Hugging Face folder: that of its first tensor."""
    if not source.tensor_file_names:
        return ()
    name_of_file: dict[int, str] = {}
    for tensor, file_name in zip(source.tensors, source.tensor_file_names):
        name_of_file[file_position(tensor)[0]] = file_name
    return tuple(name_of_file[file_position(tensor)[0]] for tensor in mapped)


def in_one_form(source: Source, other: Source) -> tuple[Source, Source]:
    """Return two sources of one family with each parameter in the same tensors.

    A parameter that they store in two forms gets the form with more tensors. Sources with equal forms are returned
    unchanged.
    """
    shapes = {tensor.name: tensor.shape for tensor in source.tensors}
    other_shapes = {tensor.name: tensor.shape for tensor in other.tensors}
    if shapes == other_shapes:
        return source, other
    # Both lists are in the order of the family's parameters.
    rows = _bound_rows(source, shapes)
    other_rows = _bound_rows(other, other_shapes)
    forms: set[int] = set()
    other_forms: set[int] = set()
    for number, (row, other_row) in enumerate(zip(rows, other_rows)):
        if _form(row) == _form(other_row):
            continue
        if _num_tensors(row) < _num_tensors(other_row):
            forms.add(number)
        else:
            other_forms.add(number)
    target_rows = _bound_rows(source, other_shapes)
    other_target_rows = _bound_rows(other, shapes)
    return (
        _with_forms(source, [MapRow(0, target_rows[n], rows[n]) for n in sorted(forms)]),
        _with_forms(
            other, [MapRow(0, other_target_rows[n], other_rows[n]) for n in sorted(other_forms)]
        ),
    )


def with_family(source: Source) -> Source:
    """Return a source of the verbatim family with the family of its config, or unchanged if its tensors do not fit."""
    model_type = source.config.get("model_type")
    if not source.family.is_verbatim:
        return source
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        return split_towers(source)
    family = FAMILIES[model_type]
    try:
        names = detect_names(family, source.config, full_names={t.name for t in source.tensors})
        model = with_bare_names(replace(source, family=family), names)
        model = split_towers(model)
        match_source_tensors(model, stored_rows(model), DEFAULT_MATCH_OPTIONS)
    except PrepError:
        return source
    return model


def _bound_rows(source: Source, shapes: StoredShapes) -> list[AxisMap]:
    """Return the axis map of each parameter of a source in the form with tensors of these names and shapes."""
    manifest = source.tree_manifest
    rows = parameter_rows(
        source.family, source.config, manifest.scan, manifest.scan_axis, tensors=shapes
    )
    sizes = source.family.sizes(source.config)
    return [bind_row(row, sizes) for row in rows.values()]


def _form(row: AxisMap) -> tuple[object, ...]:
    """Return what distinguishes two forms of a parameter: the names of its tensors, and the order of their axes."""
    axes = [[factor.atom for factor in dim.factors] for dim in row.source_dims]
    return row.name_parts, axes


def _num_tensors(row: AxisMap) -> int:
    return math.prod(factor.extent for factor in row.stacked_factors)


def _with_forms(source: Source, rows: Sequence[MapRow]) -> Source:
    """Return a source with the target tensors of rows, and of their training state, in place of the stored ones."""
    if not rows:
        return source
    tensors = _views(source.tensors, rows, PARAMS)
    state: dict[str, SourceTensor] = {tensor.name: tensor for tensor in source.state_tensors}
    for slot in {split_name(name)[0] for name in state}:
        if slot:
            state = {tensor.name: tensor for tensor in _views(tuple(state.values()), rows, slot)}
    return replace(source, tensors=tensors, state_tensors=tuple(state.values()))


def _views(
    stored: Sequence[SourceTensor], rows: Sequence[MapRow], slot: str
) -> tuple[SourceTensor, ...]:
    """Return tensors with a slot of the state in another form, in the order of their bytes in the files.

    `map_tensors` makes the tensors of a user's map. It keeps no tensor without a row, and raises an error where this
    function leaves the tensors as they are. Only this function reads leaves of several parts: their chunks belong to
    both forms.
    """
    tensors = {tensor.name: tensor for tensor in stored}
    parts: list[TensorPart] = []
    replaced: set[str] = set()
    for row in rows:
        for target, source_name, indices in row.pairs():
            tensor = tensors.get(qualify(slot, source_name))
            location = None if tensor is None else _view(row, indices, tensor)
            if tensor is None or location is None:
                # It is missing, or is in parts that cannot be taken apart.
                return tuple(stored)
            replaced.add(tensor.name)
            parts.append((qualify(slot, target), row.target.source_shape, tensor, location))
    kept = [tensor for tensor in stored if tensor.name not in replaced]
    return tuple(sorted((*kept, *_join_parts(parts)), key=file_position))


def _view(row: MapRow, indices: Mapping[str, int], stored: SourceTensor) -> Location | None:
    """Return where a tensor of another form is stored in a tensor, or None if it is stored in several parts."""
    for location in stored.placement:
        if location.axis_map is not None and location.axis_map == row.source:
            # The part of a leaf. Both forms have the leaf's dims, and the same chunks.
            atoms = [factor.atom for factor in row.target.stacked_factors]
            stacked = tuple((atom, indices[atom]) for atom in atoms)
            return replace(location, axis_map=row.target, stacked_indices=stacked)
    if len(stored.placement) != 1:
        return None
    (location,) = stored.placement
    return compose_location(row, indices, location)
