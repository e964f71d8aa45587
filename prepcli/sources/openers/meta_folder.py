"""Meta's own LLaMA checkpoints: `params.json`, and a file for each of the devices that the model was trained on.

A file has a part of the rows or of the columns of each matrix, so the whole is a tree leaf in chunks that are files.
Rows of queries and keys come in another order: Meta rotates neighbours, Hugging Face the two halves of a head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepcli.errors import PrepError
from prepcli.formats.meta_llama_config import is_small_llama_3_2, to_hf_config
from prepcli.formats.safetensors_layout import split_into_shards
from prepcli.formats.torch_files import CONSOLIDATED_FILE, META_PARAMS_FILE, TorchHeader, TorchTensor, read_torch_header
from prepcli.formats.untrusted import list_folder, parse_json, quote_name, stat_file, unreadable_error
from prepcli.planning.accounting import detect_names
from prepcli.planning.grids import ChunkGrid, ExplicitPlacement
from prepcli.planning.plan import Contiguous, SourceFile, Strided
from prepcli.planning.strided_copies import Region
from prepcli.planning.tensors import itemsize
from prepcli.sources.openers.torch_folder import assign_blobs, placement_of
from prepcli.sources.source import CONFIG, Source, SourceTensor, read_config, small_files
from prepcli.sources.source_hints import SourceHints
from trainer.models.axis_map import AxisMap, bind_row, parse_row
from trainer.models.families.llama import FAMILY

MAX_PARAMS_NBYTES = 1 << 20
OUTPUT_SHARD_NBYTES = 5 * 10**9  # of the files that `pad-vocab` makes of Meta's
META_SIDE_FILES = {META_PARAMS_FILE, "checklist.chk"}
EMBEDDING, LM_HEAD, ROPE_FREQUENCIES = "tok_embeddings.weight", "output.weight", "rope.freqs"


@dataclass(frozen=True, slots=True)
class MetaTensorRule:
    """How a tensor of Meta's is a Hugging Face tensor, and the dim that is cut over files: None for all in each."""

    row: str
    shard_axis: int | None


_LAYER, _HF = "layers.{layers}.", "layers.{layers}.self_attn."
META_TENSOR_RULES: Mapping[str, MetaTensorRule] = {
    EMBEDDING: MetaTensorRule("vocab embed <- embed_tokens.weight: vocab embed", 1),  # or 0, which its shape tells
    _LAYER + "attention_norm.weight": MetaTensorRule(f"embed <- {_LAYER}input_layernorm.weight: embed", None),
    _LAYER + "attention.wq.weight": MetaTensorRule(
        f"(heads half two) embed <- {_HF}q_proj.weight: (heads two half) embed", 0
    ),
    _LAYER + "attention.wk.weight": MetaTensorRule(
        f"(kv_heads half two) embed <- {_HF}k_proj.weight: (kv_heads two half) embed", 0
    ),
    _LAYER + "attention.wv.weight": MetaTensorRule(
        f"(kv_heads head_dim) embed <- {_HF}v_proj.weight: (kv_heads head_dim) embed", 0
    ),
    _LAYER + "attention.wo.weight": MetaTensorRule(
        f"embed (heads head_dim) <- {_HF}o_proj.weight: embed (heads head_dim)", 1
    ),
    _LAYER + "ffn_norm.weight": MetaTensorRule(f"embed <- {_LAYER}post_attention_layernorm.weight: embed", None),
    _LAYER + "feed_forward.w1.weight": MetaTensorRule(f"mlp embed <- {_LAYER}mlp.gate_proj.weight: mlp embed", 0),
    _LAYER + "feed_forward.w2.weight": MetaTensorRule(f"embed mlp <- {_LAYER}mlp.down_proj.weight: embed mlp", 1),
    _LAYER + "feed_forward.w3.weight": MetaTensorRule(f"mlp embed <- {_LAYER}mlp.up_proj.weight: mlp embed", 0),
    "norm.weight": MetaTensorRule("embed <- norm.weight: embed", None),
    LM_HEAD: MetaTensorRule("vocab embed <- lm_head.weight: vocab embed", 0),
}


_NUMBERED = re.compile(r"layers\.(0|[1-9]\d{0,5})\.(.+)")


def open_meta(path: Path, display_name: str, hints: SourceHints) -> Source:
    """Read pickles and settings, run nothing. PrepError names what is broken or not understood."""
    files = _read_files(path)
    config = _config(path, display_name, hints, files)
    parts = _Parts(path, files, config)
    tensors = tuple(tensor for _, tensor in sorted(parts.tensors(), key=lambda pair: pair[0]))
    names = detect_names(FAMILY, config, [_full(tensor.name) for tensor in tensors])
    groups = split_into_shards([(_full(t.name), t.dtype, t.shape, t.nbytes) for t in tensors], OUTPUT_SHARD_NBYTES)
    held = tuple(file for file, entries in groups for _ in entries)
    facts = tuple(SourceFile(c.file_name, c.size, c.mtime_ns, c.digest) for c in files)
    small = tuple(p for p in small_files(path) if p.name not in META_SIDE_FILES)
    return Source(
        display_name, path, FAMILY, config, names, tensors, parts.paths, facts, small, None, held, blobs=parts.blobs
    )


