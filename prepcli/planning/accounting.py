"""What becomes of every tensor of a source: which rows use it, by which rule it is dropped, or what does not add up.

Pure. Names here are as rows spell them, without the base prefix; messages show them as the files do.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prepcli.console.lists import join_names
from prepcli.errors import PrepError, usage_error
from prepcli.planning.plan import DroppedTensor, EqualityCheck
from trainer.models.axis_map import AxisMap, Row, bind_row
from trainer.models.parameters import Family, HFConfig

VOCAB_ATOM = "vocab"
MAX_TENSORS_PER_ROW = 1 << 20  # of one row: far above any model; keeps a wrong config from asking for memory


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the source as far as accounting needs it."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorUse:
    """A leaf that has (a part of) a tensor; `at`: the index of each stacked atom that the tensor's name stands for."""

    path: str
    parameter: str  # its path in the table: another where one row stands for many leaves
    axis_map: AxisMap
    stacked_indices: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How the tensors of a source are called: with the family's base prefix, or without.

    Of a tied pair a file may hold the head alone, or of copies another one: it is read, and called, as the embedding
    (`embedding_as`: what the file calls that, where it is so).
    """

    family: Family
    is_prefixed: bool = True
    embedding_alias: str = ""
    unprefixed_names: frozenset[str] = frozenset()  # the names that lack it though others have it

    def full_name(self, bare: str) -> str:
        """The name in a file, as prep writes it."""
        with_prefix = self.is_prefixed and bare not in self.family.unprefixed
        return self.family.prefix + bare if with_prefix else bare

    def display_name(self, bare: str) -> str:
        """The name in a message, which stays on its line whatever a stranger's file calls its tensors."""
        full = bare if bare in self.unprefixed_names else self.full_name(bare)
        return full if full.isprintable() else ascii(full)[1:-1]

    def bare_name(self, full: str) -> str:
        """The name in a row."""
        name = full.removeprefix(self.family.prefix) if self.is_prefixed else full
        return self.family.tying.embedding_tensor if name and name == self.embedding_alias else name


@dataclass(frozen=True, slots=True)
class Accounting:
    """The outcome: of each used tensor its uses, the others with the rule that drops them, and what must be equal."""

    uses: Mapping[str, tuple[TensorUse, ...]]
    dropped: tuple[DroppedTensor, ...]
    checks: tuple[EqualityCheck, ...]
    is_tied: bool


@dataclass(frozen=True, slots=True)
class MatchOptions:
    """What a user says of tensors: patterns that may be lost, and whether a tied head that is stored stays its own."""

    drop: tuple[str, ...] = ()
    untie: bool = False


DEFAULT_MATCH_OPTIONS = MatchOptions()


@dataclass(slots=True)
class _Mismatches:
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)


def detect_names(family: Family, config: HFConfig, full_names: Collection[str]) -> TensorNames:
    """Which form the names of a file have; PrepError where a tensor is there in both."""
    prefixed = {
        name.removeprefix(family.prefix) for name in full_names if family.prefix and name.startswith(family.prefix)
    }
    both = prefixed & set(full_names)
    if both:
        pair = f"{family.prefix}{min(both)} and {min(both)}"
        raise PrepError("a tensor is there twice, with and without the base prefix", pair, "keep one of them")
    bare = prefixed | set(full_names)
    plain = frozenset(name for name in full_names if not name.startswith(family.prefix))
    return TensorNames(
        family, bool(prefixed), _find_embedding_alias(family, config, bare), plain if prefixed else frozenset()
    )


def _find_embedding_alias(family: Family, config: HFConfig, bare: Collection[str]) -> str:
    """Of tensors that repeat the embedding the first that a file has, where it lacks that."""
    tie = family.tying
    copies = [copy for copy, of in family.duplicates.items() if of == tie.embedding_tensor]
    others = [*copies, tie.head_tensor] if family.is_tied(config, bare) else copies
    return "" if tie.embedding_tensor in bare else next((name for name in others if name in bare), "")


