"""The map of an export: its options, its record, and its LM head."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from prepcli.commands.operations.options import ExportOptions
from prepcli.core.errors import Option, text, usage_error
from prepcli.engine.digest import digest
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.map_file import TensorMap
from prepcli.sources.mapped import CONTENT_KEY, read_map
from prepcli.sources.multimodal import models_title
from prepcli.sources.source import Source

HF_LAYOUT = "hf"
SAFETENSORS = "safetensors"


@dataclass(frozen=True, slots=True)
class WrittenMap:
    """The map of an export.

    Attributes:
        tensor_map: The map, or None for the names of the layout.
        record: Its entry in the manifest. With its content, the output is read without a file.
    """

    tensor_map: TensorMap | None = None
    record: Manifest = field(default_factory=Manifest)

    def names_tied_head(self, source: Source) -> bool:
        """Return whether the map writes an LM head for a model with tied embeddings."""
        if self.tensor_map is None or source.family.is_verbatim:
            return False
        tying = source.family.tying
        if any(tensor.name == tying.head_tensor for tensor in source.tensors):
            return False
        head = source.names.full_name(tying.head_tensor)
        return any(row.target.name_parts == (head,) for row in self.tensor_map.rows)


def read_export_map(options: ExportOptions, source: Source) -> WrittenMap:
    """Return the map of an export.

    Raises:
        UsageError: The map is for safetensors files of a text model, and the export is not.
        PrepError: The file cannot be read.
    """
    path = options.get("map")
    if path is None:
        return WrittenMap()
    option = Option("map")
    other = ""
    if options["layout"] != HF_LAYOUT:
        other = f"the layout {options['layout']}"
    elif options["format"] not in (None, SAFETENSORS):
        other = f"the format {options['format']}"
    elif source.wrapper is not None:
        other = models_title(source)
    if other:
        why = f"a map names tensors of {SAFETENSORS} files"
        raise usage_error(
            text("{} is not supported for {}", option, other), why, text("remove {}", option)
        )
    tensor_map = read_map(Path(path))
    record = {
        "name": tensor_map.name,
        "xxh3": digest(tensor_map.content.encode()),
        CONTENT_KEY: tensor_map.content,
    }
    return WrittenMap(tensor_map, Manifest(map=record))
