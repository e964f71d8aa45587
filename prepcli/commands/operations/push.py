"""`push` of an export: convert, then upload the complete folder to the hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from prepcli.commands.operations.opening import CommonOptions
from prepcli.commands.operations.results import Conversion
from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.core.observer import Observer
from prepcli.execution.hub_push import PushTarget, check_push, push_folder
from prepcli.planning.shares import requested_share
from prepcli.stores.byte_ranges import RetryPolicy, retry_policy_from_env


def check_private(private: bool) -> None:
    """Raise UsageError for the option `private` without `push`."""
    if private:
        raise usage_error(
            text("{} requires {}", Option("private", True), Option("push")),
            "it sets the visibility of a new repository",
            text("{}", Option("push", "OWNER/NAME")),
        )


def convert_and_push(
    target: PushTarget,
    common: CommonOptions,
    observer: Observer,
    convert: Callable[[], Conversion],
) -> Conversion:
    """Convert, and upload the folder to the hub. An output of an earlier run is not converted again.

    The details of the returned conversion have the repository and the URL of the commit.

    Raises:
        PrepError: The upload is not possible (checked before the conversion), the conversion failed, or the upload
            failed. The output is complete in the last case.
    """
    share, _ = requested_share(common.process_options.processes, os.environ)
    if share.count > 1:
        why = "several processes write this output"
        hint = "upload it when they are done"
        what = text("{} is not supported with several processes", Option("push"))
        raise usage_error(what, why, hint)
    retry_policy = retry_policy_from_env(os.environ, observer.note)
    # A conversion may take an hour, so a missing token is reported before it.
    check_push(target, retry_policy)
    conversion = convert()
    if common.dry_run:
        observer.note(f"would push it to {target.repo}")
        return conversion
    return _push_output(conversion, target, observer, retry_policy)


def _push_output(
    conversion: Conversion, target: PushTarget, observer: Observer, retry_policy: RetryPolicy
) -> Conversion:
    """Upload the folder of a conversion."""
    out = conversion.path
    try:
        commit_url = push_folder(
            out, target, progress=observer.progress(), retry_policy=retry_policy
        )
    except PrepError as error:
        raise PrepError(
            error.what, text("{}; the export in {} is complete", error.why, out), error.hint
        ) from error
    observer.note(f"pushed to {commit_url}")
    pushed = {"repo": target.repo, "revision": target.revision or "main", "commit": commit_url}
    return replace(conversion, details={**conversion.details, "pushed": pushed})
