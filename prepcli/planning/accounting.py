"""Match the tensors of a source with the parameters of its family. Pure.

Each tensor is used by at least one leaf, dropped by a named rule, or listed in an error. Names are bare here: they lack
the family's base prefix, as in the family's parameter table. Error messages show names as the source spells them.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prepcli.console.lists import join_names
from prepcli.errors import PrepError, invalid_config_error, usage_error
from prepcli.planning.plan import DroppedTensor, EqualityCheck
from trainer.models.axis_map import AxisMap, Row, bind_row
from trainer.models.parameters import Family, HFConfig

VOCAB_ATOM = "vocab"
MAX_TENSORS_PER_ROW = 1 << 20  # far above any real model; bounds the memory that an invalid config can take


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
        path: Path of the leaf in the parameter tree.
        parameter: Path of the axis-map row; differs from `path` if the row describes one leaf per layer.
        axis_map: Maps the tensor's elements to the leaf's.
        stacked_indices: (atom, index) of each stacked atom in the tensor's name.
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
    """

    family: Family
    is_prefixed: bool = True
    embedding_alias: str = ""
    unprefixed_names: frozenset[str] = frozenset()

    def full_name(self, bare: str) -> str:
        """Return a tensor's name as prep writes it to files, with the base prefix if the source has it."""
        with_prefix = self.is_prefixed and bare not in self.family.unprefixed
        return self.family.prefix + bare if with_prefix else bare

    def display_name(self, bare: str) -> str:
        """Return a tensor's name for messages, as the source spells it; unprintable characters are escaped."""
        full = bare if bare in self.unprefixed_names else self.full_name(bare)
        return full if full.isprintable() else ascii(full)[1:-1]

    def bare_name(self, full: str) -> str:
        """Return a tensor's name without the base prefix, as the family's table spells it."""
        name = full.removeprefix(self.family.prefix) if self.is_prefixed else full
        return self.family.tying.embedding_tensor if name and name == self.embedding_alias else name


@dataclass(frozen=True, slots=True)
class Accounting:
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
        drop: Name patterns (`--drop`) of tensors to ignore.
        untie: Whether a stored head becomes a leaf of its own although the config ties it (`--untie`).
    """

    drop: tuple[str, ...] = ()
    untie: bool = False


DEFAULT_MATCH_OPTIONS = MatchOptions()


@dataclass(slots=True)
class _Mismatches:
    """Descriptions of the tensors that do not match the family, by kind."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)


def detect_names(family: Family, config: HFConfig, *, full_names: Collection[str]) -> TensorNames:
    """Return the naming scheme of a source.

    Args:
        family: The model family.
        config: The model's Hugging Face config.
        full_names: The tensor names in the source.

    Returns:
        The naming scheme.

    Raises:
        PrepError: A tensor is stored twice, with and without the base prefix.
    """
    prefixed = {
        name.removeprefix(family.prefix) for name in full_names if family.prefix and name.startswith(family.prefix)
    }
    both = prefixed & set(full_names)
    if both:
        pair = f"{family.prefix}{min(both)} and {min(both)}"
        raise PrepError("a tensor is stored twice, with and without the base prefix", pair, "remove one of them")
    bare = prefixed | set(full_names)
    unprefixed = frozenset(name for name in full_names if not name.startswith(family.prefix))
    return TensorNames(
        family, bool(prefixed), _find_embedding_alias(family, config, bare), unprefixed if prefixed else frozenset()
    )


def _find_embedding_alias(family: Family, config: HFConfig, bare_names: Collection[str]) -> str:
    """Return the first stored duplicate of an embedding missing from the source, or an empty string."""
    tying = family.tying
    duplicates = [duplicate for duplicate, original in family.duplicates.items() if original == tying.embedding_tensor]
    candidates = [*duplicates, tying.head_tensor] if family.is_tied(config, bare_names) else duplicates
    return "" if tying.embedding_tensor in bare_names else next((name for name in candidates if name in bare_names), "")


def vocab_tensors(accounting: Accounting) -> set[str]:
    """Return the names of tensors whose first dim is the vocabulary, including duplicates of the embedding."""
    aliases = {check.name for check in accounting.checks}
    return aliases | {
        name
        for name, uses in accounting.uses.items()
        if any(
            use.axis_map.source_dims and VOCAB_ATOM in {f.atom for f in use.axis_map.source_dims[0].factors}
            for use in uses
        )
    }


