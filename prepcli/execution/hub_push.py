"""A finished export, uploaded to the hub in one commit: until that is made, nobody sees any of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.console.lists import join_names
from prepcli.console.progress import Progress
from prepcli.errors import PrepError, usage_error
from prepcli.execution.staging import WORK_FOLDER
from prepcli.remote.hub_client import (
    CHECK_ENDPOINT,
    MALFORMED_ANSWER,
    NoAnswerError,
    install_retrying_client,
    is_malformed_answer,
)
from prepcli.remote.hub_ranges import is_network_error
from prepcli.remote.retries import DEFAULT_RETRY_POLICY, RetryPolicy
from prepcli.sources.symlinks import resolve_small_file

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

_REPO_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_REVISION_PATTERN = re.compile(r"[A-Za-z0-9][\w./-]*", re.ASCII)
_WEIGHT_FILE_PATTERNS = tuple(  # of each format: a file, one of several, and the index of these
    re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{suffix}|{stem}\.{suffix}\.index\.json")
    for stem, suffix in (("model", "safetensors"), ("flax_model", "msgpack"))
)
_RETRY_HINT = "run the same command again: what is uploaded is not uploaded twice"


@dataclass(frozen=True, slots=True)
class PushTarget:
    """A repository, the branch in it that gets the commit, and whether nobody else may see it."""

    repo: str
    revision: str | None = None
    private: bool = False


def parse_push_target(text: str, private: bool) -> PushTarget:
    """`OWNER/NAME` or `OWNER/NAME@BRANCH`; a usage PrepError for what is neither."""
    repo, at, revision = text.partition("@")
    if not _REPO_PATTERN.fullmatch(repo) or "--" in repo or ".." in repo or len(repo) > 96:
        raise usage_error(f"`--push {text}` names no repository", "it has the form OWNER/NAME or OWNER/NAME@BRANCH")
    if at and (not _REVISION_PATTERN.fullmatch(revision) or ".." in revision or revision.endswith(("/", ".", ".lock"))):
        raise usage_error(f"`--push {text}` names no branch", f"`{revision}` cannot be the name of one")
    return PushTarget(repo, revision or None, private)


def check_push(target: PushTarget, patience: RetryPolicy = DEFAULT_RETRY_POLICY) -> None:
    """Raise what would make an upload fail, as far as it is known before there is anything to upload: no token, no
    network, a repository that is public although it should not be."""
    _set_variables()
    install_retrying_client(patience)
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError

    if HF_HUB_OFFLINE:
        raise PrepError(f"cannot push to {target.repo}", "HF_HUB_OFFLINE asks for no network")
    with _hub_errors(target):
        try:
            HfApi().whoami()
        except LocalTokenNotFoundError:
            why = "there is no token: the hub would not know who you are"
            raise PrepError(f"cannot push to {target.repo}", why, "`hf auth login`, or set HF_TOKEN") from None
        try:
            is_public = HfApi().model_info(target.repo).private is False
        except RepositoryNotFoundError:
            return
    if target.private and is_public:
        why = "`--private` makes new repositories private, and this one is there"
        raise PrepError(f"{target.repo} is public", why, "make it private on its page, or leave `--private` out")


def push_folder(
    folder: Path, target: PushTarget, progress: Progress, patience: RetryPolicy = DEFAULT_RETRY_POLICY
) -> str:
    """Upload a folder as it is, and take away what an earlier push left of other weights in its format; the address of
    the commit.

    Large files go one by one before the commit; those that are there are not sent again. Afterwards the repository is
    listed: an answer alone proves nothing. Raises PrepError, and the folder is as it was.
    """
    _set_variables()
    install_retrying_client(patience)
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, names = HfApi(), _file_names(folder)
    with _hub_errors(target):
        api.create_repo(target.repo, private=target.private or None, exist_ok=True)
        if target.revision:
            api.create_branch(target.repo, branch=target.revision, exist_ok=True)
        old = _stale_weights(_list_repo(api, target), names)
        added = [CommitOperationAdd(name, str(folder / name)) for name in names]
        _upload_files(api, target, added, progress)
        deleted = [CommitOperationDelete(name) for name in old]
        made = api.create_commit(
            target.repo, [*added, *deleted], commit_message=f"{folder.name} by prep", revision=target.revision
        )
        _check_pushed(made.commit_url, names, _list_repo(api, target), target)
    return made.commit_url


def _list_repo(api: HfApi, target: PushTarget) -> list[str]:
    """Return the names of the files in the repository."""
    found = api.list_repo_files(target.repo, revision=target.revision)
    if not all(isinstance(name, str) for name in found):
        raise PrepError(f"cannot push to {target.repo}", MALFORMED_ANSWER, CHECK_ENDPOINT)
    return found


def _check_pushed(url: object, names: Sequence[str], there: Sequence[str], target: PushTarget) -> None:
    """Raise PrepError unless the commit has an address and the repository holds all files."""
    if not isinstance(url, str):
        raise PrepError(f"cannot push to {target.repo}", MALFORMED_ANSWER, CHECK_ENDPOINT)
    if missing := sorted({*names} - {*there}):
        why = f"the hub made a commit without {join_names(missing)}"
        hint = "does a .gitignore in the repository exclude them?"
        raise PrepError(f"cannot push all files to {target.repo}", why, hint)


def _stale_weights(there: Sequence[str], names: Sequence[str]) -> list[str]:
    """What an earlier push left of weights in the format of the new ones: readers would mix them up."""
    ours = [kind for kind in _WEIGHT_FILE_PATTERNS if any(map(kind.fullmatch, names))]
    return [name for name in there if name not in names and any(kind.fullmatch(name) for kind in ours)]


def _upload_files(api: HfApi, target: PushTarget, added: Sequence[CommitOperationAdd], progress: Progress) -> None:
    """One file after another, so that there is something to tell while it takes hours."""
    progress.begin("push", sum(each.upload_info.size for each in added))
    try:
        for each in added:
            api.preupload_lfs_files(target.repo, [each], revision=target.revision, free_memory=False)
            progress.advance(each.upload_info.size)
    finally:
        progress.end()


def _file_names(folder: Path) -> list[str]:
    """All files of an output by their path in it. PrepError for a link that leaves it."""
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] != WORK_FOLDER
    ]
    for path in paths:
        resolve_small_file(path, folder)
    return [path.relative_to(folder).as_posix() for path in paths]


def _set_variables() -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")


@contextmanager
def _hub_errors(target: PushTarget) -> Iterator[None]:
    """Errors of the library as PrepErrors, without addresses and tokens; others pass."""
    try:
        yield
    except PrepError:
        raise
    except Exception as error:
        told = _explain(error, f"cannot push to {target.repo}")
        if told is None:
            raise
        raise told from error


def _explain(error: BaseException | None, what: str) -> PrepError | None:
    """By the first error of the chain that says something: the library wraps those of single files."""
    from huggingface_hub.errors import HfHubHTTPError

    while error is not None:
        if isinstance(error, NoAnswerError):
            return _status_error(what, error.status) if error.status else PrepError(what, str(error), _RETRY_HINT)
        if type(error).__name__ == "TooManyRedirects":
            return PrepError(what, "the hub redirects in a circle", CHECK_ENDPOINT)
        if isinstance(error, HfHubHTTPError):
            return _status_error(what, error.response.status_code)
        if is_network_error(error):
            return PrepError(what, "the hub cannot be reached, or hung up", _RETRY_HINT)
        if is_malformed_answer(error):
            return PrepError(what, MALFORMED_ANSWER, CHECK_ENDPOINT)
        error = error.__cause__
    return None


def _status_error(what: str, status: int) -> PrepError:
    if status == 401:
        return PrepError(what, "the hub says 401: it does not take the token", "`hf auth login`, or set HF_TOKEN")
    if status == 403:
        return PrepError(what, "the hub says 403: the token may not write there", "use a token that may")
    if status == 404:
        return PrepError(what, "the hub says 404: there is no such owner, repository or branch", "check the spelling")
    if status == 409:
        return PrepError(what, "the hub says 409: the branch changed meanwhile", _RETRY_HINT)
    if status == 413:
        return PrepError(what, "the hub says 413: a file is too large for it", "`prep export --shard-size 5GB`")
    return PrepError(what, f"the hub says {status}", _RETRY_HINT)
