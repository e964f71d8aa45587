"""What becomes of every tensor of a source: which rows use it, by which rule it is dropped, or what does not add up.

Pure. Names here are as rows spell them, without the base prefix; messages show them as the files do.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prepcli.console.lists import some
from prepcli.errors import PrepError, usage
from prepcli.planning.plan import Dropped, Same
from trainer.models.axis_map import AxisMap, Row, bind
from trainer.models.parameters import Config, Family

VOCAB = "vocab"
MOST_TENSORS = 1 << 20  # of one row: far above any model; keeps a wrong config from asking for memory


@dataclass(frozen=True, slots=True)
class Shaped:
    """A tensor of the source as far as accounting needs it."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Use:
    """A leaf that has (a part of) a tensor; `at`: the index of each stacked atom that the tensor's name stands for."""

    path: str
    parameter: str  # its path in the table: another where one row stands for many leaves
    row: AxisMap
    at: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Names:
    """How the tensors of a source are called: with the family's base prefix, or without.

    Of a tied pair a file may hold the head alone, or of copies another one: it is read, and called, as the embedding
    (`embedding_as`: what the file calls that, where it is so).
    """

    family: Family
    prefixed: bool = True
    embedding_as: str = ""
    without_prefix: frozenset[str] = frozenset()  # the names that lack it though others have it

    def full(self, bare: str) -> str:
        """The name in a file, as prep writes it."""
        with_prefix = self.prefixed and bare not in self.family.unprefixed
        return self.family.prefix + bare if with_prefix else bare

    def shown(self, bare: str) -> str:
        """The name in a message, which stays on its line whatever a stranger's file calls its tensors."""
        full = bare if bare in self.without_prefix else self.full(bare)
        return full if full.isprintable() else ascii(full)[1:-1]

    def bare(self, full: str) -> str:
        """The name in a row."""
        name = full.removeprefix(self.family.prefix) if self.prefixed else full
        return self.family.tie.embedding if name and name == self.embedding_as else name


