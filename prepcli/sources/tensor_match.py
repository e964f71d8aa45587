"""Match the tensors of a source with the parameters of its family, and its vocabulary with its config.

Each tensor is used by at least one leaf, dropped by a named rule, or listed in an error. Names are bare here: they lack
the family's base prefix, as in the family's parameter table. Error messages show names as the source spells them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from prepcli.algebra.axis_map import AxisMap, ParsedAxisMap, bind_row
from prepcli.core.errors import (
    Command,
    Option,
    PrepError,
    invalid_config_error,
    join_texts,
    text,
    usage_error,
)
from prepcli.core.formatting import MAX_CHARS, count_text, join_names
from prepcli.core.json_values import HFConfig, JsonObject
from prepcli.models.parameters import (
    Family,
    StoredShapes,
    dropped_patterns,
    parameter_rows,
    read_size,
)
from prepcli.models.text_part import pattern_of_layers
from prepcli.planning.manifest_fields import MAX_ROWS
from prepcli.planning.plan import DroppedTensor, EqualityCheck

VOCAB_SIZE_KEY = "vocab_size"
TRUE_VOCAB_SIZE_KEY = "true_vocab_size"
VOCAB_ATOM = "vocab"
LAYER_VOCAB_ATOM = "layer_vocab"
# Rule of the tensors that a user drops, as plans and JSON objects name it.
DROP_RULE = "--drop"
# Far above any real model. The limit bounds the memory taken by an invalid config.
MAX_TENSORS_PER_ROW = 1 << 20
# Wrappers of torch.compile, of DistributedDataParallel and of FSDP. No model has such a name in front.
WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module"})
# Parts of a prefix that wrappers of a model gave to all names. A hostile name may have thousands.
MAX_WRAPPERS = 8


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Vocabulary sizes of a model.

    Attributes:
        true_size: Number of rows used by the tokenizer.
        stored_size: Number of rows in the tensors, including padding.
    """

    true_size: int
    stored_size: int

    def padded_size(self, multiple: int) -> int:
        """Return the smallest multiple of `multiple` not below the true size."""
        return -(-self.true_size // multiple) * multiple


# Of a model without a known embedding.
NO_VOCABULARY = Vocabulary(0, 0)


def read_vocabulary(
    config: HFConfig, default_size: int, *, true_size: int | None = None
) -> Vocabulary:
    """Read the vocabulary sizes from a config.

    `true_size` (`--true-vocab`) is the true size of a padded model.
    """
    stored_size = read_size(config, VOCAB_SIZE_KEY, default_size)
    if true_size is None:
        size = read_size(config, TRUE_VOCAB_SIZE_KEY, stored_size)
    else:
        size = true_size
    if 1 <= size <= stored_size:
        return Vocabulary(size, stored_size)
    why = f"the vocabulary has {stored_size} rows"
    if true_size is None:
        what = f"config.json's {TRUE_VOCAB_SIZE_KEY} {size} is out of range"
        raise PrepError(what, why, f"set it to a number from 1 to {stored_size}")
    what = text("{} is out of range", Option("true_vocab", size))
    raise usage_error(what, why, text("{} or less", Option("true_vocab", stored_size)))


def check_padded_size(rows: int, option: Option) -> int:
    """Return `rows` if a padded vocabulary may have this size."""
    if rows > MAX_ROWS:
        why = f"a vocabulary has at most {MAX_ROWS:,} rows"
        raise usage_error(text("{} is too large", option), why, "use a smaller value")
    return rows


def with_vocabulary(config: HFConfig, vocabulary: Vocabulary) -> JsonObject:
    """Return the config with the given vocabulary sizes. Without padding, the config has no true size."""
    updated = {**config, VOCAB_SIZE_KEY: vocabulary.stored_size}
    updated.pop(TRUE_VOCAB_SIZE_KEY, None)
    if vocabulary.true_size != vocabulary.stored_size:
        updated[TRUE_VOCAB_SIZE_KEY] = vocabulary.true_size
    return updated


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Dtype, shape and size of a source tensor."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorUse:
    """A leaf that takes all or part of a source tensor.

    Attributes:
        path: Path of the leaf in the tree of parameters, or in the tree of another library.
        parameter: Path of the axis-map row. It differs from `path` if the row describes one leaf per layer.
        axis_map: Maps the tensor's elements to the leaf's.
        stacked_indices: Name and index of each stacked axis in the tensor's name, e.g. (("layers", 3),).
    """

    path: str
    parameter: str
    axis_map: AxisMap
    stacked_indices: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The naming scheme of a source: whether its tensor names have the family's base prefix.

    Attributes:
        family: The model family.
        is_prefixed: Whether any name in the source has the base prefix.
        embedding_alias: Bare name of the tied head, or of a duplicate, stored instead of the embedding.
            It is read as the embedding. Empty if the source stores the embedding itself.
        unprefixed_names: Names that lack the prefix in a source where other names have it.
        missing_leaves: Leaf that the tree of another library lacks, by the bare name of a tensor in it.
        wrapper_prefix: Prefix of all names in the source, outside of the base prefix, e.g. `_orig_mod.`. Outputs do not
            have it.
    """

    family: Family
    is_prefixed: bool = True
    embedding_alias: str = ""
    unprefixed_names: frozenset[str] = frozenset()
    missing_leaves: Mapping[str, str] = field(default_factory=dict, compare=False)
    wrapper_prefix: str = ""

    def full_name(self, bare: str) -> str:
        """Return a tensor's name as prep writes it to files, with the base prefix if the source has it."""
        if not self.is_prefixed:
            return bare
        if bare in self.family.unprefixed:
            return self.family.head_prefix + bare
        return self.family.prefix + bare

    def stored_name(self, bare: str) -> str:
        """Return a tensor's name as the source spells it, without the prefix of a wrapper."""
        return bare if bare in self.unprefixed_names else self.full_name(bare)

    def display_name(self, bare: str) -> str:
        """Return a tensor's name for messages: as the source spells it, with unprintable characters escaped."""
        name = self.wrapper_prefix + self.stored_name(bare)
        return name if name.isprintable() else ascii(name)[1:-1]

    def bare_name(self, full: str) -> str:
        """Return a tensor's name without the base prefix, as the family's table spells it."""
        full = full.removeprefix(self.wrapper_prefix)
        name = full
        unprefixed = full.removeprefix(self.family.head_prefix)
        if self.is_prefixed and unprefixed in self.family.unprefixed:
            name = unprefixed
        elif self.is_prefixed:
            name = full.removeprefix(self.family.prefix)
        if name and name == self.embedding_alias:
            return self.family.tying.embedding_tensor
        return name


@dataclass(frozen=True, slots=True)
class TensorMatch:
    """The result of matching a source's tensors with a family's parameters.

    Attributes:
        uses: The leaves that take each tensor, by bare tensor name.
        dropped: Tensors that no leaf takes, each with the rule that drops it.
        checks: Tensors that must be equal to another one.
        is_tied: Whether the language-model head shares the embedding's weights.
    """

    uses: Mapping[str, tuple[TensorUse, ...]]
    dropped: tuple[DroppedTensor, ...]
    checks: tuple[EqualityCheck, ...]
    is_tied: bool


@dataclass(frozen=True, slots=True)
class MatchOptions:
    """User options for matching.

    Attributes:
        untie: Whether a stored head becomes a separate leaf although the config ties it
            (`--untie`).
        offers_verbatim: Whether the command has the option `--verbatim`, to suggest it.
        offers_drop: Whether the command has the option `--drop`, to suggest it.
    """

    untie: bool = False
    offers_verbatim: bool = False
    offers_drop: bool = False


DEFAULT_MATCH_OPTIONS = MatchOptions()


@dataclass(slots=True)
class _Mismatches:
    """Descriptions of the tensors that do not match the family, by kind."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)
    # Whether each tensor of the wrong shape has the expected dims in another order.
    has_other_order: bool = True
    # Whether a bias is unexpected whose weight the family uses.
    has_biases: bool = False


def find_wrapper_prefix(full_names: Collection[str], has_model: Callable[[str], bool]) -> str:
    """Return the prefix of all names from a wrapper of the model, e.g. `_orig_mod.module.`, or an empty string.

    Compiled models add `_orig_mod.`, data-parallel ones `module.`, and other modules the name of their attribute.

    Args:
        full_names: The tensor names in the source.
        has_model: Whether the names without a prefix are those of a model. The shortest such prefix is taken, without
            the known wrappers.
    """
    if not full_names:
        return ""
    # Parts of the first and the last name that are equal are equal in all names between them.
    prefix = ""
    for part, last_part in zip(min(full_names).split(".")[:-1], max(full_names).split(".")[:-1]):
        is_known = part in WRAPPERS and part == last_part
        if not is_known and has_model(prefix):
            return prefix
        prefix += f"{part}."
        if part != last_part or prefix.count(".") > MAX_WRAPPERS:
            return ""
    return prefix if has_model(prefix) else ""


def detect_names(family: Family, config: HFConfig, *, full_names: Collection[str]) -> TensorNames:
    """Return the naming scheme of a source."""
    wrapper_prefix = ""
    if not family.is_verbatim:
        wrapper_prefix = find_wrapper_prefix(
            full_names, partial(_has_embedding, family, full_names)
        )
    full_names = [name.removeprefix(wrapper_prefix) for name in full_names]
    bare_prefixed: set[str] = set()
    unprefixed: set[str] = set()
    for name in full_names:
        if not name.startswith(family.prefix):
            unprefixed.add(name)
        elif family.prefix:
            bare_prefixed.add(name.removeprefix(family.prefix))
    both = bare_prefixed & set(full_names)
    if both:
        raise PrepError(
            "a tensor is stored twice, with and without the base prefix",
            f"{family.prefix}{min(both)} and {min(both)}",
            "remove one of them",
        )
    embedding = family.tying.embedding_tensor
    head = family.tying.head_tensor
    bare_names = bare_prefixed | set(full_names)
    # A duplicate that is stored instead of the embedding is read as the embedding.
    alias = ""
    if embedding not in bare_names:
        aliases = [name for name, original in family.duplicates.items() if original == embedding]
        # safetensors stores tied tensors once, under either name.
        if head in bare_names and family.is_tied(config, bare_names):
            aliases.append(head)
        alias = next((name for name in aliases if name in bare_names), "")
    if not bare_prefixed:
        return TensorNames(family, False, alias, wrapper_prefix=wrapper_prefix)
    unprefixed_names = frozenset(unprefixed)
    return TensorNames(family, True, alias, unprefixed_names, wrapper_prefix=wrapper_prefix)


def _has_embedding(family: Family, full_names: Collection[str], wrapper_prefix: str) -> bool:
    """Return whether a family's embedding is among names in files, under its own name or that of a duplicate."""
    tying = family.tying
    for bare_name in (tying.embedding_tensor, tying.head_tensor, *family.duplicates):
        prefix = family.head_prefix if bare_name in family.unprefixed else family.prefix
        names = (wrapper_prefix + bare_name, wrapper_prefix + prefix + bare_name)
        if any(name in full_names for name in names):
            return True
    return False


def family_tensors(
    family: Family, config: HFConfig, stored: StoredShapes
) -> Iterator[tuple[str, AxisMap]]:
    """Yield the bare name and the axis map of each tensor of a config, except a tied head.

    The stored shapes decide between a row and its alternate. The config is untrusted: a row may have any number of
    tensors.
    """
    rows = parameter_rows(family, config, tensors=stored)
    if family.is_tied(config, stored.keys()):
        rows.pop(family.tying.head_leaf, None)
    sizes = family.sizes(config)
    for row in rows.values():
        axis_map = bind_row(row, sizes)
        for name, _ in axis_map.tensors():
            yield name, axis_map


def vocab_tensors(match: TensorMatch) -> set[str]:
    """Return the names of tensors with one row per token, including duplicates of the embedding."""
    return {check.name for check in match.checks} | _tensors_with_rows(match, VOCAB_ATOM)


def layer_vocab_tensors(match: TensorMatch) -> set[str]:
    """Return the names of embeddings per layer, with one row per token and a size of their own."""
    return _tensors_with_rows(match, LAYER_VOCAB_ATOM)


def _tensors_with_rows(match: TensorMatch, atom: str) -> set[str]:
    """Return the names of tensors with the size `atom` in their first dimension."""
    names: set[str] = set()
    for name, uses in match.uses.items():
        for use in uses:
            first_dims = use.axis_map.source_dims[:1]
            if any(factor.atom == atom for dim in first_dims for factor in dim.factors):
                names.add(name)
    return names


def match_tensors(
    names: TensorNames,
    config: HFConfig,
    *,
    sizes: Mapping[str, int],
    rows: Mapping[str, ParsedAxisMap],
    tensors: Mapping[str, TensorInfo],
    options: MatchOptions,
    source_name: str,
) -> TensorMatch:
    """Match a source's tensors with the axis-map rows of its family.

    Args:
        names: The source's naming scheme.
        config: The model's Hugging Face config.
        sizes: Extent of each atom.
        rows: Parsed axis-map rows of the family, by leaf path.
        tensors: The source's tensors, by bare name.
        options: The user's options.
        source_name: The source's name in errors.

    Returns:
        The uses of each tensor, the dropped tensors, and the checks to run while bytes are read.

    Raises:
        PrepError: Tensors are missing, unexpected or of the wrong shape (the error lists all of them), or duplicates
            differ in dtype or shape.
    """
    # Every tensor gets exactly one of three answers: it is used by rows, dropped by a named rule, or
    # listed in an error. A row may stack many tensors, and several rows may use parts of one tensor.
    family = names.family
    tying = family.tying
    # A tied head that is stored is dropped as a duplicate of the embedding, after a comparison of bytes.
    duplicates = {name: original for name, original in family.duplicates.items() if name in tensors}
    has_head = tying.head_tensor in tensors
    is_tied = family.is_tied(config, tensors) and not (has_head and options.untie)
    if is_tied:
        rows = {path: row for path, row in rows.items() if path != tying.head_leaf}
        if has_head:
            duplicates = {tying.head_tensor: tying.embedding_tensor} | duplicates
    uses = tensor_uses(rows, sizes)
    if family.is_verbatim:
        # A tensor without elements has no leaf, and is kept as well.
        for name, tensor in tensors.items():
            if 0 in tensor.shape:
                uses[name] = []
    dropped: tuple[DroppedTensor, ...] = ()
    if not uses.keys() >= tensors.keys():
        dropped = tuple(_find_dropped(family, uses, tensors, duplicates))
    dropped_names = {tensor.name for tensor in dropped}
    mismatches = _find_mismatches(names, uses, tensors, dropped_names)
    if mismatches.missing or mismatches.unexpected or mismatches.wrong_shape:
        error = _mismatch_error(mismatches, family, source_name, options)
        if options.offers_verbatim:
            hint = join_texts("; ", [error.hint, _VERBATIM_HINT])
            raise PrepError(error.what, error.why, hint)
        raise error
    checks = tuple(EqualityCheck(name, original) for name, original in duplicates.items())
    for check in checks:
        duplicate = tensors[check.name]
        original = tensors[check.duplicate_of]
        if (duplicate.dtype, duplicate.shape) != (original.dtype, original.shape):
            duplicate_text = f"{duplicate.dtype} {list(duplicate.shape)}"
            original_text = f"{original.dtype} {list(original.shape)}"
            pair = (check.name, check.duplicate_of)
            raise not_equal_error(
                names.family,
                check,
                display_names={name: names.full_name(name) for name in pair},
                difference=f"they are {duplicate_text} and {original_text}",
            )
    frozen_uses = {name: tuple(tensor_uses) for name, tensor_uses in uses.items()}
    return TensorMatch(frozen_uses, dropped, checks, is_tied)


def tensor_uses(
    rows: Mapping[str, ParsedAxisMap], sizes: Mapping[str, int]
) -> dict[str, list[TensorUse]]:
    """Return the leaves that take each tensor of the axis-map rows, by bare tensor name."""
    uses: dict[str, list[TensorUse]] = {}
    for path, row in rows.items():
        axis_map = bind_row(row, sizes)
        count = math.prod(factor.extent for factor in axis_map.stacked_factors)
        if count > MAX_TENSORS_PER_ROW:
            raise invalid_config_error(
                f"it requires {count_text(count, 'tensor')} like {axis_map.text.strip()}"
            )
        for name, stacked in axis_map.tensors():
            use = TensorUse(path.format(**stacked), path, axis_map, tuple(stacked.items()))
            uses.setdefault(name, []).append(use)
    return uses


def not_equal_error(
    family: Family, check: EqualityCheck, *, display_names: Mapping[str, str], difference: str
) -> PrepError:
    """Return the error for two tensors that must be equal and are not.

    Args:
        family: The model family.
        check: The failed check.
        display_names: Names of tensors in messages, by bare name, where the two differ.
        difference: Where or how the tensors differ.

    Returns:
        The error. Its hint depends on whether the tensors are the tied head and embedding.
    """
    first = display_names.get(check.name, check.name)
    second = display_names.get(check.duplicate_of, check.duplicate_of)
    what = f"{first} is not equal to {second}"
    if check.name == family.tying.head_tensor:
        hint = text("{} of save-init and pad-vocab keeps both", Option("untie", True))
        return PrepError(what, f"the config ties them, {difference}", hint)
    why = f"family {family.name} stores one tensor under both names, {difference}"
    return PrepError(what, why, f"if {second} is right, remove {first} from the checkpoint")


def _find_dropped(
    family: Family,
    used_names: Collection[str],
    tensors: Mapping[str, TensorInfo],
    duplicates: Mapping[str, str],
) -> Iterable[DroppedTensor]:
    """Yield the unused tensors dropped by a rule of the family, or as a duplicate."""
    rules = dropped_patterns(family)
    for name, tensor in tensors.items():
        if name in used_names:
            continue
        rule = next((rule for pattern, rule in rules.items() if re.fullmatch(pattern, name)), "")
        if name in duplicates:
            rule = f"equal to {duplicates[name]}"
        if rule:
            yield DroppedTensor(name, tensor.nbytes, rule)


def _find_mismatches(
    names: TensorNames,
    uses_by_name: Mapping[str, Sequence[TensorUse]],
    tensors: Mapping[str, TensorInfo],
    dropped_names: Collection[str],
) -> _Mismatches:
    """Collect the missing and unexpected tensors and the tensors of the wrong shape."""
    mismatches = _Mismatches()
    for name, uses in uses_by_name.items():
        if not uses:
            continue
        expected = uses[0].axis_map.source_shape
        if name not in tensors:
            leaf = names.missing_leaves.get(name)
            place = f" (leaf {leaf})" if leaf else ""
            mismatches.missing.append(f"{names.display_name(name)} {list(expected)}{place}")
        elif tensors[name].shape != expected:
            if sorted(tensors[name].shape) != sorted(expected):
                mismatches.has_other_order = False
            # E.g. `heads 12 head_dim 64 x embed 768`.
            dims: list[str] = []
            for dim in uses[0].axis_map.source_dims:
                dims.append(" ".join(f"{factor.atom} {factor.extent}" for factor in dim.factors))
            mismatches.wrong_shape.append(
                f"{names.display_name(name)} has shape {list(tensors[name].shape)},"
                f" expected {list(expected)} ({' x '.join(dims)})"
            )
    for name, tensor in tensors.items():
        if name not in uses_by_name and name not in dropped_names:
            mismatches.unexpected.append(f"{names.display_name(name)} {list(tensor.shape)}")
            weight_name = f"{name.removesuffix('.bias')}.weight"
            if name.endswith(".bias") and uses_by_name.get(weight_name):
                mismatches.has_biases = True
    return mismatches


def _mismatch_error(
    mismatches: _Mismatches, family: Family, source_name: str, options: MatchOptions
) -> PrepError:
    """Return one error that lists all mismatched tensors."""
    titles = {
        "missing": mismatches.missing,
        "unexpected": mismatches.unexpected,
        "wrong shape": mismatches.wrong_shape,
    }
    kinds = {title: tensors for title, tensors in titles.items() if tensors}
    firsts = [name.partition(".")[0] for name in mismatches.unexpected]
    wrapper = next((first for first in firsts if first in WRAPPERS), "")
    if wrapper and mismatches.missing:
        what = f"{source_name} does not match family {family.name}"
        why = f"some names begin with `{wrapper}.`, the prefix of a wrapper, and others do not"
        return PrepError(what, why, "save the tensors with the prefix on all names, or on none")
    if len(kinds) > 1:
        # Up to three lists, of three lines each at 80 columns.
        max_chars = MAX_CHARS // 2
        lists = [
            f"{kind}: {join_names(names, max_chars=max_chars)}" for kind, names in kinds.items()
        ]
        why = "; ".join(lists)
        return PrepError(f"{source_name} does not match family {family.name}", why, _MISMATCH_HINT)
    ((kind, tensors),) = kinds.items()
    is_one = len(tensors) == 1
    count = f"{len(tensors):,} tensor{'' if is_one else 's'} of {source_name}"
    if kind == "missing":
        verb = "is" if is_one else "are"
        return PrepError(f"{count} {verb} missing", join_names(tensors), _MISMATCH_HINT)
    if kind == "wrong shape":
        verb = "does" if is_one else "do"
        why = join_names(tensors, separator="; ")
        hint: str = _MISMATCH_HINT
        if mismatches.has_other_order:
            hint = text("{} reads tensors with another order of dims", _MAP_COMMAND)
        return PrepError(f"{count} {verb} not match config.json", why, hint)
    verb = "is" if is_one else "are"
    drop = Option("drop", pattern_of_layers(tensors[0].split()[0]))
    hint: str = text("{} ignores them", drop)
    if not options.offers_drop:
        hint = text("{} converts without them", Command("save-init", drop))
    if mismatches.has_biases:
        hint = _BIAS_HINT
    what = f"{count} {verb} not part of family {family.name}"
    return PrepError(what, join_names(tensors), hint)


_MISMATCH_HINT = "check that config.json and the weights belong to the same model"
_MAP_COMMAND = Command("save-init", Option("map", "FILE"))
# Without the bias, a module would compute something else.
_BIAS_HINT = "use the config.json of the model with its biases (`attention_bias`, `mlp_bias`)"
_VERBATIM_HINT = text("{} keeps the names of the file", Option("verbatim", True))
