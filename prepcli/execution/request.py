"""The request of a conversion: a plan, its source, the treatment of earlier outputs, and its identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prepcli.core import version
from prepcli.engine.digest import digest, digest_pieces
from prepcli.execution.workers import WorkerPool
from prepcli.planning.plan import Plan, encode_text, iter_text
from prepcli.sources.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionRequest:
    """A plan to execute in a folder or below a URL.

    `allow_overflow` decides between an error and infinities. No other option changes a byte of the output.

    Attributes:
        plan: The plan of the whole output.
        run_id: Digest of the plan. It identifies the run in notes and manifests.
        source: The opened source of the plan.
        pool: The workers of this process, its share of the plan, its memory and its progress.
        overwrite: Replace an existing output.
        restart: Delete what an unfinished earlier run has written, and write it again.
        allow_overflow: Cast out-of-range values to infinity.
        note: Prints a line for the user.
    """

    plan: Plan
    run_id: str
    source: Source
    pool: WorkerPool
    overwrite: bool
    restart: bool
    allow_overflow: bool
    note: Callable[[str], None]


def plan_digest(plan: Plan) -> str:
    """Return the digest of a plan. Equal digests imply equal outputs, given unchanged sources."""
    return "xxh3:" + digest_pieces(piece.encode() for piece in iter_text(plan))


def make_run_identity(plan: Plan, run_id: str) -> dict[str, object]:
    """Return the identity of a run, given the digest of its plan. Runs with equal identities write equal bytes."""
    source_digest = digest(encode_text(plan.source_files).encode())
    return {
        "request": plan.request,
        "source": source_digest,
        "plan": run_id,
        "prep": version(),
    }
