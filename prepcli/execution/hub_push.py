"""Upload of a finished export to the Hugging Face hub in one commit.

No file is visible before the commit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.core.errors import RESUME_HINT, Option, PrepError, causes, text, usage_error
from prepcli.core.formatting import join_names
from prepcli.core.observer import Progress
from prepcli.execution.output import WORK_FOLDER
from prepcli.sources.side_files import resolve_small_file
from prepcli.stores.byte_ranges import DEFAULT_RETRY_POLICY, RetryPolicy
from prepcli.stores.hub_client import (
    CHECK_ENDPOINT,
    MALFORMED_ANSWER,
    NoAnswerError,
    install_retrying_client,
    is_malformed_answer,
    is_network_error,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_REPO_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_REVISION_PATTERN = re.compile(r"[A-Za-z0-9][\w./-]*", re.ASCII)
_WEIGHT_FILE_PATTERNS = (
    tuple(  # for each format: a single file, one of several files, and their index
        re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{suffix}|{stem}\.{suffix}\.index\.json")
        for stem, suffix in (("model", "safetensors"), ("flax_model", "msgpack"))
    )
)


@dataclass(frozen=True, slots=True)
class PushTarget:
    """Destination of an upload: a repository, the branch of the commit, and whether a new repository is private.

    A `revision` of None is the branch `main`.
    """

    repo: str
    revision: str | None = None
    private: bool = False


def parse_push_target(value: str, private: bool) -> PushTarget:
    """Parse `OWNER/NAME` or `OWNER/NAME@BRANCH`. Raise UsageError for any other text."""
    repo, separator, revision = value.partition("@")
    what = text("{} is invalid", Option("push", value))
    example = text("{}", Option("push", "OWNER/NAME@main"))
    # The rules of `huggingface_hub.utils.validate_repo_id`.
    if not _REPO_PATTERN.fullmatch(repo) or "--" in repo or ".." in repo or len(repo) > 96:
        raise usage_error(what, "it has the form OWNER/NAME or OWNER/NAME@BRANCH", example)
    # The rules of `git check-ref-format`, for the characters allowed by the pattern.
    if separator and (
        not _REVISION_PATTERN.fullmatch(revision)
        or ".." in revision
        or revision.endswith(("/", ".", ".lock"))
    ):
        raise usage_error(what, f"`{revision}` is not a valid branch name", example)
    return PushTarget(repo, revision or None, private)


def check_push(target: PushTarget, retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY) -> None:
    """Check that an upload can succeed, before the export is created.

    Args:
        target: Repository and branch.
        retry_policy: How long to wait for answers of the hub.

    Raises:
        PrepError: There is no token or no network, or the repository is public and should be private.
    """
    _set_hub_variables()
    install_retrying_client(retry_policy)
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError

    if HF_HUB_OFFLINE:
        raise PrepError(
            f"cannot push to {target.repo}", "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"
        )
    with _hub_errors(target):
        try:
            HfApi().whoami()
        except LocalTokenNotFoundError:
            why = "no token is configured"
            raise PrepError(
                f"cannot push to {target.repo}", why, "`hf auth login`, or set HF_TOKEN"
            ) from None
        try:
            # `whoami` proves that the token is valid. Whether it may write shows only at the upload.
            is_public = HfApi().model_info(target.repo).private is False
        except RepositoryNotFoundError:
            return
    if target.private and is_public:
        option = Option("private", True)
        raise PrepError(
            f"{target.repo} is public",
            text("{} makes new repositories private, but this one exists", option),
            text("make it private on its page, or omit {}", option),
        )


def push_folder(
    folder: Path,
    target: PushTarget,
    *,
    progress: Progress,
    retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY,
) -> str:
    """Upload a folder in one commit, and delete weights of an earlier push in the same format.

    Large files are uploaded one by one before the commit. Files already on the hub are skipped. The
    repository is listed afterwards to verify the commit.

    Args:
        folder: The finished export. It does not change.
        target: Repository and branch.
        progress: Receives the number of uploaded bytes.
        retry_policy: How long to wait for answers of the hub.

    Returns:
        URL of the commit.

    Raises:
        PrepError: The hub refused a request, or files are missing in the commit.
    """
    _set_hub_variables()
    install_retrying_client(retry_policy)
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    names: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] != WORK_FOLDER:
            # A link must not leave the folder.
            resolve_small_file(path, folder)
            names.append(name.as_posix())
    with _hub_errors(target):
        # None lets the hub choose: public, or the default of the organization. False would make the repository public
        # where an organization defaults to private.
        api.create_repo(target.repo, private=target.private or None, exist_ok=True)
        if target.revision:
            api.create_branch(target.repo, branch=target.revision, exist_ok=True)
        stale_names = _stale_weights(_list_repo(api, target), names)
        additions = [CommitOperationAdd(name, str(folder / name)) for name in names]
        # One file after another, so that progress can be reported
        progress.begin("push", sum(addition.upload_info.size for addition in additions))
        try:
            # `free_memory=False` keeps the path in the addition, which the commit reads for small files.
            for addition in additions:
                api.preupload_lfs_files(
                    target.repo, [addition], revision=target.revision, free_memory=False
                )
                progress.advance(addition.upload_info.size)
        finally:
            progress.end()
        # The same commit adds the new weights and deletes the old ones. Otherwise a revision would have both, and
        # transformers reads an old model.safetensors before the index of the new files.
        deletions = [CommitOperationDelete(name) for name in stale_names]
        commit = api.create_commit(
            target.repo,
            [*additions, *deletions],
            commit_message=f"{folder.name} by prep",
            revision=target.revision,
        )
        if not isinstance(commit.commit_url, str):
            raise PrepError(f"cannot push to {target.repo}", MALFORMED_ANSWER, CHECK_ENDPOINT)
        # The hub skips files that a .gitignore of the repository excludes, and reports success.
        if missing := sorted({*names} - {*_list_repo(api, target)}):
            why = f"the hub made a commit without {join_names(missing)}"
            hint = "does a .gitignore in the repository exclude them?"
            raise PrepError(f"cannot push all files to {target.repo}", why, hint)
    return commit.commit_url


def _list_repo(api: HfApi, target: PushTarget) -> list[str]:
    """Return the names of the files in the repository."""
    names = api.list_repo_files(target.repo, revision=target.revision)
    if not all(isinstance(name, str) for name in names):
        raise PrepError(f"cannot push to {target.repo}", MALFORMED_ANSWER, CHECK_ENDPOINT)
    return names


def _stale_weights(remote_names: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return weights of an earlier push in the same format, which readers would mix with the new ones."""
    stale: list[str] = []
    for pattern in _WEIGHT_FILE_PATTERNS:
        # E.g. a push of model.safetensors leaves flax_model.msgpack of the repository alone.
        if not any(map(pattern.fullmatch, names)):
            continue
        for name in remote_names:
            if name not in names and pattern.fullmatch(name):
                stale.append(name)
    return stale