def _full(name: str) -> str:
    """The name in a Hugging Face file; what only Meta has keeps its own."""
    return name if name in (*FAMILY.unprefixed, ROPE_FREQUENCIES) else FAMILY.prefix + name


def _read_files(path: Path) -> list[TorchHeader]:
    """The checkpoint of each device, in order. PrepError where one is missing."""
    names = [name for name in list_folder(path) if CONSOLIDATED_FILE.fullmatch(name)]
    wanted = [f"consolidated.{number:02d}.pth" for number in range(len(names))]
    if missing := [name for name in wanted if name not in names]:
        what = f"{missing[0]} is missing"
        raise PrepError(what, f"{path} has {len(names)} such files, up to {names[-1]}", "each has a part of the model")
    return [read_torch_header(path / name, number) for number, name in enumerate(names)]


# The config


def _config(path: Path, name: str, given: SourceHints, files: Sequence[TorchHeader]) -> dict[str, Any]:
    """The config.json that is given or beside the files, else one made of params.json."""
    if given.config_path is not None or (path / CONFIG).is_file():
        config = read_config(given.resolve_config_path(path, name))
        if config.get("model_type") != FAMILY.name:
            why = f"its config.json says `{config.get('model_type')!s:.40}`, such files hold `{FAMILY.name}`"
            raise PrepError(f"{name} is not what it says", why)
        return config
    document = _params(path, name)
    try:
        tied = is_small_llama_3_2(document) or not any(tensor.name == LM_HEAD for tensor in files[0].tensors)
        return to_hf_config(document, _vocab(document, files), tied)
    except ValueError as error:
        hint = f"`--config` names a {CONFIG} instead"
        raise PrepError(f"{path / META_PARAMS_FILE} makes no sense", str(error), hint) from error


def _params(path: Path, name: str) -> Any:
    found = path / META_PARAMS_FILE
    if not found.exists():
        hint = f"put Meta's {META_PARAMS_FILE} beside the files, or `--config` names the model's {CONFIG}"
        raise PrepError(
            f"{name} has no {META_PARAMS_FILE}", "it says how many heads there are, which the weights do not", hint
        )
    try:
        if stat_file(found).st_size > MAX_PARAMS_NBYTES:
            raise ValueError(f"it is larger than {MAX_PARAMS_NBYTES:,} bytes")
        return parse_json(found.read_bytes())
    except OSError as error:
        raise unreadable_error(found, error) from error
    except ValueError as error:
        raise PrepError(f"{found} is broken", str(error)) from error


def _vocab(document: Any, files: Sequence[TorchHeader]) -> int:
    """Rows of vocabulary: what params.json says, or, where it has -1, what the tensors have."""
    params = document.get("model", document) if isinstance(document, Mapping) else {}
    said = params.get("vocab_size") if isinstance(params, Mapping) else None
    if type(said) is int and said > 0:
        return said
    shapes = {tensor.name: tensor.shape for tensor in files[0].tensors}
    if len(shape := shapes.get(LM_HEAD, ())) == 2:
        return shape[0] * len(files)
    if len(shape := shapes.get(EMBEDDING, ())) == 2:
        return shape[0] * (len(files) if shape[1] == params.get("dim") else 1)
    raise ValueError(f"it has no vocab_size, and {files[0].file_name} has no {EMBEDDING}")


# The tensors


