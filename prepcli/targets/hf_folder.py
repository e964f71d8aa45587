"""The files of a model besides its weights: config.json, and copies of its tokenizer and other small files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from prepcli.core.errors import Key, text, usage_error
from prepcli.core.json_values import HFConfig, JsonObject
from prepcli.formats.manifest import NO_MANIFEST, read_manifest, recorded_xxh3
from prepcli.formats.tokenizer_files import TOKENIZER_FILE
from prepcli.models.text_part import with_text_config
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import SmallFile
from prepcli.sources.generation_config import GENERATION_CONFIG_FILE
from prepcli.sources.references import CONFIG
from prepcli.sources.side_files import SideFile, resolve_small_file
from prepcli.sources.source import HF_FOLDER, Source
from prepcli.sources.tensor_match import NO_VOCABULARY, Vocabulary, with_vocabulary
from prepcli.stores.files import io_error
from prepcli.stores.paths import AnyPath, fetch_copies

SENTENCEPIECE_TOKENIZER = "tokenizer.model"
# In order of precedence: the first one in a folder is loaded.
SINGLE_FILES = (
    TOKENIZER_FILE,
    SENTENCEPIECE_TOKENIZER,
    "spiece.model",
)
TOKENIZERS = (*SINGLE_FILES, "vocab.json", "merges.txt", "vocab.txt")
# Other files of a folder that belong to its tokenizer.
TOKENIZER_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
ALL_TOKENIZER_FILES = (*TOKENIZERS, *TOKENIZER_SETTINGS)
PATH_PREFIX = f"{HF_FOLDER}/"


def copied_files(
    side_files: Iterable[SideFile],
    root: AnyPath,
    *,
    manifest: Manifest | None = None,
    path_prefix: str = "",
) -> tuple[SmallFile, ...]:
    """Return files to copy unchanged from a checkpoint.

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
        source.side_files, source.root, manifest=source.manifest, path_prefix=path_prefix
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
    """
    path = source.config_path
    if source.wrapper is not None:
        wrapper = source.wrapper
        config = with_text_config(wrapper.config, wrapper.text_config, config)
        is_equal = config == wrapper.config
    elif source.family.is_verbatim and path is None and not config:
        return ()
    else:
        is_equal = source.family.is_verbatim and config == source.config
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


# --- Tokenizers of runs and adapters


def tokenizer_folder(tokenizer: str | None, config: str | None) -> Path:
    """Return the folder of a tokenizer. Without one, return the folder of a config.

    Raises:
        UsageError: There is no tokenizer.
    """
    if tokenizer is not None:
        return _folder_of(Path(tokenizer))
    if config is not None:
        folder = _folder_of(Path(config))
        if any((folder / name).is_file() for name in TOKENIZERS):
            return folder
    why = "a random start has no checkpoint with a tokenizer"
    raise usage_error(
        text("{} is missing", Key("data.tokenizer")),
        why,
        text("set {} to a tokenizer.json, or to a folder with one", Key("data.tokenizer")),
    )


def random_start_files(tokenizer: str | None, config: str | None) -> tuple[SmallFile, ...]:
    """Return the files of a random start: its tokenizer, and the generation_config.json beside it."""
    folder = tokenizer_folder(tokenizer, config)
    path = Path(tokenizer or folder)
    settings = _copied_files(folder, [GENERATION_CONFIG_FILE], path_prefix=PATH_PREFIX)
    return (*_tokenizer_files(path), *settings)


def with_tokenizer(files: tuple[SmallFile, ...], tokenizer: str | None) -> tuple[SmallFile, ...]:
    """Return the files of a checkpoint with another tokenizer.

    The files are unchanged without a tokenizer, or if it is equal to the checkpoint's tokenizer.

    Raises:
        PrepError: A file of the tokenizer cannot be read, or is a link that leaves its folder.
    """
    if tokenizer is None:
        return files
    named = _tokenizer_files(Path(tokenizer))
    # Only files that are loaded are compared. For example, vocab.json is not loaded if there is a tokenizer.json.
    present = _loaded_files(files)
    if all(
        path in present and _read_content(file) == _read_content(present[path])
        for path, file in _loaded_files(named).items()
    ):
        return files
    # Files that the new tokenizer lacks go too. A leftover added_tokens.json or chat template
    # of the old one would apply to the new vocabulary.
    replaced = {PATH_PREFIX + name for name in ALL_TOKENIZER_FILES}
    return (*(file for file in files if file.path not in replaced), *named)


def adapter_tokenizer(source: Source) -> tuple[SmallFile, ...]:
    """Return the tokenizer files of a training step, for the folder of its adapter."""
    return copied_files(
        [file for file in source.side_files if file.name in ALL_TOKENIZER_FILES],
        source.root,
        manifest=source.manifest,
    )


def prep_adapter_tokenizer(adapter: Path) -> tuple[SmallFile, ...]:
    """Return the tokenizer files of an adapter that prep wrote. Empty for other adapters."""
    # An adapter of PEFT may have the unchanged tokenizer of its base beside it. Only a manifest shows prep's own.
    manifest = read_manifest(adapter)
    if manifest is None or not any((adapter / name).is_file() for name in TOKENIZERS):
        return ()
    return _copied_files(adapter, ALL_TOKENIZER_FILES, manifest=manifest)


def _folder_of(path: Path) -> Path:
    """Return a folder itself, and the folder of a file."""
    if path.is_dir():
        return path
    return path.parent


def _tokenizer_files(path: Path) -> tuple[SmallFile, ...]:
    """Return the tokenizer and its settings. A tokenizer file with another name gets the usual name."""
    folder = _folder_of(path)
    if not path.is_file():
        return _copied_files(folder, ALL_TOKENIZER_FILES, path_prefix=PATH_PREFIX)
    # The user names this file, so that a link may leave the folder.
    real_path = path.resolve()
    (tokenizer,) = copied_files([SideFile.at_top(real_path)], real_path.parent)
    # Loaders find a tokenizer by its name: `my-bpe.model` becomes `tokenizer.model`, `my-bpe.json` `tokenizer.json`.
    name = (
        SENTENCEPIECE_TOKENIZER
        if path.suffix == Path(SENTENCEPIECE_TOKENIZER).suffix
        else TOKENIZER_FILE
    )
    settings = _copied_files(folder, TOKENIZER_SETTINGS, path_prefix=PATH_PREFIX)
    return (replace(tokenizer, path=PATH_PREFIX + name), *settings)


def _copied_files(
    folder: Path, names: Sequence[str], *, manifest: Manifest | None = None, path_prefix: str = ""
) -> tuple[SmallFile, ...]:
    """Return the files of a folder with some names, to copy unchanged."""
    paths = [folder / name for name in names if (folder / name).is_file()]
    files = map(SideFile.at_top, paths)
    return copied_files(files, folder, manifest=manifest, path_prefix=path_prefix)


def _loaded_files(files: Sequence[SmallFile]) -> dict[str, SmallFile]:
    """Return the used tokenizer files of a folder with these files, by path."""
    by_path = {file.path: file for file in files}
    single = [PATH_PREFIX + name for name in SINGLE_FILES if PATH_PREFIX + name in by_path]
    paths = single[:1] or [PATH_PREFIX + name for name in TOKENIZERS]
    paths += [PATH_PREFIX + name for name in TOKENIZER_SETTINGS]
    return {path: by_path[path] for path in paths if path in by_path}


def _read_content(file: SmallFile) -> bytes:
    path = Path(file.copied_from)
    try:
        return path.read_bytes()
    except OSError as error:
        raise io_error(path, error) from error
