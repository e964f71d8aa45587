"""Errors of huggingface_hub as a `PrepError` with a hint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from prepcli.core.errors import PrepError
from prepcli.stores.hub_client import (
    CHECK_ENDPOINT,
    MALFORMED_ANSWER,
    NoAnswerError,
    is_malformed_answer,
)
from prepcli.stores.hub_ranges import HTTP_LIBRARIES
from prepcli.stores.retries import TIMEOUT_VARIABLE

# huggingface_hub 1.x has no exception type for this error.
WRONG_SIZE = "Consistency check failed"
TOKEN_HINT = "`hf auth login`, or set HF_TOKEN"


@contextmanager
def translate_errors(
    hub_id: str,
    revision: str | None,
    *,
    offline: bool = False,
    is_streamed: bool = False,
    repo_type: str = "model",
) -> Iterator[None]:
    """Convert errors of huggingface_hub in the block to PrepErrors. Other errors are raised unchanged.

    Args:
        hub_id: `OWNER/NAME`.
        revision: The requested revision.
        offline: Whether only the cache is used.
        is_streamed: Whether the model is read remotely. The cache cannot replace the hub then.
        repo_type: `model` or `dataset`.
    """
    try:
        yield
    except PrepError:
        raise
    except Exception as error:
        if is_streamed and is_unreachable(error) and not isinstance(error, NoAnswerError):
            why = f"the hub cannot be reached{at_endpoint()}"
            raise PrepError(f"cannot stream {hub_id}", why, "check the network") from error
        translated = _to_prep_error(error, hub_id, revision, offline=offline, repo_type=repo_type)
        if translated is None:
            raise
        raise translated from error


def _to_prep_error(
    error: Exception, hub_id: str, revision: str | None, *, offline: bool, repo_type: str
) -> PrepError | None:
    """Return the PrepError for an error of huggingface_hub, or None for other errors."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RevisionNotFoundError,
    )

    what = f"cannot read {hub_id}"
    page = page_url(hub_id, repo_type)
    if isinstance(error, NoAnswerError):
        return _no_answer_error(what, error, repo_type, page=page)
    if isinstance(error, RevisionNotFoundError):
        return PrepError(
            f"{hub_id} has no revision `{revision or 'main'}`",
            "HTTP 404 from the hub",
            "see its page for revisions",
        )
    if isinstance(error, HfHubHTTPError):
        is_gated = isinstance(error, GatedRepoError)
        return _status_error(
            what, error.response.status_code, repo_type, page=page, is_gated=is_gated
        )
    if isinstance(error, HFValidationError):
        return PrepError(what, str(error), "a hub id has the form OWNER/NAME")
    if is_malformed_answer(error):
        return PrepError(what, MALFORMED_ANSWER, CHECK_ENDPOINT)
    if type(error).__name__ == "TooManyRedirects":
        return PrepError(
            what, f"the hub answers with a redirect loop{at_endpoint()}", CHECK_ENDPOINT
        )
    if isinstance(error, OSError) and WRONG_SIZE in str(error):
        why = "a file has a different number of bytes than the hub announced"
        return PrepError(what, why, "try again; a proxy may have changed the answer")
    # The library's errors about the cache are subclasses.
    is_missing = isinstance(error, FileNotFoundError)
    if is_missing and offline:
        variable = os.environ.get("HF_HUB_OFFLINE", "1")
        why = f"no such folder here, not in the cache and HF_HUB_OFFLINE={variable}"
        return PrepError(what, why, "check the name, or run once with network")
    if is_missing or is_unreachable(error):
        why = f"the hub cannot be reached{at_endpoint()}, and the {repo_type} is not in the cache"
        return PrepError(what, why, "check the network, or name a local folder")
    return None


def page_url(hub_id: str, repo_type: str = "model") -> str:
    """Return the address of a repository's page, where access to it is requested."""
    from huggingface_hub.constants import ENDPOINT

    if repo_type == "dataset":
        return f"{ENDPOINT}/datasets/{hub_id}"
    return f"{ENDPOINT}/{hub_id}"


def _no_answer_error(what: str, error: NoAnswerError, repo_type: str, *, page: str) -> PrepError:
    if error.status:
        return _status_error(what, error.status, repo_type, page=page, is_gated=False)
    why = f"{error}, and the {repo_type} is not in the cache"
    return PrepError(
        what,
        why,
        f"check the network, or wait longer: {TIMEOUT_VARIABLE}=60 sets the seconds per answer",
    )


def at_endpoint() -> str:
    """Return the address of the hub for messages, if it is not the default one."""
    endpoint = os.environ.get("HF_ENDPOINT")
    if endpoint:
        return f" at HF_ENDPOINT={endpoint}"
    return ""


def _status_error(
    what: str, status: int, repo_type: str, *, page: str, is_gated: bool
) -> PrepError:
    """Return the PrepError for an HTTP status of the hub."""
    if is_gated:
        why = f"HTTP {status} from the hub: access must be granted to your account"
        return PrepError(what, why, f"accept its licence at {page}, then {TOKEN_HINT}")
    # The hub does not tell a private repository from a missing one to a client without access.
    if status in (401, 403):
        why = f"HTTP {status} from the hub: it is private, or there is no such {repo_type}"
        return PrepError(what, why, f"check {page}, then {TOKEN_HINT}")
    if status == 404:
        why = f"HTTP 404 from the hub: there is no such {repo_type}"
        if repo_type == "model":
            why = f"not a folder here, and {why}"
        return PrepError(what, why, "check the spelling")
    if _is_server_trouble(status):
        return PrepError(
            what,
            f"HTTP {status} from the hub",
            "try again later; a download continues where it stopped",
        )
    return PrepError(what, f"HTTP {status} from the hub", f"check {page}")


def is_unreachable(error: Exception) -> bool:
    """Return whether no hub answered, given an error."""
    from huggingface_hub.errors import HfHubHTTPError

    from_library = type(error).__module__.partition(".")[0] in HTTP_LIBRARIES
    return (
        from_library or isinstance(error, ConnectionError | TimeoutError | NoAnswerError)
    ) and not isinstance(error, HfHubHTTPError)


def is_hub_down(error: Exception) -> bool:
    """Return whether the hub is unreachable, or answers with a server error."""
    from huggingface_hub.errors import HfHubHTTPError

    has_trouble = isinstance(error, HfHubHTTPError) and _is_server_trouble(
        error.response.status_code
    )
    return has_trouble or is_unreachable(error)


def _is_server_trouble(status: int) -> bool:
    return status == 429 or status >= 500
