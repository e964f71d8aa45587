"""Plan a Hugging Face folder with other vocabulary rows: shared by pad-vocab, add-tokens and remove-tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prepcli.core.json_types import HFConfig
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.safetensors_layout import SafetensorsLayout
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Plan, SmallFile
from prepcli.planning.slabs import PAGE
from prepcli.planning.tensor_match import TensorMatch
from prepcli.planning.vocabulary import Vocabulary, with_vocabulary
from prepcli.sources.multimodal import towers_entry
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.hf_folder import (
    FileGroup,
    config_files,
    header_entries,
    index_files,
    lay_out_weight_files,
    output_config,
)
from prepcli.targets.streams import (
    TensorTarget,
    VocabResize,
    build_streams,
    dropped_padding,
    output_rows,
)


def plan_resized_folder(
    source: Source,
    match: TensorMatch,
    resize: VocabResize,
    *,
    new_vocabulary: Vocabulary,
    command: str,
    request: str,
    name: str,
    init: str,
    side_files: Sequence[SmallFile],
    settings: Manifest = NO_MANIFEST,
) -> Plan:
    """Plan a copy of each tensor to the file of the same name, with other rows in the vocabulary's tensors.

    Args:
        source: A Hugging Face folder.
        match: Match of its tensors.
        resize: Vocabulary tensors, and their new rows.
        new_vocabulary: Sizes in the output.
        command: Name of the command.
        request: Its recorded command line.
        name: Name of the model in the manifest.
        init: Kind of new rows, for the manifest.
        side_files: Files other than the weights and config.json.
        settings: Further fields of the manifest.
    """
    # Other tensors that the family ignores, such as buffers, are copied. Only `--drop` removes a tensor.
    model_tensors = (*source.tensors, *source.tower_tensors)
    row_counts = output_rows(model_tensors, resize.tensors, vocab_size=new_vocabulary.stored_size)
    tensors = list(zip(source.tensor_file_names, model_tensors, strict=True))
    files, locations, layouts = lay_out_weight_files(_file_groups(source, tensors, row_counts))
    targets: dict[str, TensorTarget] = {}
    for _, tensor in tensors:
        location = locations[source.file_name(tensor)]
        targets[tensor.name] = TensorTarget((location,), row_counts[tensor.name])
    config = output_config(source, new_vocabulary, match.is_tied)
    if source.family.is_verbatim:
        # A quantised model with the names of its files has its own sizes in the config, as any other model.
        config = with_vocabulary(source.config, new_vocabulary)
    fields = Manifest(
        name=name,
        kind="hf",
        family=source.family.name,
        vocab={
            "true": new_vocabulary.true_size,
            "padded": new_vocabulary.stored_size,
            "init": init,
        },
        prefixed=source.names.is_prefixed,
        tied=match.is_tied,
        config=config,
    )
    return Plan(
        command=command,
        request=request,
        source_name=source.display_name,
        source_files=source.file_stamps,
        streams=build_streams(source, targets, resize=resize),
        files=files,
        small_files=_small_files(source, config, layouts, side_files),
        dropped=(
            *source.dropped,
            *dropped_padding(source, targets, resize=resize),
            *source.extra_entries,
        ),
        checks=match.checks,
        settings=fields | towers_entry(source) | settings,
        display_names=source.display_names(),
    )


def _small_files(
    source: Source,
    config: HFConfig,
    layouts: Sequence[SafetensorsLayout],
    side_files: Sequence[SmallFile],
) -> tuple[SmallFile, ...]:
    """Return the config, the index of the weights and the side files of the output.

    The digest of the plan depends on their order. Half-done outputs of earlier versions have this one.
    """
    return (*config_files(source, config), *index_files(layouts), *side_files)


def _file_groups(
    source: Source, tensors: Sequence[tuple[str, SourceTensor]], row_counts: Mapping[str, int]
) -> list[FileGroup]:
    """Group the tensors by source file. A group keeps the page offset of its first tensor, to copy pages."""
    groups: list[FileGroup] = []
    for file in dict.fromkeys(name for name, _ in tensors):
        file_tensors = [t for name, t in tensors if name == file]
        first = file_tensors[0].placement[0]
        # With equal offsets within a page of 4096 bytes, direct I/O writes whole pages as they were read.
        page_offset = first.array.offset % PAGE if first.is_contiguous else None
        groups.append((file, header_entries(source, file_tensors, rows=row_counts), page_offset))
    return groups
