"""Adapters of PEFT as an edit of their base: products of low rank to add, and tensors to replace.

`target_parameters` of PEFT are parameters that a class of transformers has for all experts. The base may store such a
parameter as one tensor, or as a tensor per expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import GET_AGAIN_HINT, Command, Option, PrepError, text, usage_error
from prepcli.core.json_values import JsonObject
from prepcli.engine.casts import ExpertUpdate, LowRankUpdate
from prepcli.formats.safetensors import ADAPTER_CONFIG
from prepcli.models.lora import (
    EXPERTS,
    PEFT_PREFIX,
    WEIGHT,
    Projection,
    expert_projections,
    layer_names,
    nested_module,
    projections,
    saved_module_name,
    saved_modules,
    select_targets,
)
from prepcli.models.lora_config import LoraConfig, lora_from_manifest
from prepcli.models.peft_names import module_suffixes, peft_patterns, split_wrappers
from prepcli.models.registry import family_of
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import SmallFile, Stream
from prepcli.planning.tensors import FLOAT_DTYPES
from prepcli.sources.openers.peft_settings import (
    MATRIX_NAME,
    MERGE_HINT,
    PeftSettings,
    check_settings,
    check_tying,
    read_settings,
)
from prepcli.sources.openers.tensor_files import is_adapter, open_adapter, read_checked_header
from prepcli.sources.source import (
    Source,
    SourceTensor,
    append_files,
    shift_file_numbers,
    source_rows,
    stored_rows,
)
from prepcli.targets.hf_folder import (
    ALL_TOKENIZER_FILES,
    adapter_tokenizer,
    json_bytes,
    prep_adapter_tokenizer,
)
from prepcli.targets.planner import Draft, Placed, start_draft, with_rows, with_tied_head

# Module of older encoders of images between a tower and its layers.
VISION_WRAPPER = "vision_model"
OTHER_BASE_HINT = "name the model that the adapter was trained with"
# Streams of A and B of a module.
Matrices = Mapping[str, Stream]


@dataclass(frozen=True, slots=True)
class BaseAdapter:
    """An adapter with the names of its base's tensors.

    Attributes:
        path: Its folder.
        settings: Its settings.
        source: Its tensors. They have the names of the base's modules, as far as the base has them.
        scales: Factor of each module's product. The patterns of the settings are for the names in the adapter.
    """

    path: Path
    settings: PeftSettings
    source: Source
    scales: Mapping[str, float]


def merge_adapter(draft: Draft, adapter: BaseAdapter) -> tuple[Draft, Source]:
    """Return the draft of a base with the values of an adapter, and the source with the tensors of both.

    The draft also has a stream for each matrix of the adapter. The stream is digested and not written. A change of the
    adapter during the merge is noticed this way, like a change of the base.
    """
    source = draft.source
    first = len(source.byte_sources)
    tensors = tuple(shift_file_numbers(tensor, first) for tensor in adapter.source.tensors)
    whole, unused = _whole_tensors(tensors, adapter, source)
    rest = tuple(tensor for tensor in tensors if tensor.name not in {*whole, *unused})
    matrices = _matrix_streams(rest, adapter.path)
    combined = append_files(source, adapter.source)
    merged = replace(
        draft,
        source=combined,
        updates=dict(_low_rank_updates(draft, matrices, adapter)),
        replaced=whole,
        digested=tuple(matrix for pair in matrices.values() for matrix in pair.values()),
    )
    others = [tensor for tensor in tensors if tensor.name not in whole]
    view = replace(combined, tensors=(*_with_whole_parts(source, whole), *others))
    return merged, view


def with_adapter_tokenizer(draft: Draft, placed: Placed, adapter: Path) -> tuple[Draft, Placed]:
    """Return a draft and its layout with the tokenizer of an adapter that prep wrote, in place of the base's."""
    files = prep_adapter_tokenizer(adapter)
    if not files:
        return draft, placed
    kept = tuple(file for file in draft.small_files if file.path not in ALL_TOKENIZER_FILES)
    # A plan's digest depends on the order of its files.
    return replace(draft, small_files=kept), replace(placed, index=(*placed.index, *files))


def open_base_adapter(path: Path, source: Source) -> BaseAdapter:
    """Read the settings and the header of an adapter, for a base."""
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
        # Another tensor may be the weight of a module that was trained as a whole.
        module = tensor.name.rpartition(".")[0]
        if match := MATRIX_NAME.fullmatch(tensor.name):
            module = match["module"]
        target = modules.get(module) or modules.get(_module_key(module, source))
        renamed = tensor.name
        if target is not None:
            renamed = f"{target}{tensor.name.removeprefix(module)}"
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
    return BaseAdapter(path, settings, replace(adapter, tensors=tuple(tensors)), scales)


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
    """Return the common part of a module's names in all classes of transformers.

    E.g. `model.vision_tower.encoder.layers.0.mlp.fc1` is `vision_tower.vision_model.encoder.layers.0.mlp.fc1` in older
    versions, with the key `vision_tower.encoder.layers.0.mlp.fc1`.
    """
    _, rest = split_wrappers(name, source.family)
    first, *others = rest.split(".")
    return ".".join([first, *(part for part in others if part != VISION_WRAPPER)])


