"""The formats of checkpoints. Every fact that differs between them is in a row of `FORMATS`.

A new format is a module that reads its files, and a row here. A format whose files need more than
`openers.tensor_files` also has an opener of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from prepcli.formats import msgpack, safetensors, torch_dcp, torch_files
from prepcli.formats.model_files import ModelFiles
from prepcli.planning.arrays import Array
from prepcli.stores.paths import AnyPath

Kind = Literal["safetensors", "orbax", "torch", "meta", "dcp", "flax", "easylm", "adapter", "gguf"]
# Names at the top of a folder -> names of files.
Select = Callable[[Sequence[str]], Sequence[str]]
HF_FOLDER_OPENER = "tensor_files.read_folder"


def _no_files(names: Sequence[str]) -> Sequence[str]:
    del names
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of checkpoints.

    Attributes:
        title: Name in messages.
        opener: Module of `sources.openers`, and its function that returns the source of a located checkpoint.
        read_files: Reads the headers of a folder or file. None if a tensor may be several arrays.
        iter_tensors: Yields the tensors of a folder, and reads a file when its first tensor is needed. By default,
            `read_files` reads all of them.
        select: Selects the files of a model by the names that libraries give them.
        select_other: Selects files of any other name that may hold a model.
        select_downloads: Selects the files of a repository on the hub. With an index, these are all files that it may
            name. Empty for formats that are not read from the hub.
        settings_files: Files to download with the weights, if they exist.
        suffixes: Suffixes of the files, in lower case and with the dot.
        index_file: File with the file name of each tensor.
        has_hf_names: Whether the tensors have the names of transformers. The model may then be multimodal.
        has_layouts: Whether the tensors are leaves of a tree, which has another layout in each library.
        has_recorded_headers: Whether a manifest of prep records the digests of the headers.
    """

    title: str
    opener: str
    read_files: Callable[[AnyPath], ModelFiles] | None = None
    iter_tensors: Callable[[AnyPath], Iterable[Array]] | None = None
    select: Select = _no_files
    select_other: Select = _no_files
    select_downloads: Select = _no_files
    settings_files: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    index_file: str = ""
    has_hf_names: bool = False
    has_layouts: bool = False
    has_recorded_headers: bool = False

    @property
    def is_hf_folder(self) -> bool:
        """Whether a checkpoint is a folder of transformers, which may have settings of a quantisation tool."""
        return self.opener == HF_FOLDER_OPENER


# In the order of precedence: the format with the safest and fastest reader comes first. Repositories on the hub often
# have the same model as safetensors, PyTorch and Flax.
FORMATS: Mapping[Kind, Format] = {
    "safetensors": Format(
        title="safetensors",
        opener=HF_FOLDER_OPENER,
        read_files=safetensors.read_safetensors_folder,
        iter_tensors=safetensors.iter_folder_tensors,
        select=safetensors.select_safetensors_files,
        select_downloads=safetensors.select_safetensors_downloads,
        suffixes=(".safetensors",),
        index_file=safetensors.INDEX_FILE,
        has_hf_names=True,
        has_recorded_headers=True,
    ),
    "torch": Format(
        title="PyTorch",
        opener=HF_FOLDER_OPENER,
        read_files=torch_files.read_torch_folder,
        select=torch_files.select_transformers_files,
        select_other=torch_files.select_model_files,
        select_downloads=torch_files.select_torch_downloads,
        suffixes=torch_files.SUFFIXES,
        index_file=torch_files.INDEX_FILE,
        has_hf_names=True,
    ),
    "meta": Format(
        title="PyTorch in Meta's layout",
        opener="meta_folder.read",
        select=torch_files.select_meta_files,
        select_downloads=torch_files.select_meta_files,
        settings_files=(torch_files.META_PARAMS_FILE,),
    ),
    "flax": Format(
        title="Flax msgpack",
        opener="tensor_files.read_flax",
        read_files=partial(msgpack.read_flax_files, kind="flax"),
        select=msgpack.select_named_flax_files,
        select_other=msgpack.select_other_flax_files,
        select_downloads=msgpack.select_flax_downloads,
        suffixes=(".msgpack",),
        index_file=msgpack.INDEX_FILE,
        has_layouts=True,
        has_recorded_headers=True,
    ),
    "easylm": Format(
        title="EasyLM stream",
        opener="tensor_files.read_flax",
        read_files=partial(msgpack.read_flax_files, kind="easylm"),
        select=msgpack.select_streams,
        has_layouts=True,
        has_recorded_headers=True,
    ),
    "dcp": Format(
        title="torch distributed checkpoint",
        opener="tensor_files.read_dcp",
        read_files=torch_dcp.read_dcp_folder,
        select=torch_dcp.select_dcp_files,
        suffixes=(torch_dcp.SUFFIX,),
        has_hf_names=True,
        has_layouts=True,
    ),
    "orbax": Format(title="orbax", opener="orbax_item.read", has_layouts=True),
    "adapter": Format(
        title="adapter of PEFT",
        opener="tensor_files.read_adapter",
        read_files=safetensors.read_adapter_files,
        settings_files=(safetensors.ADAPTER_CONFIG,),
        has_recorded_headers=True,
    ),
    "gguf": Format(title="GGUF", opener="gguf_file.read"),
}
INDEX_FILES = tuple(row.index_file for row in FORMATS.values() if row.index_file)
# Suffixes of all weight files that prep reads from a folder.
SUFFIXES = tuple(dict.fromkeys(suffix for row in FORMATS.values() for suffix in row.suffixes))


def select_downloads(names: Sequence[str]) -> Sequence[str]:
    """Return the weight files of a repository on the hub, of the first format that it has. Empty if there are none."""
    for row in FORMATS.values():
        if selected := row.select_downloads(names):
            return selected
    return ()


def iter_hf_tensors(folder: AnyPath, names: Sequence[str]) -> Iterable[Array]:
    """Return the tensors of a folder of transformers, which has files of these names.

    Raises:
        LookupError: The folder has another format.
        PrepError: A file is unreadable or broken.
    """
    row = next((row for row in FORMATS.values() if row.select(names)), None)
    if row is None or not row.is_hf_folder or row.read_files is None:
        raise LookupError(folder)
    if row.iter_tensors is not None:
        return row.iter_tensors(folder)
    return row.read_files(folder).tensors
