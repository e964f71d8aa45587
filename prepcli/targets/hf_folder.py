"""The files of a model besides its weights: config.json, and copies of its tokenizer and other small files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from prepcli.core.json_values import HFConfig, JsonObject
from prepcli.formats.file_records import recorded_xxh3
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.models.text_part import with_text_config
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import SmallFile
from prepcli.planning.vocabulary import NO_VOCABULARY, Vocabulary, with_vocabulary
from prepcli.sources.side_files import SideFile
from prepcli.sources.source import CONFIG, Source
from prepcli.sources.symlinks import resolve_small_file
from prepcli.stores.paths import AnyPath, fetch_copies


def copied_files(
    side_files: Iterable[SideFile],
    root: AnyPath,
    *,
    manifest: Manifest | None = None,
    path_prefix: str = "",
) -> tuple[SmallFile, ...]:
    """Return files to copy unchanged from a checkpoint.

    Args:
        side_files: The files.
        root: Folder of the checkpoint.
        manifest: Manifest in `root`, if any. Copies of listed files are compared with their records.
        path_prefix: Put before the names in the output.

    Raises:
        PrepError: A file is a link that leaves the checkpoint.
    """
    files: list[SmallFile] = []
    side_files = list(side_files)
    fetch_copies(file.path for file in side_files)
    for side_file in side_files:
        real_path = resolve_small_file(side_file.path, root)
        file_stat = real_path.stat()
        file = SmallFile(
            path_prefix + side_file.name,
            copied_from=str(real_path),
            # A resume compares the plans. A tokenizer that was edited in between has another stamp, so another plan.
            stamp=(file_stat.st_size, file_stat.st_mtime_ns),
            xxh3=recorded_xxh3(side_file.path, root, manifest or NO_MANIFEST),
        )
        files.append(file)
    return tuple(files)


def copied_small_files(source: Source, path_prefix: str = "") -> tuple[SmallFile, ...]:
    """Return the small files of a source, to copy or write them. See `copied_files`."""
    copies = copied_files(
        source.small_files, source.root, manifest=source.manifest, path_prefix=path_prefix
    )
    made = tuple(replace(file, path=path_prefix + file.path) for file in source.made_files.files)
    return *copies, *made


def settings_files(
    config: HFConfig, *, extra_files: Iterable[SmallFile], path_prefix: str = ""
) -> tuple[SmallFile, ...]:
    """Return config.json and the extra files."""
    return SmallFile(path_prefix + CONFIG, json_bytes(config)), *extra_files


def config_files(source: Source, config: HFConfig, path_prefix: str = "") -> tuple[SmallFile, ...]:
    """Return the config.json of an output.

    The file of the source is copied byte for byte if the output has the same config, for a verbatim output and for the
    whole config of a multimodal model.

    Args:
        source: The opened source.
        config: Content of the output's config.json. Of a multimodal model, its text config.
        path_prefix: Put before the name in the output.
    """
    path = source.config_path
    if source.wrapper is not None:
        wrapper = source.wrapper
        whole_config = with_text_config(wrapper.config, wrapper.text_config, config)
        return _config_file(
            source, whole_config, path_prefix, is_equal=whole_config == wrapper.config
        )
    if source.family.is_verbatim and path is None and not config:
        return ()
    is_equal = source.family.is_verbatim and config == source.config
    return _config_file(source, config, path_prefix, is_equal=is_equal)


def _config_file(
    source: Source, config: HFConfig, path_prefix: str, *, is_equal: bool
) -> tuple[SmallFile, ...]:
    """Return a config.json: a copy of the source's file if the content is equal and the file exists."""
    path = source.config_path
    if path is None or not is_equal:
        return (SmallFile(path_prefix + CONFIG, json_bytes(config)),)
    (copy,) = copied_files([SideFile.at_top(path)], source.root, manifest=source.manifest)
    return (replace(copy, path=path_prefix + CONFIG),)


def json_bytes(content: object) -> bytes:
    """Return JSON in the format of a model's settings files."""
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def output_config(
    source: Source, vocabulary: Vocabulary, is_tied: bool, dtype: str | None = None
) -> JsonObject:
    """Return the source's config with the vocabulary, weight tying and, if not None, the dtype of the output."""
    config = dict(source.config)
    if vocabulary != NO_VOCABULARY:
        config = with_vocabulary(source.config, vocabulary)
    if source.family.is_verbatim and (source.config_path is None or dtype is None):
        return config
    # Transformers 5 and 4.
    dtype_keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    config |= dict.fromkeys(dtype_keys, dtype) if dtype else {}
    if is_tied or not source.family.is_tied(config, (source.family.tying.head_tensor,)):
        return config
    # The output has its own head, but its config says that head and embedding are tied.
    # transformers would then compute the logits with the embedding instead.
    return config | {"tie_word_embeddings": False, **source.family.tying.untied_fields(config)}