def _set_hub_variables() -> None:
    """Turn off the progress bars and warnings of the hub library."""
    # huggingface_hub reads both variables while it is imported, so this comes before its import.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")


@contextmanager
def _hub_errors(target: PushTarget) -> Iterator[None]:
    """Convert errors of the hub library to PrepErrors, without URLs and tokens.

    Other errors pass.
    """
    try:
        yield
    except PrepError:
        raise
    except Exception as error:
        prep_error = _explain_hub_error(error, f"cannot push to {target.repo}")
        if prep_error is None:
            raise
        raise prep_error from error


def _explain_hub_error(raised: Exception, what: str) -> PrepError | None:
    """Return the PrepError for the first known error in the chain of causes, or None without one."""
    from huggingface_hub.errors import HfHubHTTPError

    for error in causes(raised):
        if isinstance(error, NoAnswerError):
            if error.status:
                return PrepError(what, *_explain_status(error.status))
            return PrepError(what, str(error), RESUME_HINT)
        # Compared by name: the class is from the installed HTTP library, requests or httpx.
        if type(error).__name__ == "TooManyRedirects":
            return PrepError(what, "the hub answers with a redirect loop", CHECK_ENDPOINT)
        if isinstance(error, HfHubHTTPError):
            return PrepError(what, *_explain_status(error.response.status_code))
        if is_network_error(error):
            return PrepError(
                what, "the hub cannot be reached, or closed the connection", RESUME_HINT
            )
        if is_malformed_answer(error):
            return PrepError(what, MALFORMED_ANSWER, CHECK_ENDPOINT)
    return None


def _explain_status(status: int) -> tuple[str, str]:
    """Return the cause of an HTTP status of the hub, and a hint."""
    hints: dict[int, tuple[str, str]] = {
        401: (": the token is invalid", "`hf auth login`, or set HF_TOKEN"),
        403: (": the token has no write access", "use a token with write access"),
        404: (": unknown owner, repository or branch", "check the spelling"),
        409: (": the branch changed meanwhile", RESUME_HINT),
        413: (": a file is too large", text("{}", Option("shard_size", "5GB"))),
    }
    why, hint = hints.get(status, ("", RESUME_HINT))
    return f"HTTP {status} from the hub{why}", hint