def _whole_tensors(
    tensors: tuple[SourceTensor, ...], adapter: BaseAdapter, source: Source
) -> tuple[dict[str, SourceTensor], list[str]]:
    """Return the adapter's whole copies of tensors, by name, and the names of its unused tensors.

    A tied head is unused: PEFT ties it to the embedding of the adapter again.
    """
    settings = adapter.settings
    is_tied = source.family.is_tied(source.config) or (
        source.family.is_verbatim and bool(source.config.get("tie_word_embeddings"))
    )
    base_tensors = {tensor.name: tensor for tensor in source.tensors}
    has_head = any(tensor.name == source.family.tying.head_tensor for tensor in tensors)
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
            check_tying(adapter.path, settings, has_head=has_head)
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
            raise PrepError(f"{adapter.path} does not fit the base", why, OTHER_BASE_HINT)
        whole[tensor.name] = tensor
    return whole, unused


def _with_whole_parts(source: Source, whole: Mapping[str, SourceTensor]) -> Iterator[SourceTensor]:
    """Yield the tensors of a base, with the merged parts of each replaced one.

    The digests of the parts are compared before the merge. Those of a base and an adapter may cover other rows than the
    merge reads from each, and PEFT records none.
    """
    for tensor in source.tensors:
        replacement = whole.get(tensor.name)
        if replacement is None:
            yield tensor
            continue
        parts = replacement.stored
        if replacement.shape[0] < tensor.shape[0]:
            # Rows of padding stay those of the base.
            parts += tensor.stored
        yield replace(tensor, digests=(), made_from=parts)


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
            raise PrepError(f"{adapter}: {tensor.name} cannot be merged", why, MERGE_HINT)
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
    draft: Draft, matrices: Mapping[str, Matrices], adapter: BaseAdapter
) -> Iterator[tuple[str, LowRankUpdate]]:
    """Yield the name of each changed tensor with its update.

    Raise PrepError if the base lacks a tensor.
    """
    source = draft.source
    kept = {tensor.name for tensor in draft.tensors}
    stored = (*source.tensors, *source.tower_tensors)
    written = {tensor.name: tensor for tensor in stored if tensor.name in kept}
    transposed = [
        # `h.{layer}.attn.c_attn` becomes `h\.\d+\.attn\.c_attn`: `re.escape` also escapes the braces of the atom.
        re.compile(re.sub(r"\\{\w+\\}", r"\\d+", re.escape(projection.module)))
        for projection in projections(source.family, source.config)
        if projection.is_transposed
    ]
    digests = {
        tensor.name: tensor.digests[0][2] for tensor in adapter.source.tensors if tensor.digests
    }
    merged: set[str] = set()
    if adapter.settings.target_parameters:
        for module, name, update in _expert_updates(adapter, source, matrices, digests):
            merged.add(module)
            if name not in written:
                continue
            _check_shapes(written[name], update, adapter.path)
            yield name, update
    for module, pair in matrices.items():
        if module in merged:
            continue
        update = LowRankUpdate(
            pair["A"],
            pair["B"],
            adapter.scales[module],
            is_transposed=any(name.fullmatch(module) for name in transposed),
            digests=(digests.get(pair["A"].name, ""), digests.get(pair["B"].name, "")),
        )
        target = written.get(f"{module}.weight")
        if target is None:
            hint = text("{} lists its tensors", Command("inspect", source.display_name))
            why = f"the base has no tensor {module}.weight"
            raise PrepError(f"{adapter.source.display_name} does not fit the base", why, hint)
        _check_shapes(target, update, adapter.path)
        yield target.name, update


def _check_shapes(target: SourceTensor, update: LowRankUpdate, adapter: Path) -> None:
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
            OTHER_BASE_HINT,
        )


def _expert_updates(
    adapter: BaseAdapter,
    source: Source,
    matrices: Mapping[str, Matrices],
    digests: Mapping[str, str],
) -> Iterator[tuple[str, str, ExpertUpdate]]:
    """Yield the updates of the tensors of experts.

    Each has its module in the adapter and the name of its tensor in the base.
    """
    settings = adapter.settings
    modules = {split_wrappers(name, source.family)[1]: name for name in matrices}
    every: list[Projection] = []
    if not source.family.is_verbatim:
        every = list(expert_projections(source.family, source.config))
    targeted = [p for p in every if settings.targets_parameter(p.tensor)]
    if not targeted:
        why = (
            f"the base has no parameter {(settings.target_parameters or [''])[0]!r:.80} of experts"
        )
        raise PrepError(
            f"{adapter.source.display_name} does not fit the base", why, OTHER_BASE_HINT
        )
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
            rank = settings.rank_of(parameter) * num_experts
            for stream, axis in ((pair["A"], 0), (pair["B"], 1)):
                if stream.shape[axis] != rank:
                    shape = list(stream.shape)
                    why = f"{stream.name} is {shape}, and the rank of all experts is {rank}"
                    what = f"{adapter.source.display_name} does not fit the base"
                    raise PrepError(what, why, "get or export the adapter again")
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
    return replace(update, is_transposed=is_transposed, expert=expert, outputs=outputs)