class _Parts:
    """The tensors of all files by Meta's names, and what they are together."""

    def __init__(self, path: Path, files: Sequence[TorchHeader], config: Mapping[str, Any]) -> None:
        sizes = FAMILY.sizes(config)
        self._sizes = sizes | {"two": 2, "half": sizes["head_dim"] // 2}
        self._files, self._rows = files, dict[str, AxisMap]()
        self.paths = tuple(path / c.file_name for c in files)
        tensors = [tensor for c in files for tensor in c.tensors]
        self._numbers, self.blobs = assign_blobs(tensors, self.paths)
        self._held: dict[str, list[tuple[TorchTensor, int]]] = {}
        for tensor, number in zip(tensors, self._numbers):
            self._held.setdefault(tensor.name, []).append((tensor, number))

    def tensors(self) -> Iterator[tuple[int, SourceTensor]]:
        """Hugging Face tensors, each with the place of its first part in the first file; what has no place among them
        under its own name. PrepError for parts that differ."""
        for name, pieces in self._held.items():
            self._check_all(name, pieces)
            found = _NUMBERED.fullmatch(name)
            pattern = _LAYER + found[2] if found else name
            first, number = pieces[0]
            if pattern not in META_TENSOR_RULES:
                yield first.offset, SourceTensor(name, first.dtype, first.shape, (placement_of(first, number),))
                continue
            row = self._row(pattern)
            at = {"layers": int(found[1])} if found else {}
            side = self._side(pattern, row, at, pieces)
            yield first.offset, SourceTensor(row.tensor_name(at), first.dtype, row.source_shape, (side,))

    def _row(self, pattern: str) -> AxisMap:
        if pattern not in self._rows:
            self._rows[pattern] = bind_row(parse_row(META_TENSOR_RULES[pattern].row), self._sizes)
        return self._rows[pattern]

    def _check_all(self, name: str, pieces: Sequence[tuple[TorchTensor, int]]) -> None:
        """Each file has its part, of one dtype."""
        if len(pieces) != len(self._files):
            having = {tensor.file for tensor, _ in pieces}
            lacking = next(c.file_name for number, c in enumerate(self._files) if number not in having)
            raise PrepError(f"{lacking} lacks {quote_name(name)}", "each file of Meta's has a part of each tensor")
        if len(dtypes := {tensor.dtype for tensor, _ in pieces}) > 1:
            raise PrepError(f"the parts of {quote_name(name)} differ", f"they are {' and '.join(sorted(dtypes))}")

    def _side(
        self, pattern: str, row: AxisMap, at: Mapping[str, int], pieces: Sequence[tuple[TorchTensor, int]]
    ) -> Contiguous | Strided | Region:
        """Where the tensor lies: in one file as it is, else in a chunk of each file."""
        axis = self._axis(pattern, row, pieces[0][0])
        chunk = self._chunk(row, axis)
        for tensor, _ in pieces:
            if tensor.shape != chunk:
                raise self._misshapen(tensor, row, axis, chunk)
        if chunk == row.leaf_shape and not _reorders(row):
            return placement_of(*pieces[0])
        if any(tensor.byte_strides for tensor, _ in pieces):
            why, hint = "its rows do not follow each other in the file", "with PyTorch: `.contiguous()` and save again"
            raise PrepError(f"{quote_name(pieces[0][0].name)} is a view", why, hint)
        parts = pieces if axis is not None else pieces[:1]
        places = {
            tuple(i if dim == axis else 0 for dim in range(len(chunk))): (number, tensor.offset)
            for i, (tensor, number) in enumerate(parts)
        }
        grid = ChunkGrid(row.leaf_shape, chunk)
        return Region(row, tuple(at.items()), grid, ExplicitPlacement(places), itemsize(pieces[0][0].dtype))

    def _axis(self, pattern: str, row: AxisMap, first: TorchTensor) -> int | None:
        """The dim that is cut. LLaMA 1 and 2 cut the embedding across, LLaMA 3 down."""
        if pattern == EMBEDDING and first.shape[1:] == row.leaf_shape[1:]:
            return 0
        return META_TENSOR_RULES[pattern].shard_axis

    def _chunk(self, row: AxisMap, axis: int | None) -> tuple[int, ...]:
        """The shape of each file's part. PrepError where the files do not divide the whole."""
        count = len(self._files)
        for atom in ("heads", "kv_heads"):
            if self._sizes[atom] % count:
                why = f"{self._sizes[atom]} {atom} cannot be dealt out to {count} files"
                raise PrepError("its heads are not whole in its files", why, "are all files here? Each has whole heads")
        return tuple(n // count if dim == axis else n for dim, n in enumerate(row.leaf_shape))

    def _misshapen(self, tensor: TorchTensor, row: AxisMap, axis: int | None, chunk: tuple[int, ...]) -> PrepError:
        what = f"{quote_name(tensor.name)} in {self._files[tensor.file].file_name} is {list(tensor.shape)}"
        why = f"the settings make it {list(chunk)} in each of {len(self._files)} files"
        if axis is not None and len(tensor.shape) == len(chunk) and tensor.shape[axis]:
            count, rest = divmod(row.leaf_shape[axis], tensor.shape[axis])
            if not rest and count != len(self._files):
                return PrepError(what, why, f"its whole is {list(row.leaf_shape)}: are there {count} files?")
        return PrepError(what, why, f"are {META_PARAMS_FILE} and the weights of one model?")


def _reorders(row: AxisMap) -> bool:
    """Whether elements come in another order than in the Hugging Face tensor."""
    return [f.atom for dim in row.leaf_dims for f in dim] != [f.atom for dim in row.source_dims for f in dim.factors]
