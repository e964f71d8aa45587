"""The updates of experts in `prep merge`: adapters of parameters that a class of transformers has for all experts.

PEFT calls them `target_parameters`. The base may store such a parameter as one tensor, or as a tensor per expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import PrepError
from prepcli.models.lora import (
    EXPERTS,
    WEIGHT,
    Projection,
    expert_projections,
    layer_names,
    nested_module,
)
from prepcli.models.peft_names import split_wrappers
from prepcli.planning.plan import ExpertUpdate, Stream
from prepcli.sources.openers.peft_settings import PeftSettings
from prepcli.sources.source import Source, source_axis_maps

# Streams of A and B of a module.
Matrices = Mapping[str, Stream]


def expert_updates(
    settings: PeftSettings,
    source: Source,
    adapter: Source,
    matrices: Mapping[str, Matrices],
    digests: Mapping[str, str],
) -> Iterator[tuple[str, str, ExpertUpdate]]:
    """Yield the updates of the tensors of experts.

    Args:
        settings: Settings of the adapter.
        source: The base.
        adapter: The adapter.
        matrices: Matrices of the adapter by module, without the prefix of PEFT.
        digests: Recorded digest of each matrix.

    Yields:
        Module of the adapter, name of the base's tensor, and the update.

    Raises:
        PrepError: The base has no family with such experts, or a matrix has another shape.
    """
    modules = {split_wrappers(name, source.family)[1]: name for name in matrices}
    every: list[Projection] = []
    if not source.family.is_verbatim:
        every = list(expert_projections(source.family, source.config))
    targeted = [p for p in every if settings.targets_parameter(p.tensor)]
    if not targeted:
        why = (
            f"the base has no parameter {(settings.target_parameters or [''])[0]!r:.80} of experts"
        )
        hint = "name the model that the adapter was trained with"
        raise PrepError(f"{adapter.display_name} does not fit the base", why, hint)
    tensors = _tensors_by_layer(source)
    num_experts = source.family.sizes(source.config)[EXPERTS]
    for projection in targeted:
        members = [p for p in targeted if p.tensor == projection.tensor]
        layers = layer_names(projection.module, projection.stack, source.family, source.config)
        for layer, name in enumerate(layers):
            module = modules.get(nested_module(name, projection, targeted))
            if module is None:
                continue
            prefix = module.removesuffix(nested_module(name, projection, targeted))
            parameter = f"{prefix}{name}.{projection.parameter}"
            pair = matrices[module]
            _check_ranks(adapter, pair, settings.rank_of(parameter) * num_experts)
            update = ExpertUpdate(
                pair["A"],
                pair["B"],
                settings.scaling_of(parameter),
                digests=(digests.get(pair["A"].name, ""), digests.get(pair["B"].name, "")),
                num_experts=num_experts,
            )
            for tensor, expert, is_transposed in tensors[projection.path, layer]:
                yield (
                    module,
                    tensor,
                    _part_of(
                        update, projection, members, expert=expert, is_transposed=is_transposed
                    ),
                )


def _part_of(
    update: ExpertUpdate,
    projection: Projection,
    members: list[Projection],
    *,
    expert: int | None,
    is_transposed: bool,
) -> ExpertUpdate:
    """Return the update of one tensor: of all experts, or of the projection of one expert."""
    num_outputs = update.b.shape[0]
    outputs = (0, num_outputs)
    if expert is not None:
        # E.g. gate and up are the halves of the outputs of `gate_up_proj`.
        size = num_outputs // len(members)
        first = members.index(projection) * size
        outputs = (first, first + size)
    return ExpertUpdate(
        update.a,
        update.b,
        update.scale,
        is_transposed=is_transposed,
        digests=update.digests,
        num_experts=update.num_experts,
        expert=expert,
        outputs=outputs,
    )


def _tensors_by_layer(source: Source) -> dict[tuple[str, int], list[tuple[str, int | None, bool]]]:
    """Return the base's tensors of experts, by path of the projection and index of the layer.

    Each has the number of its expert, or None if it has all of them, and whether it is stored as [in, out].
    """
    sizes = source.family.sizes(source.config)
    axis_maps = source_axis_maps(source)
    tensors: dict[tuple[str, int], list[tuple[str, int | None, bool]]] = {}
    for projection in expert_projections(source.family, source.config):
        row = bind_row(axis_maps[f"{projection.path}{WEIGHT}"], sizes)
        in_atoms = {factor.atom for factor in row.source_dims[-1].factors}
        is_transposed = not any(atom in in_atoms for atom in projection.in_dims)
        for name, indices in row.tensors():
            entry = (name, indices.get(EXPERTS), is_transposed)
            tensors.setdefault((projection.path, indices[projection.stack]), []).append(entry)
    return tensors


def _check_ranks(adapter: Source, pair: Matrices, rows: int) -> None:
    """Raise PrepError unless both matrices have the rank of all experts together."""
    for stream, axis in ((pair["A"], 0), (pair["B"], 1)):
        if stream.shape[axis] != rows:
            why = f"{stream.name} is {list(stream.shape)}, and the rank of all experts is {rows}"
            hint = "get or export the adapter again"
            raise PrepError(f"{adapter.display_name} does not fit the base", why, hint)
