"""Compare the configs and tokenizers of two checkpoints by their meaning, and the other small files by digests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from prepcli.commands.operations.verification_results import SettingDifference
from prepcli.core.errors import PrepError
from prepcli.core.json_values import HFConfig, JsonObject, JsonValue, load_json
from prepcli.engine.digest import record_digest_of_pieces
from prepcli.formats.manifest import NO_MANIFEST, is_settings_file, record_file
from prepcli.formats.safetensors import ADAPTER_CONFIG, INDEX_FILE
from prepcli.formats.tokenizer_files import (
    MAX_TOKENIZER_NBYTES,
    SENTENCEPIECE_SUFFIX,
    SETTINGS_FILE,
    TOKENIZER_FILE,
    VOCABULARY_FILES,
)
from prepcli.formats.torch_dcp import METADATA_FILE
from prepcli.models.architecture import canonical_activation
from prepcli.models.parameters import Family
from prepcli.models.text_part import SHARED_FIELDS, TIED_FIELD, text_section
from prepcli.models.truncation import EARLIER_RULES, PREDICTION_FIELDS
from prepcli.models.verbatim import verbatim_family
from prepcli.planning.manifest_fields import Manifest
from prepcli.sources.generation_config import GENERATION_CONFIG_FILE
from prepcli.sources.model_family import TEXT_ONLY_RULE
from prepcli.sources.openers.tensor_files import ADAPTER_FAMILY
from prepcli.sources.references import CONFIG
from prepcli.sources.side_files import TRAINER_STATE_FILE
from prepcli.sources.source import HF_FOLDER, SCHEDULER_FILE, Source
from prepcli.sources.tensor_match import DROP_RULE
from prepcli.stores.files import read_small_file
from prepcli.stores.paths import fetch_copies

CONFIG_KIND = "config"
TOKENIZER = "tokenizer"
GENERATION = "generation_config"
# Keys that prep changes and records, or that say nothing about the model. Rows, dtypes and heads are compared as
# tensors.
IGNORED_KEYS = frozenset(
    {
        *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"),
        *("vocab_size", "true_vocab_size", "quantization_config", "_attn_implementation"),
        *("_commit_hash", "_from_model_config", TIED_FIELD),
    }
)
# Ends of keys without a default that prep knows.
TOKEN_ID_SUFFIXES = ("_token_id", "_token_ids")
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_KEY = "chat_template"
# Keys of tokenizer_config.json with the tokens that a text gets.
TOKEN_KEYS = ("add_bos_token", "add_eos_token", "additional_special_tokens", TEMPLATE_KEY)
TOKEN_SUFFIX = "_token"
# Parts of a tokenizer.json that change no id of a text, or that are compared on their own.
UNCOMPARED_PARTS = frozenset({"version", "truncation", "padding", "added_tokens", "model"})
LISTED_PARTS = ("vocab", "merges")
# Files with other content in each output. The config is compared by its keys. The files of a training state are not
# part of a model.
MADE_FILES = (
    CONFIG,
    INDEX_FILE,
    ADAPTER_CONFIG,
    METADATA_FILE,
    TRAINER_STATE_FILE,
    SCHEDULER_FILE,
)

# A value that no field of a config has.
_PROBE = "\0"

Values = Mapping[str, JsonValue]


def setting_differences(source: Source, other: Source) -> Iterator[SettingDifference]:
    """Yield the keys of the configs, and the facts of the tokenizers, in which two checkpoints differ.

    A key is no difference if the model is the same with either value, e.g. a default that only one config states.
    """
    if ADAPTER_FAMILY in (source.family, other.family):
        # An adapter has the config of its base only if prep wrote it.
        return
    yield from _config_differences(source, other)
    files, other_files = _Files(source), _Files(other)
    yield from _generation_differences(files, other_files)
    yield from _tokenizer_differences(files, other_files)


def _config_differences(source: Source, other: Source) -> Iterator[SettingDifference]:
    pair = (source, other)
    config = _with_plain_rope(compared_config(source, other))
    other_config = _with_plain_rope(compared_config(other, source))
    ignored = {*IGNORED_KEYS, *source.family.tying.untied_fields(source.config)}
    rules: set[object] = set()
    for one in pair:
        rules.update(entry.get("rule") for entry in (one.manifest or NO_MANIFEST).dropped)
        rules.update(tensor.rule for tensor in one.dropped)
    has_verbatim = any(one.family.is_verbatim for one in pair)
    # A verbatim output has the config of its source, whatever `--drop` removed.
    keeps_fields = not EARLIER_RULES.isdisjoint(rules) or (has_verbatim and DROP_RULE in rules)
    if TEXT_ONLY_RULE in rules or keeps_fields:
        ignored.update(PREDICTION_FIELDS)
    has_multimodal = any(one.is_multimodal for one in pair)
    family = verbatim_family({}) if has_verbatim and has_multimodal else source.family
    is_same = _same_model(family, config, other_config)
    yield from _differing_keys(CONFIG_KIND, config, other_config, ignored, is_same)
    if source.wrapper is None or other.wrapper is None or not source.is_multimodal:
        return
    parts = [_without_text_part(one.wrapper.config) for one in (source, other) if one.wrapper]
    yield from _differing_keys(CONFIG_KIND, parts[0], parts[1], IGNORED_KEYS)


def compared_config(source: Source, other: Source) -> HFConfig:
    """Return the config of a checkpoint to compare with the one of another.

    A verbatim checkpoint has the towers of a multimodal model in one tree with the text part, and the whole config. An
    adapter has only the config of its base, in its manifest.
    """
    if source.wrapper is not None and source.is_multimodal and other.family.is_verbatim:
        return source.wrapper.config
    if source.family is ADAPTER_FAMILY and source.manifest is not None:
        return source.manifest.config
    return source.config


def _without_text_part(config: HFConfig) -> JsonObject:
    """Return the config of a multimodal model without the fields of its text part."""
    section = text_section(config)
    if section:
        text_fields = {section, *SHARED_FIELDS}
        return {key: value for key, value in config.items() if key not in text_fields}
    return {key: value for key, value in config.items() if key.endswith("_config")}


def _with_plain_rope(config: HFConfig) -> JsonObject:
    """Return a config with the rotary embedding as transformers 4 writes it.

    >>> _with_plain_rope({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    {'rope_theta': 10000.0}
    """
    plain: JsonObject = {key: value for key, value in config.items() if value is not None}
    rope = plain.get("rope_parameters")
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        return plain
    del plain["rope_parameters"]
    scaling: JsonObject = {key: value for key, value in rope.items() if value is not None}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in scaling:
            plain[key] = scaling.pop(key)
    if scaling.get("rope_type") == "default":
        del scaling["rope_type"]
    if scaling:
        plain["rope_scaling"] = scaling
    return plain


def _same_model(
    family: Family, config: HFConfig, other_config: HFConfig
) -> Callable[[str], bool | None]:
    """Return a function from a key to whether both models are the same with either value.

    It returns None if the key has no effect on the computation, or if prep cannot compute with the model.
    """

    def facts(values: HFConfig) -> object:
        try:
            arch = family.arch_config(values)
            sizes = family.sizes(values)
        except PrepError as error:
            return error.why
        return replace(arch, activation=canonical_activation(arch.activation)), sizes

    def is_same(key: str) -> bool | None:
        effects: list[bool] = []
        for values, others in ((config, other_config), (other_config, config)):
            known = facts(values)
            swapped = {name: value for name, value in values.items() if name != key}
            if key in others:
                swapped[key] = others[key]
            if facts(swapped) != known:
                return False
            effects.append(facts({**values, key: _PROBE}) != known)
        return True if any(effects) else None

    if family.is_verbatim:
        return lambda key: None
    return is_same


def _differing_keys(
    kind: str,
    values: Values,
    others: Values,
    ignored: Collection[str],
    is_same: Callable[[str], bool | None] | None = None,
) -> Iterator[SettingDifference]:
    """Yield the keys with other values. Without `is_same`, a key in one of them alone is a difference."""
    for key in sorted({*values, *others} - {*ignored}):
        value, other = values.get(key), others.get(key)
        if value == other:
            continue
        same = is_same(key) if is_same else None
        # A default that one config states, of a key without an effect, e.g. `initializer_range`.
        is_default = same is None and is_same is not None and (value is None or other is None)
        if same or (is_default and not key.endswith(TOKEN_ID_SUFFIXES)):
            continue
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            for part in _differing_keys(kind, value, other, ignored):
                yield SettingDifference(
                    kind=kind, key=f"{key}.{part['key']}", a=part["a"], b=part["b"]
                )
        else:
            yield SettingDifference(kind=kind, key=key, a=value, b=other)


class _Files:
    """The small files of a checkpoint, by name. Files in a store are fetched at once, several at a time.

    Attributes:
        names: Names of the files.
    """

    def __init__(self, source: Source) -> None:
        """List the files of a checkpoint, also those with the content of metadata."""
        self._paths = {file.name: file.path for file in source.side_files}
        fetch_copies(self._paths.values())
        self._made = {Path(file.path).name: file for file in source.made_files.files}
        self.names = {*self._paths, *self._made}

    def digest(self, name: str) -> str | bytes | None:
        """Return what is equal for files of equal bytes. None if the file does not exist."""
        if name in self._paths:
            return record_file(self._paths[name]).get("xxh3")
        return self.read(name)

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file, or None if it does not exist."""
        if name in self._paths:
            return read_small_file(self._paths[name], MAX_TOKENIZER_NBYTES)
        return self._made[name].read_content() if name in self._made else None

    def read_object(self, name: str) -> JsonObject | None:
        """Return the JSON object in a file. None if the file does not exist, or has no JSON object."""
        data = self.read(name)
        try:
            document = None if data is None else load_json(data)
        except ValueError:
            return None
        return document if isinstance(document, dict) else None


def _is_equal_file(name: str, files: _Files, others: _Files) -> bool:
    """Return whether both checkpoints have the same bytes in a file, or do not have it."""
    if name not in files.names and name not in others.names:
        return True
    if name in files.names and name in others.names:
        digest, other = files.digest(name), others.digest(name)
        if type(digest) is type(other):
            return digest == other
        return files.read(name) == others.read(name)
    return False


def _generation_differences(files: _Files, others: _Files) -> Iterator[SettingDifference]:
    if _is_equal_file(GENERATION_CONFIG_FILE, files, others):
        return
    values = files.read_object(GENERATION_CONFIG_FILE)
    other_values = others.read_object(GENERATION_CONFIG_FILE)
    # transformers writes the file with the values of config.json, so that a model without it is the same.
    if values is not None and other_values is not None:
        yield from _differing_keys(GENERATION, values, other_values, IGNORED_KEYS)


def _tokenizer_differences(files: _Files, others: _Files) -> Iterator[SettingDifference]:
    if not _is_equal_file(TOKENIZER_FILE, files, others):
        documents = files.read_object(TOKENIZER_FILE), others.read_object(TOKENIZER_FILE)
        if documents[0] is None or documents[1] is None:
            yield _presence(TOKENIZER_FILE, files, others)
        else:
            yield from _tokenizer_facts(documents[0], documents[1])
    for name in sorted(files.names | others.names):
        # Without its own tokenizer.json, a checkpoint has these files in place of it.
        is_vocabulary = name in VOCABULARY_FILES or name.endswith(SENTENCEPIECE_SUFFIX)
        has_both = name in files.names and name in others.names
        if is_vocabulary and has_both and not _is_equal_file(name, files, others):
            yield _presence(name, files, others)
    tokens, other_tokens = _special_tokens(files), _special_tokens(others)
    if tokens is not None and other_tokens is not None:
        yield from _differing_keys(TOKENIZER, tokens, other_tokens, ())


def _presence(name: str, files: _Files, others: _Files) -> SettingDifference:
    """Return the difference of two files without facts in common."""
    states = ("other content" if name in one.names else None for one in (files, others))
    first, second = states
    return SettingDifference(kind=TOKENIZER, key=name, a=first, b=second)


def _special_tokens(files: _Files) -> JsonObject | None:
    """Return the special tokens, the chat template, and whether the tokenizer adds tokens. None without settings."""
    settings = files.read_object(SETTINGS_FILE)
    if settings is None:
        return None
    # transformers 5 writes no special_tokens_map.json.
    merged = {**(files.read_object(SPECIAL_TOKENS_FILE) or {}), **settings}
    tokens: JsonObject = {}
    for key, value in merged.items():
        if value is None or not (key in TOKEN_KEYS or key.endswith(TOKEN_SUFFIX)):
            continue
        # A token is its text, or an object with the text and its flags.
        tokens[key] = value.get("content") if isinstance(value, dict) else value
    template = files.read(TEMPLATE_FILE)
    if template is not None:
        tokens[TEMPLATE_KEY] = template.decode(errors="replace")
    return tokens


def _tokenizer_facts(document: JsonObject, other: JsonObject) -> Iterator[SettingDifference]:
    """Yield the differences of two files tokenizer.json: vocabulary, merges, added tokens and the other parts."""
    models = [
        one.get("model") if isinstance(one.get("model"), dict) else {} for one in (document, other)
    ]
    model, other_model = (one if isinstance(one, dict) else {} for one in models)
    yield from _first_difference("token", _vocabulary(model), _vocabulary(other_model))
    yield from _first_difference("merge", _merges(model), _merges(other_model))
    yield from _first_difference("added token", _added_tokens(document), _added_tokens(other))
    parts, other_parts = (
        {key: value for key, value in one.items() if key not in UNCOMPARED_PARTS}
        for one in (document, other)
    )
    yield from _differing_keys(TOKENIZER, parts, other_parts, ())
    yield from _differing_keys(TOKENIZER, {"model": model}, {"model": other_model}, LISTED_PARTS)


def _vocabulary(model: JsonObject) -> dict[int, JsonValue]:
    """Return the tokens by id. Of Unigram, a token has its score."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        return {number: token for token, number in vocabulary.items() if isinstance(number, int)}
    return dict(enumerate(vocabulary)) if isinstance(vocabulary, list) else {}


def _merges(model: JsonObject) -> dict[int, JsonValue]:
    """Return the merges by rank. Early files have a text `a b`, later ones a list of two texts."""
    merges = model.get("merges")
    ranked: dict[int, JsonValue] = {}
    for rank, merge in enumerate(merges if isinstance(merges, list) else ()):
        ranked[rank] = [*merge.split(" ")] if isinstance(merge, str) else merge
    return ranked


def _added_tokens(document: JsonObject) -> dict[int, JsonValue]:
    """Return the text of the added tokens by id, with the special ones marked."""
    added = document.get("added_tokens")
    tokens: dict[int, JsonValue] = {}
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and isinstance(number := entry.get("id"), int):
            text = entry.get("content")
            tokens[number] = f"{text} (special)" if entry.get("special") else text
    return tokens


def _first_difference(
    title: str, entries: Mapping[int, JsonValue], others: Mapping[int, JsonValue]
) -> Iterator[SettingDifference]:
    """Yield the first different entry of two lists, with the number of the other ones."""
    numbers = [n for n in {*entries, *others} if entries.get(n) != others.get(n)]
    if not numbers:
        return
    first = min(numbers)
    rest = f" and {len(numbers) - 1:,} more" if len(numbers) > 1 else ""
    yield SettingDifference(
        kind=TOKENIZER, key=f"{title} {first}{rest}", a=entries.get(first), b=others.get(first)
    )


# --- Digests of all small files


def file_digests(source: Source, copied: Collection[str] = ()) -> dict[str, str]:
    """Return the XXH3-128 of the small files of a checkpoint, by name. `--copy` copies further ones."""
    digests = recorded_file_digests(source.manifest or NO_MANIFEST)
    if not digests:
        for file in (*source.side_files, *source.left_files):
            if file in source.side_files or file.name in copied:
                digests[file.name] = record_file(file.path).get("xxh3", "")
        # A GGUF file has its tokenizer in the metadata.
        for made_file in source.made_files.files:
            digests[Path(made_file.path).name] = record_digest_of_pieces([made_file.read_content()])
    return {name: digest for name, digest in digests.items() if name not in MADE_FILES}


def recorded_file_digests(manifest: Manifest) -> dict[str, str]:
    """Return the recorded XXH3-128 of all settings files of an output, by name."""
    digests: dict[str, str] = {}
    for path, record in manifest.files.items():
        if "xxh3" in record and is_settings_file(path):
            name = f"/{path}".rpartition(f"/{HF_FOLDER}/")[2].removeprefix("/")
            digests[name] = record["xxh3"]
    return digests
