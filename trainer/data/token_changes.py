"""The check that a resumed run has the tokens with which it began, and the cause if it has others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum

from trainer.models.errors import Key, Option, PrepError, text
from trainer.recipe.formatting import change_text

BOS_KEY = "data.add_bos"
CHANGED_DATA = "the data has changed since the run began"


class IdentityChange(Enum):
    """A change of the tokens that the same files, tokenizer and settings give, since an earlier version.

    The value says it in an error message. The identity of a store has an input for each change that affects the
    store, so a run of an earlier version is compared with the identity without this input.
    """

    TABLE_ROWS = "conversations in Parquet and Arrow files are read in another way since then"
    CHAT_RENDERING = "conversations are rendered in another way since then"
    SINGLE_BOS = "a document that has the begin token gets no second one since then"


# Returns the identity of a store with another `data.add_bos` and without some changes.
Identify = Callable[[bool | None, Collection[IdentityChange]], str]


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """The tokens with which a run began.

    Attributes:
        identities: Identity of each store.
        add_bos: Its `data.add_bos`.
    """

    identities: tuple[str, ...]
    add_bos: bool | None

    def change_error(self, identity: str, add_bos: bool | None, identify: Identify) -> PrepError:
        """Return the error for a store that is none of these.

        Args:
            identity: Identity of the store.
            add_bos: The `data.add_bos` of the store.
            identify: Computes the identity as earlier versions and settings had it.
        """
        restart = restart_hint()
        for then, changes in _candidates(dict.fromkeys((add_bos, self.add_bos))):
            if identify(then, changes) not in self.identities:
                continue
            causes = [change.value for change in changes]
            hint = restart
            if then != add_bos:
                causes.insert(0, f"{BOS_KEY}: {change_text((then, add_bos))}")
                keeps = text("{} keeps it", Key(BOS_KEY, then, is_override=True))
                hint = text("{}; {}", keeps, restart)
            if changes:
                # No setting gives these tokens.
                hint = text("the earlier version finishes the run; {}", restart)
            return PrepError(CHANGED_DATA, ", and ".join(causes), hint)
        why = f"{' '.join(self.identities)}, now {identity}"
        return PrepError(CHANGED_DATA, why, restart)


def _candidates(
    begins: Collection[bool | None],
) -> Iterator[tuple[bool | None, tuple[IdentityChange, ...]]]:
    """Yield the settings and changes that may be the cause, the simplest ones first."""
    for n_changes in range(len(IdentityChange) + 1):
        for changes in itertools.combinations(IdentityChange, n_changes):
            for add_bos in begins:
                yield add_bos, changes


def restart_hint() -> str:
    """Return the hint to start a run again that cannot resume."""
    return text(
        "{} starts again from step 0; another {} keeps both runs",
        Option("restart", True),
        Key("name"),
    )