def match_tensors(
    names: TensorNames,
    config: HFConfig,
    *,
    sizes: Mapping[str, int],
    rows: Mapping[str, Row],
    tensors: Mapping[str, TensorInfo],
    options: MatchOptions,
    source_name: str,
) -> Accounting:
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
        PrepError: Tensors are missing, unexpected or of the wrong shape (the error lists all of them), a `--drop`
            pattern matches nothing, or duplicates differ in dtype or shape.
    """
    family = names.family
    rows, is_tied, duplicates = _resolve_tying(family, config, rows, tensors, options)
    uses: dict[str, list[TensorUse]] = {}
    for path, row in rows.items():
        axis_map = bind_row(row, sizes)
        if (count := math.prod(f.extent for f in axis_map.stacked_factors)) > MAX_TENSORS_PER_ROW:
            raise invalid_config_error(f"it requires {count:,} tensors like {axis_map.text.strip()}")
        for name, stacked in axis_map.tensors():
            uses.setdefault(name, []).append(TensorUse(path.format(**stacked), path, axis_map, tuple(stacked.items())))
    dropped = tuple(_find_dropped(family, uses, tensors, options, duplicates))
    _check_drop_patterns(names, options, {d.name for d in dropped}, source_name)
    mismatches = _find_mismatches(names, uses, tensors, {d.name for d in dropped})
    if mismatches.missing or mismatches.unexpected or mismatches.wrong_shape:
        raise _mismatch_error(mismatches, family, source_name)
    checks = tuple(EqualityCheck(name, original) for name, original in duplicates.items())
    for check in checks:
        _check_same_metadata(names, tensors, check)
    return Accounting({name: tuple(tensor_uses) for name, tensor_uses in uses.items()}, dropped, checks, is_tied)


def _resolve_tying(
    family: Family,
    config: HFConfig,
    rows: Mapping[str, Row],
    tensors: Mapping[str, TensorInfo],
    options: MatchOptions,
) -> tuple[dict[str, Row], bool, dict[str, str]]:
    """Resolve whether the head is tied to the embedding.

    Returns:
        The rows without the head if it is tied, whether it is tied, and the original of each stored duplicate.
    """
    tying = family.tying
    duplicates = {name: original for name, original in family.duplicates.items() if name in tensors}
    has_head = tying.head_tensor in tensors
    if not family.is_tied(config, tensors) or (has_head and options.untie):
        return dict(rows), False, duplicates
    heads = {tying.head_tensor: tying.embedding_tensor} if has_head else {}
    return {path: row for path, row in rows.items() if path != tying.head_leaf}, True, heads | duplicates


def _check_same_metadata(names: TensorNames, tensors: Mapping[str, TensorInfo], check: EqualityCheck) -> None:
    """Raise PrepError if the tensors of a check differ in dtype or shape. Values are compared while they are read."""
    duplicate, original = tensors[check.name], tensors[check.duplicate_of]
    if (duplicate.dtype, duplicate.shape) != (original.dtype, original.shape):
        difference = f"they are {duplicate.dtype} {list(duplicate.shape)} and {original.dtype} {list(original.shape)}"
        raise not_equal_error(
            names.family,
            check,
            display_names={name: names.full_name(name) for name in (check.name, check.duplicate_of)},
            difference=difference,
        )


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
        An error whose hint depends on whether the tensors are the tied head and embedding.
    """
    first, second = display_names.get(check.name, check.name), display_names.get(check.duplicate_of, check.duplicate_of)
    what = f"{first} is not equal to {second}"
    if check.name == family.tying.head_tensor:
        return PrepError(what, f"the config ties them, {difference}", "`--untie` keeps both")
    why = f"it is a duplicate in family {family.name}, {difference}"
    return PrepError(what, why, f"if {second} is right, remove {first} from the checkpoint")