def vocab_tensors(accounting: Accounting) -> set[str]:
    """Tensors whose first dim is the vocabulary, those that only repeat the embedding among them."""
    aliases = {check.name for check in accounting.checks}
    return aliases | {
        name
        for name, found in accounting.uses.items()
        if any(
            use.axis_map.source_dims and VOCAB_ATOM in {f.atom for f in use.axis_map.source_dims[0].factors}
            for use in found
        )
    }


def match_tensors(
    names: TensorNames,
    config: HFConfig,
    sizes: Mapping[str, int],
    parsed_rows: Mapping[str, Row],
    tensors: Mapping[str, TensorInfo],
    options: MatchOptions,
    source_name: str,
) -> Accounting:
    """Match rows with tensors. PrepError lists all that are missing, unexpected or misshapen, in `where`."""
    family = names.family
    parsed_rows, tied, repeats = _resolve_tying(family, config, parsed_rows, tensors, options)
    wanted: dict[str, list[TensorUse]] = {}
    for path, row in parsed_rows.items():
        bound = bind_row(row, sizes)
        if (count := math.prod(f.extent for f in bound.stacked_factors)) > MAX_TENSORS_PER_ROW:
            raise PrepError("config.json makes no sense", f"it asks for {count:,} tensors like {bound.text.strip()}")
        for name, at in bound.tensors():
            wanted.setdefault(name, []).append(TensorUse(path.format(**at), path, bound, tuple(at.items())))
    dropped = tuple(_find_dropped(family, wanted, tensors, options, repeats))
    _check_drop_patterns(names, options, {d.name for d in dropped}, source_name)
    faults = _find_mismatches(names, wanted, tensors, {d.name for d in dropped})
    if faults.missing or faults.unexpected or faults.wrong_shape:
        raise _mismatch_error(faults, family, source_name)
    checks = tuple(EqualityCheck(name, other) for name, other in repeats.items())
    for check in checks:
        _check_same_metadata(names, tensors, check)
    return Accounting({name: tuple(found) for name, found in wanted.items()}, dropped, checks, tied)


def _resolve_tying(
    family: Family,
    config: HFConfig,
    parsed_rows: Mapping[str, Row],
    tensors: Mapping[str, TensorInfo],
    options: MatchOptions,
) -> tuple[dict[str, Row], bool, dict[str, str]]:
    """The rows without a head that is the embedding, whether it is, and the tensors that repeat another."""
    tie = family.tying
    repeats = {name: other for name, other in family.duplicates.items() if name in tensors}
    stored = tie.head_tensor in tensors
    if not family.is_tied(config, tensors) or (stored and options.untie):
        return dict(parsed_rows), False, repeats
    heads = {tie.head_tensor: tie.embedding_tensor} if stored else {}
    return {path: row for path, row in parsed_rows.items() if path != tie.head_leaf}, True, heads | repeats


def _check_same_metadata(names: TensorNames, tensors: Mapping[str, TensorInfo], check: EqualityCheck) -> None:
    """PrepError where a glance tells that a tensor does not repeat the other; bytes are compared on the way."""
    head, other = tensors[check.name], tensors[check.duplicate_of]
    if (head.dtype, head.shape) != (other.dtype, other.shape):
        shown = f"they are {head.dtype} {list(head.shape)} and {other.dtype} {list(other.shape)}"
        raise not_equal_error(
            names.family, check, {name: names.full_name(name) for name in (check.name, check.duplicate_of)}, shown
        )


def not_equal_error(
    family: Family, check: EqualityCheck, display_names: Mapping[str, str], difference: str
) -> PrepError:
    """The error of two tensors that should be equal; `called`: what the file calls them."""
    first, second = display_names.get(check.name, check.name), display_names.get(check.duplicate_of, check.duplicate_of)
    what = f"{first} is not equal to {second}"
    if check.name == family.tying.head_tensor:
        return PrepError(what, f"config says tied, {difference}", "`--untie` keeps both")
    return PrepError(
        what, f"it is a copy in every {family.name}, {difference}", f"a file without {first}, if that is right"
    )