def _tensors_by_layer(source: Source) -> dict[tuple[str, int], list[tuple[str, int | None, bool]]]:
    """Return the base's tensors of experts, by path of the projection and index of the layer.

    Each has the number of its expert, or None if it has all of them, and whether it is stored as [in, out].
    """
    sizes = source.family.sizes(source.config)
    rows = source_rows(source)
    tensors: dict[tuple[str, int], list[tuple[str, int | None, bool]]] = {}
    for projection in expert_projections(source.family, source.config):
        row = bind_row(rows[f"{projection.path}{WEIGHT}"], sizes)
        in_atoms = {factor.atom for factor in row.source_dims[-1].factors}
        is_transposed = not any(atom in in_atoms for atom in projection.in_dims)
        for name, indices in row.tensors():
            entry = (name, indices.get(EXPERTS), is_transposed)
            tensors.setdefault((projection.path, indices[projection.stack]), []).append(entry)
    return tensors


# --- Export


def draft_adapter(source: Source, dtype: str | None) -> Draft:
    """Return the draft of trained adapters in the files of PEFT."""
    manifest = source.tree_manifest
    lora = lora_from_manifest(manifest)
    assert lora is not None
    if lora.modules_to_save and manifest.tied:
        # PEFT saves a tied head as well, and does not load an adapter without it.
        source = with_tied_head(source)
    draft = start_draft(
        source,
        stored_rows(source),
        dtype=dtype,
        kept={tensor.name for tensor in source.tensors},
    )
    # Embeddings and head that were trained as a whole lose the padding of the vocabulary.
    draft = with_rows(draft, draft.vocabulary.true_size)
    adapter_config = SmallFile(ADAPTER_CONFIG, json_bytes(_peft_settings(source, lora)))
    return replace(
        draft,
        match=replace(draft.match, checks=()),
        dropped=(),
        config=None,
        small_files=(adapter_config, *adapter_tokenizer(source)),
        settings=Manifest(kind="adapter", prefixed=True, tied=manifest.tied, config=source.config),
    )


def _peft_settings(source: Source, lora: LoraConfig) -> JsonObject:
    """Return the content of adapter_config.json."""
    family = family_of(source.config)

    def number(value: float) -> float:
        # PEFT declares `lora_alpha` as int and writes 16, not 16.0.
        return int(value) if value.is_integer() else value

    config = source.config
    has_encoder = family.arch_config(config).encoder is not None
    patterns = peft_patterns(family, config, lora)
    # PEFT compares the name of a module with the end of its own, e.g. `lm_head`.
    paths = [path for name in lora.modules_to_save for path in saved_modules(family, config)[name]]
    saved = list(dict.fromkeys(saved_module_name(family, path) for path in paths))
    is_tied = source.tree_manifest.tied
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM" if has_encoder else "CAUSAL_LM",
        "base_model_name_or_path": base_of_adapter(source.tree_manifest),
        "r": lora.rank,
        "lora_alpha": number(lora.alpha),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.use_rslora,
        "use_dora": False,
        "bias": "none",
        "target_modules": [*module_suffixes(family, config, lora)],
        "target_parameters": [*patterns.target_parameters] or None,
        "rank_pattern": {**patterns.rank_pattern},
        "alpha_pattern": {name: number(alpha) for name, alpha in patterns.alpha_pattern.items()},
        "modules_to_save": [*saved] or None,
        # With this setting PEFT keeps a trained embedding tied to the head.
        "ensure_weight_tying": is_tied and bool(saved),
        # GPT-2 stores its weights as [in, out]. With this flag PEFT transposes its update B A, which is [out, in].
        "fan_in_fan_out": any(
            p.is_transposed for p in select_targets(family, config, lora.targets)
        ),
        "init_lora_weights": True,
        # PEFT writes True in every saved adapter, and sets it again from `is_trainable` when it loads one.
        "inference_mode": True,
    }


def base_of_adapter(manifest: Manifest) -> str:
    """Return the name of the base model of the adapters."""
    name = manifest.base.get("name")
    if not isinstance(name, str):
        raise PrepError(
            "the manifest does not name the base of the adapters",
            "`base` is missing",
            GET_AGAIN_HINT,
        )
    return name
