"""The tensors of a model in another stored form: the same elements, in other tensors.

transformers 4 stores a matrix per expert, and transformers 5 one tensor with the matrices of all experts:

    layers.3.mlp.experts.7.up_proj.weight    [mlp, embed]
    layers.3.mlp.experts.gate_up_proj        [experts, 2 mlp, embed]

Both are rows of one parameter (`Parameter.row` and `Parameter.alternate`). The elements of one form are views of the
tensors of the other one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from prepcli.algebra.axis_map import AxisMap, bind_row
from prepcli.core.errors import PrepError
from prepcli.models.parameters import StoredShapes, parameter_rows
from prepcli.models.registry import FAMILIES
from prepcli.planning.arrays import Location
from prepcli.planning.tensors import PARAMS, qualify, split_name
from prepcli.sources.maps import MapRow, compose_location
from prepcli.sources.model_family import split_towers, with_bare_names
from prepcli.sources.source import (
    Source,
    SourceTensor,
    file_position,
    match_source_tensors,
    stored_axis_maps,
)
from prepcli.sources.tensor_match import DEFAULT_MATCH_OPTIONS, detect_names


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
        match_source_tensors(model, stored_axis_maps(model), DEFAULT_MATCH_OPTIONS)
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

    `map_tensors` also makes tensors from rows, for the map of a user. It has no training state, keeps no tensor without
    a row, and raises an error where this function leaves the tensors as they are. Only this function reads leaves of
    several parts: their chunks belong to both forms.
    """
    tensors = {tensor.name: tensor for tensor in stored}
    views: dict[str, SourceTensor] = {}
    # The stored tensors that a view is made from. Their digests are checked in place of its own.
    parts: dict[str, dict[str, SourceTensor]] = {}
    replaced: set[str] = set()
    for row in rows:
        for target, source_name, indices in row.pairs():
            tensor = tensors.get(qualify(slot, source_name))
            location = None if tensor is None else _view(row, indices, tensor)
            if tensor is None or location is None:
                # It is missing, or is in parts that cannot be taken apart.
                return tuple(stored)
            replaced.add(tensor.name)
            name = qualify(slot, target)
            placement = (*views[name].placement, location) if name in views else (location,)
            view_parts = parts.setdefault(name, {})
            view_parts.update((part.name, part) for part in tensor.stored)
            views[name] = SourceTensor(
                name,
                tensor.dtype,
                row.target.source_shape,
                placement,
                made_from=tuple(view_parts.values()),
            )
    kept = [tensor for tensor in stored if tensor.name not in replaced]
    return tuple(sorted((*kept, *views.values()), key=file_position))


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