@dataclass(frozen=True, slots=True)
class Account:
    """The outcome: of each used tensor its uses, the others with the rule that drops them, and what must be equal."""

    uses: Mapping[str, tuple[Use, ...]]
    dropped: tuple[Dropped, ...]
    checks: tuple[Same, ...]
    tied: bool


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a user says of tensors: patterns that may be lost, and whether a tied head that is stored stays its own."""

    drop: tuple[str, ...] = ()
    untie: bool = False


KEEP_ALL = Wishes()


@dataclass(slots=True)
class _Faults:
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)


def names_of(family: Family, config: Config, full: Collection[str]) -> Names:
    """Which form the names of a file have; PrepError where a tensor is there in both."""
    prefixed = {name.removeprefix(family.prefix) for name in full if family.prefix and name.startswith(family.prefix)}
    both = prefixed & set(full)
    if both:
        pair = f"{family.prefix}{min(both)} and {min(both)}"
        raise PrepError("a tensor is there twice, with and without the base prefix", pair, "keep one of them")
    bare = prefixed | set(full)
    plain = frozenset(name for name in full if not name.startswith(family.prefix))
    return Names(family, bool(prefixed), _embedding_as(family, config, bare), plain if prefixed else frozenset())


def _embedding_as(family: Family, config: Config, bare: Collection[str]) -> str:
    """Of tensors that repeat the embedding the first that a file has, where it lacks that."""
    tie = family.tie
    copies = [copy for copy, of in family.copies.items() if of == tie.embedding]
    others = [*copies, tie.tensor] if family.tied(config, bare) else copies
    return "" if tie.embedding in bare else next((name for name in others if name in bare), "")


def vocab_tensors(counted: Account) -> set[str]:
    """Tensors whose first dim is the vocabulary, those that only repeat the embedding among them."""
    aliases = {check.name for check in counted.checks}
    return aliases | {
        name
        for name, found in counted.uses.items()
        if any(use.row.source and VOCAB in {f.atom for f in use.row.source[0].factors} for use in found)
    }


def account(
    names: Names,
    config: Config,
    sizes: Mapping[str, int],
    rows: Mapping[str, Row],
    tensors: Mapping[str, Shaped],
    wishes: Wishes,
    where: str,
) -> Account:
    """Match rows with tensors. PrepError lists all that are missing, unexpected or misshapen, in `where`."""
    family = names.family
    rows, tied, repeats = _tying(family, config, rows, tensors, wishes)
    wanted: dict[str, list[Use]] = {}
    for path, row in rows.items():
        bound = bind(row, sizes)
        if (count := math.prod(f.extent for f in bound.stacked)) > MOST_TENSORS:
            raise PrepError("config.json makes no sense", f"it asks for {count:,} tensors like {bound.text.strip()}")
        for name, at in bound.tensors():
            wanted.setdefault(name, []).append(Use(path.format(**at), path, bound, tuple(at.items())))
    dropped = tuple(_dropped(family, wanted, tensors, wishes, repeats))
    _check_patterns(names, wishes, {d.name for d in dropped}, where)
    faults = _faults(names, wanted, tensors, {d.name for d in dropped})
    if faults.missing or faults.unexpected or faults.misshapen:
        raise _error(faults, family, where)
    checks = tuple(Same(name, other) for name, other in repeats.items())
    for check in checks:
        _check_same(names, tensors, check)
    return Account({name: tuple(found) for name, found in wanted.items()}, dropped, checks, tied)


def _tying(
    family: Family, config: Config, rows: Mapping[str, Row], tensors: Mapping[str, Shaped], wishes: Wishes
) -> tuple[dict[str, Row], bool, dict[str, str]]:
    """The rows without a head that is the embedding, whether it is, and the tensors that repeat another."""
    tie = family.tie
    repeats = {name: other for name, other in family.copies.items() if name in tensors}
    stored = tie.tensor in tensors
    if not family.tied(config, tensors) or (stored and wishes.untie):
        return dict(rows), False, repeats
    heads = {tie.tensor: tie.embedding} if stored else {}
    return {path: row for path, row in rows.items() if path != tie.leaf}, True, heads | repeats


def _check_same(names: Names, tensors: Mapping[str, Shaped], check: Same) -> None:
    """PrepError where a glance tells that a tensor does not repeat the other; bytes are compared on the way."""
    head, other = tensors[check.name], tensors[check.other]
    if (head.dtype, head.shape) != (other.dtype, other.shape):
        shown = f"they are {head.dtype} {list(head.shape)} and {other.dtype} {list(other.shape)}"
        raise not_same(names.family, check, {name: names.full(name) for name in (check.name, check.other)}, shown)


def not_same(family: Family, check: Same, called: Mapping[str, str], how: str) -> PrepError:
    """The error of two tensors that should be equal; `called`: what the file calls them."""
    first, second = called.get(check.name, check.name), called.get(check.other, check.other)
    what = f"{first} is not equal to {second}"
    if check.name == family.tie.tensor:
        return PrepError(what, f"config says tied, {how}", "`--untie` keeps both")
    return PrepError(what, f"it is a copy in every {family.name}, {how}", f"a file without {first}, if that is right")


def _dropped(
    family: Family,
    wanted: Collection[str],
    tensors: Mapping[str, Shaped],
    wishes: Wishes,
    repeats: Mapping[str, str],
) -> Iterable[Dropped]:
    rules = {re.sub(r"\\{i\\}", r"\\d+", re.escape(pattern)): why for pattern, why in family.dropped.items()}
    for name, tensor in tensors.items():
        if name in wanted:
            continue
        rule = next((why for pattern, why in rules.items() if re.fullmatch(pattern, name)), "")
        if name in repeats:
            rule = f"equal to {repeats[name]}"
        elif not rule and any(fnmatch.fnmatchcase(name, p.removeprefix(family.prefix)) for p in wishes.drop):
            rule = "--drop"
        if rule:
            yield Dropped(name, tensor.nbytes, rule)


def _check_patterns(names: Names, wishes: Wishes, dropped: Collection[str], where: str) -> None:
    """Usage PrepError for a pattern of `--drop` that drops nothing: it was meant to."""
    for pattern in wishes.drop:
        bare = pattern.removeprefix(names.family.prefix)
        if not any(fnmatch.fnmatchcase(name, bare) for name in dropped):
            why = "no tensor without a place has such a name; those that have one are never dropped"
            raise usage(
                f"`--drop '{pattern}'` drops nothing of {where}", why, f"`prep inspect {where}` lists the tensors"
            )


def _faults(
    names: Names, wanted: Mapping[str, Sequence[Use]], tensors: Mapping[str, Shaped], dropped: Collection[str]
) -> _Faults:
    faults = _Faults()
    for name, uses in wanted.items():
        expected = uses[0].row.source_shape
        if name not in tensors:
            faults.missing.append(f"{names.shown(name)} {list(expected)}")
        elif tensors[name].shape != expected:
            atoms = " x ".join(" ".join(f"{f.atom} {f.extent}" for f in d.factors) for d in uses[0].row.source)
            has = f"{names.shown(name)} has shape {list(tensors[name].shape)}, expected {list(expected)} ({atoms})"
            faults.misshapen.append(has)
    for name, tensor in tensors.items():
        if name not in wanted and name not in dropped:
            faults.unexpected.append(f"{names.shown(name)} {list(tensor.shape)}")
    return faults


def _error(faults: _Faults, family: Family, where: str) -> PrepError:
    def count(found: list[str]) -> str:
        return f"{len(found):,} tensor{'' if len(found) == 1 else 's'} of {where}"

    kinds = [kind for kind in (faults.missing, faults.unexpected, faults.misshapen) if kind]
    if len(kinds) > 1:
        titles = {"missing": faults.missing, "without a place": faults.unexpected, "misshapen": faults.misshapen}
        why = "; ".join(f"{title}: {some(found)}" for title, found in titles.items() if found)
        return PrepError(f"{where} does not add up as family {family.name}", why, _TWO_MODELS)
    if faults.missing:
        verb = "is" if len(faults.missing) == 1 else "are"
        return PrepError(f"{count(faults.missing)} {verb} missing", some(faults.missing), _TWO_MODELS)
    if faults.misshapen:
        verb = "is" if len(faults.misshapen) == 1 else "are"
        what = f"{count(faults.misshapen)} {verb} not as config.json says"
        return PrepError(what, some(faults.misshapen, separator="; "), _TWO_MODELS)
    verb = "has" if len(faults.unexpected) == 1 else "have"
    what = f"{count(faults.unexpected)} {verb} no place in family {family.name}"
    first = faults.unexpected[0].split()[0]
    return PrepError(what, some(faults.unexpected), f"if they may be lost: `--drop '{_pattern(first)}'`")


_TWO_MODELS = "are config.json and the weights of one model?"


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)
