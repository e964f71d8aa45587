"""The tensors of a source with one row per token: those of the model, of its training state and of other files.

Multi-token prediction may have an embedding and a head of its own. A quantised model has the names of its files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from prepcli.algebra.axis_map import ParsedAxisMap, bind_row
from prepcli.core.errors import Command, Option, Text, text, usage_error
from prepcli.core.formatting import join_names
from prepcli.core.json_values import quote_name
from prepcli.models.parameters import Family, parameter_rows
from prepcli.models.registry import family_of
from prepcli.models.text_part import text_section
from prepcli.models.truncation import is_prediction_vocabulary, prediction_names
from prepcli.planning.tensors import FLOAT_DTYPES, split_name
from prepcli.sources.detect import quantization_file
from prepcli.sources.model_family import verbatim_error
from prepcli.sources.source import Source, SourceTensor, match_source_tensors, stored_rows
from prepcli.sources.tensor_match import (
    LAYER_VOCAB_ATOM,
    VOCAB_ATOM,
    MatchOptions,
    TensorMatch,
    Vocabulary,
    detect_names,
    layer_vocab_tensors,
    read_vocabulary,
    vocab_tensors,
)

# Tensors in a message.
MAX_NAMES = 3


@dataclass(frozen=True, slots=True)
class VocabularyTensors:
    """The vocabulary of a source.

    Attributes:
        vocabulary: Its true and its stored size.
        rows: Rows of the parameters of the source.
        match: The match of the tensors of the source.
        names: Names of the tensors with one row per token.
        layer_names: Names of the embeddings per layer.
    """

    vocabulary: Vocabulary
    rows: Mapping[str, ParsedAxisMap]
    match: TensorMatch
    names: frozenset[str]
    layer_names: frozenset[str]


def find_vocabulary(
    source: Source, options: MatchOptions, true_size: int | None = None
) -> VocabularyTensors:
    """Return the vocabulary of a source.

    Args:
        source: The opened source. A quantised one may have the verbatim family.
        options: Options of the match.
        true_size: The true size given by the user.

    Raises:
        UsageError: The model is quantised together with its embedding or head, or has towers too.
        PrepError: Tensors do not match the family, or no family has the model type.
    """
    rows = stored_rows(source)
    match = match_source_tensors(source, rows, options)
    if not source.family.is_verbatim:
        vocabulary = source.vocabulary(true_size)
        return VocabularyTensors(
            vocabulary,
            rows,
            match,
            vocabulary_names(source, match, vocabulary),
            frozenset(layer_vocab_tensors(match)),
        )
    if not quantization_file(source.config, source.root):
        raise verbatim_error(source.display_name)
    if text_section(source.config) is not None:
        what = f"{source.display_name} is a quantised multimodal model, which is not supported"
        raise usage_error(what, "the names of its text part are unknown", _decode_hint(source))
    # A verbatim source has the sizes of its config.
    sizes = family_of(source.config).sizes(source.config)
    vocabulary = read_vocabulary(source.config, sizes["vocab"], true_size=true_size)
    names = frozenset(_stored_names(source, VOCAB_ATOM))
    for tensor in source.tensors:
        if tensor.name not in names:
            continue
        if tensor.dtype not in FLOAT_DTYPES or tensor.shape[:1] != (vocabulary.stored_size,):
            what = f"the vocabulary of {source.display_name} is quantised"
            why = f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}"
            raise usage_error(what, why, _decode_hint(source))
    names |= _prediction_copies(source, vocabulary)
    layer_names = frozenset(_stored_names(source, LAYER_VOCAB_ATOM))
    return VocabularyTensors(vocabulary, rows, match, names, layer_names)


def vocabulary_names(source: Source, match: TensorMatch, vocabulary: Vocabulary) -> frozenset[str]:
    """Return the names of the tensors with one row per token.

    They are those of the parameters, of their training state, and of multi-token prediction.
    """
    names = vocab_tensors(match)
    for tensor in source.state_tensors:
        slot, name = split_name(tensor.name)
        if slot and name in names:
            names.add(tensor.name)
    if source.tower_tensors:
        names |= _prediction_copies(source, vocabulary)
    return frozenset(names)


def prediction_vocabulary(source: Source) -> Iterator[SourceTensor]:
    """Yield the tensors of embeddings and heads that multi-token prediction has of its own."""
    family, tensors = _tensors_by_name(source)
    for name in sorted(prediction_names(family, source.config, tensors)):
        if is_prediction_vocabulary(name):
            yield tensors[name]


def check_prediction_rows(
    source: Source, resized: Collection[str], rows: int, *, has_new_tokens: bool
) -> None:
    """Raise UsageError if multi-token prediction does not get the vocabulary rows of an output.

    Args:
        source: The opened source.
        resized: Names of the tensors with one row per token.
        rows: Their rows in the output.
        has_new_tokens: Whether some of these rows are those of added tokens.
    """
    if not source.tower_tensors and not source.family.is_verbatim:
        return
    display_names = source.display_names()
    unfit: list[str] = []
    family, tensors = _tensors_by_name(source)
    prediction = prediction_names(family, source.config, tensors)
    embedding = tensors.get(family.tying.embedding_tensor)
    # A projection of a layer may have as many rows as the vocabulary.
    layer_names = {_name_in_layer(name) for name in tensors.keys() - prediction}
    for name in sorted(prediction):
        tensor = tensors[name]
        has_shape = embedding is not None and tensor.shape == embedding.shape
        is_unknown = has_shape and _name_in_layer(name) not in layer_names
        if is_unknown or is_prediction_vocabulary(name):
            is_kept = tensor.name not in resized
            if is_kept and (has_new_tokens or tensor.shape[:1] != (rows,)):
                name = quote_name(display_names[tensor.name])
                unfit.append(f"{name} is {tensor.dtype} {list(tensor.shape)}")
    if not unfit:
        return
    model = source.display_name
    what = f"the multi-token prediction of {model} does not fit {rows:,} vocabulary rows"
    hint = _decode_hint(source)
    if not source.family.is_verbatim:
        command = Command("export", model, Option("text_only", True))
        hint = text("{} leaves it out", command)
    raise usage_error(what, join_names(unfit, max_names=MAX_NAMES), hint)


def _prediction_copies(source: Source, vocabulary: Vocabulary) -> set[str]:
    """Return the names of the embeddings and heads of multi-token prediction with one row per token."""
    names: set[str] = set()
    for tensor in prediction_vocabulary(source):
        # Versions of prep up to 0.1.0 padded the model alone. A run that pads its start model has them from that model.
        is_row_per_token = tensor.shape and (
            vocabulary.true_size <= tensor.shape[0] <= vocabulary.stored_size
        )
        if is_row_per_token and tensor.dtype in FLOAT_DTYPES:
            names.add(tensor.name)
    return names


def _name_in_layer(name: str) -> str:
    """Return a tensor's name after the number of its layer.

    >>> _name_in_layer("layers.3.mlp.experts.0.up_proj.weight")
    'mlp.experts.0.up_proj.weight'
    """
    return re.sub(r"^.*?\.[0-9]+\.", "", name)


def _tensors_by_name(source: Source) -> tuple[Family, dict[str, SourceTensor]]:
    """Return the family of a source, and its parameters and multi-token prediction by bare name."""
    if source.family.is_verbatim:
        family = family_of(source.config)
        stored = {tensor.name for tensor in source.tensors}
        names = detect_names(family, source.config, full_names=stored)
        return family, {names.bare_name(tensor.name): tensor for tensor in source.tensors}
    tensors: dict[str, SourceTensor] = {}
    for tensor in source.tower_tensors:
        tensors[source.names.bare_name(source.file_name(tensor))] = tensor
    tensors |= {tensor.name: tensor for tensor in source.tensors}
    return source.family, tensors


def _stored_names(source: Source, atom: str) -> Iterator[str]:
    """Yield the stored tensors of a family with the size `atom` in their first dim, and their duplicates."""
    family, tensors = _tensors_by_name(source)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    rows = parameter_rows(family, source.config, tensors=shapes)
    sizes = family.sizes(source.config)
    expected: set[str] = set()
    for row in rows.values():
        axis_map = bind_row(row, sizes)
        factors = [factor.atom for dim in axis_map.source_dims[:1] for factor in dim.factors]
        if atom in factors:
            expected.update(name for name, _ in axis_map.tensors())
    expected.update(name for name, other in family.duplicates.items() if other in expected)
    if atom == VOCAB_ATOM and family.is_tied(source.config, tensors.keys()):
        _check_is_stored(source, {family.tying.embedding_tensor} - tensors.keys())
    elif atom == VOCAB_ATOM:
        _check_is_stored(source, expected - tensors.keys() - family.duplicates.keys())
    yield from (tensors[name].name for name in sorted(expected & tensors.keys()))


def _check_is_stored(source: Source, missing: Collection[str]) -> None:
    """Raise UsageError for tensors of the vocabulary without a float tensor of their name."""
    if missing:
        what = f"the vocabulary of {source.display_name} is quantised"
        why = f"it has no {join_names(sorted(missing))}"
        raise usage_error(what, why, _decode_hint(source))


def _decode_hint(source: Source) -> Text:
    command = Command("save-init", source.display_name, Option("quantized", "dequantize"))
    return text("{} decodes it, and {} writes a folder", command, Command("export"))
