"""The check that a resumed run has the tokens with which it began, and the cause if it has others."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from prepcli.core.errors import Key, Option, PrepError, text
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
    CONTENT_PARTS = (
        "contents of messages that are lists of parts are rendered in another way since then"
    )
    JSON_LISTS = "JSON files that are one list are read since then, where their lines were invalid"
    SINGLE_BOS = "a document that has the begin token gets no second one since then"


# Returns the identity of a store with another `data.add_bos` and without some changes.
Identify = Callable[[bool | None, Collection[IdentityChange]], str]


@dataclass(frozen=True, slots=True)
class TokenCause:
    """Why a run began with other tokens.

    Attributes:
        identity: Identity of the store with which it began.
        add_bos: Its `data.add_bos`.
        changes: The changes since its version.
    """

    identity: str
    add_bos: bool | None
    changes: tuple[IdentityChange, ...]

    @property
    def description(self) -> str:
        """The changes since its version, for messages."""
        return ", and ".join(change.value for change in self.changes)


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """The tokens with which a run began.

    Attributes:
        identities: Identity of each store.
        add_bos: Its `data.add_bos`.
    """

    identities: tuple[str, ...]
    add_bos: bool | None

    def encode(self) -> str:
        """Return these tokens as a text for the other processes of a job."""
        return json.dumps([self.identities, self.add_bos])

    @classmethod
    def decode(cls, encoded: str) -> RecordedTokens:
        """Return the tokens in a text of `encode`."""
        identities, add_bos = json.loads(encoded)
        return cls(tuple(identities), add_bos)

    def find_cause(self, add_bos: bool | None, identify: Identify) -> TokenCause | None:
        """Return why the run began with other tokens than those of a store. None if that is unknown.

        Args:
            add_bos: The `data.add_bos` of the store.
            identify: Computes the identity as earlier versions and settings had it.
        """
        for then, changes in _candidates(dict.fromkeys((add_bos, self.add_bos))):
            identity = identify(then, changes)
            if identity in self.identities:
                return TokenCause(identity, then, changes)
        return None

    def change_error(
        self, identity: str, add_bos: bool | None, cause: TokenCause | None, *, missing: Path | None
    ) -> PrepError:
        """Return the error for a store that is none of these.

        Args:
            identity: Identity of the store.
            add_bos: The `data.add_bos` of the store.
            cause: Why it is another one.
            missing: Folder of the store of the cause. None if it is in the cache.
        """
        restart = restart_hint()
        if cause is None:
            why = f"{' '.join(self.identities)}, now {identity}"
            hint = text("use the files with which the run began, on all hosts; {}", restart)
            return PrepError(CHANGED_DATA, why, hint)
        causes: list[str] = []
        hint = restart
        if cause.add_bos != add_bos:
            causes.append(f"{BOS_KEY}: {change_text((cause.add_bos, add_bos))}")
            keeps = text("{} keeps it", Key(BOS_KEY, cause.add_bos, is_override=True))
            hint = text("{}; {}", keeps, restart)
        if cause.changes:
            causes.append(cause.description)
        if cause.changes and missing is not None:
            # This version makes these tokens with no setting.
            causes.append(f"{missing} is missing or damaged")
            hint = text("the earlier version finishes the run; {}", restart)
        return PrepError(CHANGED_DATA, ", and ".join(causes), hint)


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