def _find_dropped(
    family: Family,
    used_names: Collection[str],
    tensors: Mapping[str, TensorInfo],
    options: MatchOptions,
    duplicates: Mapping[str, str],
) -> Iterable[DroppedTensor]:
    rules = {re.sub(r"\\{i\\}", r"\\d+", re.escape(pattern)): why for pattern, why in family.dropped.items()}
    for name, tensor in tensors.items():
        if name in used_names:
            continue
        rule = next((why for pattern, why in rules.items() if re.fullmatch(pattern, name)), "")
        if name in duplicates:
            rule = f"equal to {duplicates[name]}"
        elif not rule and any(fnmatch.fnmatchcase(name, p.removeprefix(family.prefix)) for p in options.drop):
            rule = "--drop"
        if rule:
            yield DroppedTensor(name, tensor.nbytes, rule)


def _check_drop_patterns(
    names: TensorNames, options: MatchOptions, dropped_names: Collection[str], source_name: str
) -> None:
    """Usage PrepError for a pattern of `--drop` that drops nothing: it was meant to."""
    for pattern in options.drop:
        bare = pattern.removeprefix(names.family.prefix)
        if not any(fnmatch.fnmatchcase(name, bare) for name in dropped_names):
            why = "no tensor without a place has such a name; those that have one are never dropped"
            raise usage_error(
                f"`--drop '{pattern}'` drops nothing of {source_name}",
                why,
                f"`prep inspect {source_name}` lists the tensors",
            )


def _find_mismatches(
    names: TensorNames,
    uses_by_name: Mapping[str, Sequence[TensorUse]],
    tensors: Mapping[str, TensorInfo],
    dropped_names: Collection[str],
) -> _Mismatches:
    faults = _Mismatches()
    for name, uses in uses_by_name.items():
        expected = uses[0].axis_map.source_shape
        if name not in tensors:
            faults.missing.append(f"{names.display_name(name)} {list(expected)}")
        elif tensors[name].shape != expected:
            atoms = " x ".join(
                " ".join(f"{f.atom} {f.extent}" for f in d.factors) for d in uses[0].axis_map.source_dims
            )
            has = (
                f"{names.display_name(name)} has shape {list(tensors[name].shape)}, expected {list(expected)} ({atoms})"
            )
            faults.wrong_shape.append(has)
    for name, tensor in tensors.items():
        if name not in uses_by_name and name not in dropped_names:
            faults.unexpected.append(f"{names.display_name(name)} {list(tensor.shape)}")
    return faults


def _mismatch_error(mismatches: _Mismatches, family: Family, source_name: str) -> PrepError:
    def count(found: list[str]) -> str:
        return f"{len(found):,} tensor{'' if len(found) == 1 else 's'} of {source_name}"

    kinds = [kind for kind in (mismatches.missing, mismatches.unexpected, mismatches.wrong_shape) if kind]
    if len(kinds) > 1:
        titles = {
            "missing": mismatches.missing,
            "without a place": mismatches.unexpected,
            "misshapen": mismatches.wrong_shape,
        }
        why = "; ".join(f"{title}: {join_names(found)}" for title, found in titles.items() if found)
        return PrepError(f"{source_name} does not add up as family {family.name}", why, _MISMATCH_HINT)
    if mismatches.missing:
        verb = "is" if len(mismatches.missing) == 1 else "are"
        return PrepError(f"{count(mismatches.missing)} {verb} missing", join_names(mismatches.missing), _MISMATCH_HINT)
    if mismatches.wrong_shape:
        verb = "is" if len(mismatches.wrong_shape) == 1 else "are"
        what = f"{count(mismatches.wrong_shape)} {verb} not as config.json says"
        return PrepError(what, join_names(mismatches.wrong_shape, separator="; "), _MISMATCH_HINT)
    verb = "has" if len(mismatches.unexpected) == 1 else "have"
    what = f"{count(mismatches.unexpected)} {verb} no place in family {family.name}"
    first = mismatches.unexpected[0].split()[0]
    return PrepError(what, join_names(mismatches.unexpected), f"if they may be lost: `--drop '{_drop_pattern(first)}'`")


_MISMATCH_HINT = "are config.json and the weights of one model?"


def _drop_pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)