def _find_dropped(
    family: Family,
    used_names: Collection[str],
    tensors: Mapping[str, TensorInfo],
    options: MatchOptions,
    duplicates: Mapping[str, str],
) -> Iterable[DroppedTensor]:
    """Yield the unused tensors dropped by a rule of the family, as a duplicate, or by `--drop`."""
    rules = {re.sub(r"\\{i\\}", r"\\d+", re.escape(pattern)): rule for pattern, rule in family.dropped.items()}
    for name, tensor in tensors.items():
        if name in used_names:
            continue
        rule = next((rule for pattern, rule in rules.items() if re.fullmatch(pattern, name)), "")
        if name in duplicates:
            rule = f"equal to {duplicates[name]}"
        elif not rule and any(fnmatch.fnmatchcase(name, p.removeprefix(family.prefix)) for p in options.drop):
            rule = "--drop"
        if rule:
            yield DroppedTensor(name, tensor.nbytes, rule)


def _check_drop_patterns(
    names: TensorNames, options: MatchOptions, dropped_names: Collection[str], source_name: str
) -> None:
    """Raise UsageError for a `--drop` pattern that matches no dropped tensor."""
    for pattern in options.drop:
        bare = pattern.removeprefix(names.family.prefix)
        if not any(fnmatch.fnmatchcase(name, bare) for name in dropped_names):
            what = f"`--drop '{pattern}'` drops nothing of {source_name}"
            why = "no unexpected tensor has such a name, and tensors that the model uses are never dropped"
            raise usage_error(what, why, f"`prep inspect {source_name}` lists the tensors")


def _find_mismatches(
    names: TensorNames,
    uses_by_name: Mapping[str, Sequence[TensorUse]],
    tensors: Mapping[str, TensorInfo],
    dropped_names: Collection[str],
) -> _Mismatches:
    """Collect the missing and unexpected tensors and the tensors of the wrong shape."""
    mismatches = _Mismatches()
    for name, uses in uses_by_name.items():
        expected = uses[0].axis_map.source_shape
        if name not in tensors:
            mismatches.missing.append(f"{names.display_name(name)} {list(expected)}")
        elif tensors[name].shape != expected:
            atoms = " x ".join(
                " ".join(f"{f.atom} {f.extent}" for f in d.factors) for d in uses[0].axis_map.source_dims
            )
            description = (
                f"{names.display_name(name)} has shape {list(tensors[name].shape)}, expected {list(expected)} ({atoms})"
            )
            mismatches.wrong_shape.append(description)
    for name, tensor in tensors.items():
        if name not in uses_by_name and name not in dropped_names:
            mismatches.unexpected.append(f"{names.display_name(name)} {list(tensor.shape)}")
    return mismatches


def _mismatch_error(mismatches: _Mismatches, family: Family, source_name: str) -> PrepError:
    """Return one error that lists all mismatched tensors."""

    def count(tensors: list[str]) -> str:
        return f"{len(tensors):,} tensor{'' if len(tensors) == 1 else 's'} of {source_name}"

    kinds = [kind for kind in (mismatches.missing, mismatches.unexpected, mismatches.wrong_shape) if kind]
    if len(kinds) > 1:
        titles = {
            "missing": mismatches.missing,
            "unexpected": mismatches.unexpected,
            "wrong shape": mismatches.wrong_shape,
        }
        why = "; ".join(f"{title}: {join_names(tensors)}" for title, tensors in titles.items() if tensors)
        return PrepError(f"{source_name} does not match family {family.name}", why, _MISMATCH_HINT)
    if mismatches.missing:
        verb = "is" if len(mismatches.missing) == 1 else "are"
        return PrepError(f"{count(mismatches.missing)} {verb} missing", join_names(mismatches.missing), _MISMATCH_HINT)
    if mismatches.wrong_shape:
        verb = "does" if len(mismatches.wrong_shape) == 1 else "do"
        what = f"{count(mismatches.wrong_shape)} {verb} not match config.json"
        return PrepError(what, join_names(mismatches.wrong_shape, separator="; "), _MISMATCH_HINT)
    verb = "is" if len(mismatches.unexpected) == 1 else "are"
    what = f"{count(mismatches.unexpected)} {verb} not part of family {family.name}"
    first_name = mismatches.unexpected[0].split()[0]
    return PrepError(what, join_names(mismatches.unexpected), f"`--drop '{_drop_pattern(first_name)}'` ignores them")


_MISMATCH_HINT = "check that config.json and the weights belong to the same model"


def _drop_pattern(name: str) -> str:
    """Return a `--drop` pattern that matches a tensor's name in every layer."""
    return re.sub(r"\.\d+\.", ".*.", name)
