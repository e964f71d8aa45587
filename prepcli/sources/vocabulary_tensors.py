"""The tensors of a source with one row per token, also of a quantised model with the names of its files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from prepcli.console.lists import join_names
from prepcli.errors import Command, Option, Text, text, usage_error
from prepcli.planning.tensor_match import (
    LAYER_VOCAB_ATOM,
    VOCAB_ATOM,
    MatchOptions,
    TensorMatch,
    detect_names,
    layer_vocab_tensors,
    vocab_tensors,
)
from prepcli.planning.tensors import FLOAT_DTYPES
from prepcli.planning.vocabulary import Vocabulary, read_vocabulary
from prepcli.sources.dequantized import quantization_file
from prepcli.sources.model_family import verbatim_error
from prepcli.sources.source import Source, match_source_tensors, stored_axis_maps
from trainer.models.axis_map import bind_row
from trainer.models.parameters import parameter_rows
from trainer.models.registry import family_of
from trainer.models.text_part import text_section


@dataclass(frozen=True, slots=True)
class VocabularyTensors:
    """The vocabulary of a source.

    Attributes:
        vocabulary: Its true and its stored size.
        match: The match of the tensors of the source.
        names: Names of the tensors with one row per token.
        layer_names: Names of the embeddings per layer.
    """

    vocabulary: Vocabulary
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
    match = match_source_tensors(source, stored_axis_maps(source), options)
    if not source.family.is_verbatim:
        return VocabularyTensors(
            source.vocabulary(true_size),
            match,
            frozenset(vocab_tensors(match)),
            frozenset(layer_vocab_tensors(match)),
        )
    if not quantization_file(source.config, source.root):
        raise verbatim_error(source.display_name)
    if text_section(source.config) is not None:
        what = f"{source.display_name} is a quantised multimodal model, which is not supported"
        raise usage_error(what, "the names of its text part are unknown", _decode_hint(source))
    vocabulary = stored_vocabulary(source, true_size)
    names = frozenset(_stored_names(source, VOCAB_ATOM))
    _check_rows(source, names, vocabulary)
    layer_names = frozenset(_stored_names(source, LAYER_VOCAB_ATOM))
    return VocabularyTensors(vocabulary, match, names, layer_names)


def stored_vocabulary(source: Source, true_size: int | None = None) -> Vocabulary:
    """Return the vocabulary of a source. A verbatim one has the sizes of its config.

    Raises:
        PrepError: No family has the model type of the config.
    """
    if not source.family.is_verbatim:
        return source.vocabulary(true_size)
    sizes = family_of(source.config).sizes(source.config)
    return read_vocabulary(source.config, sizes["vocab"], true_size=true_size)


def _stored_names(source: Source, atom: str) -> Iterator[str]:
    """Yield the stored tensors of a family with the size `atom` in their first dim, and their duplicates."""
    family = family_of(source.config)
    stored = {tensor.name for tensor in source.tensors}
    names = detect_names(family, source.config, full_names=stored)
    by_bare_name = {names.bare_name(name): name for name in stored}
    shapes = {names.bare_name(tensor.name): tensor.shape for tensor in source.tensors}
    rows = parameter_rows(family, source.config, tensors=shapes)
    sizes = family.sizes(source.config)
    expected: set[str] = set()
    for row in rows.values():
        axis_map = bind_row(row, sizes)
        factors = [factor.atom for dim in axis_map.source_dims[:1] for factor in dim.factors]
        if atom in factors:
            expected.update(name for name, _ in axis_map.tensors())
    expected.update(name for name, other in family.duplicates.items() if other in expected)
    if atom == VOCAB_ATOM and family.is_tied(source.config, by_bare_name.keys()):
        _check_is_stored(source, {family.tying.embedding_tensor} - by_bare_name.keys())
    elif atom == VOCAB_ATOM:
        _check_is_stored(source, expected - by_bare_name.keys() - family.duplicates.keys())
    yield from (by_bare_name[name] for name in sorted(expected & by_bare_name.keys()))


def _check_is_stored(source: Source, missing: Collection[str]) -> None:
    """Raise UsageError for tensors of the vocabulary without a float tensor of their name."""
    if missing:
        what = f"the vocabulary of {source.display_name} is quantised"
        why = f"it has no {join_names(sorted(missing))}"
        raise usage_error(what, why, _decode_hint(source))


def _check_rows(source: Source, names: Collection[str], vocabulary: Vocabulary) -> None:
    """Raise UsageError unless the tensors of the vocabulary are floats with one row per token."""
    for tensor in source.tensors:
        if tensor.name not in names:
            continue
        if tensor.dtype not in FLOAT_DTYPES or tensor.shape[:1] != (vocabulary.stored_size,):
            what = f"the vocabulary of {source.display_name} is quantised"
            why = f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}"
            raise usage_error(what, why, _decode_hint(source))


def _decode_hint(source: Source) -> Text:
    command = Command("save-init", source.display_name, Option("quantized", "dequantize"))
    return text("{} decodes it, and {} writes a folder", command, Command("export"))
