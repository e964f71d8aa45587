"""The memory estimate of a training step as a table and as fields, for `prep plan` and `prep train --dry-run`."""

from __future__ import annotations

from prepcli.core.formatting import count_text, format_bytes
from prepcli.core.tables import format_table
from prepcli.models.chunk_sizes import chunk_length
from prepcli.models.memory_estimate import MemoryEstimate
from prepcli.models.memory_inputs import MemoryInputs


def memory_table(run: MemoryInputs, estimated: MemoryEstimate, available: str = "") -> str:
    """Return the estimate of one device's memory as a table.

    Args:
        run: Inputs of the estimate.
        estimated: The estimate.
        available: Text for the memory of the device. Empty omits the row.
    """
    length = run.local_length(run.seq_length)
    source_length = run.local_length(run.source_length)
    tile = run.score_tile(length, max(length, source_length))
    shape = [run.local_batch_size, run.local_extent("heads"), *tile]
    chunk = chunk_length(run.head_chunk_size, length)
    layers = count_text(len(run.arch_config.sliding_windows), "layer")
    policy = run.remat_policy if isinstance(run.remat_policy, str) else ", ".join(run.remat_policy)
    sizes = {
        "parameters": estimated.parameters,
        "moments": estimated.moments,
        "gradients and updates": estimated.gradients,
        "batch": estimated.batch,
        f"saved by {layers} (remat {policy})": estimated.saved,
        "one layer at work": estimated.layer,
        # The scores are already counted in `one layer at work`, so the peak does not add them.
        **({f"  of it scores {shape}": estimated.scores} if estimated.scores else {}),
        f"head and loss, {chunk} tokens": estimated.head,
        "peak": estimated.peak,
    }
    rows = [(name, format_bytes(nbytes)) for name, nbytes in sizes.items()]
    rows += [("in host memory", format_bytes(estimated.offloaded))] if estimated.offloaded else []
    rows += [("available", available)] if available else []
    return format_table(rows, ["memory of one device, estimated", ""], right_aligned=[""])


def memory_fields(estimated: MemoryEstimate, available_nbytes: int | None) -> dict[str, int | None]:
    """Return the estimate in bytes, for the JSON object."""
    names = (
        "parameters",
        "moments",
        "gradients",
        "batch",
        "saved",
        "layer",
        "scores",
        "head",
        "peak",
        "offloaded",
    )
    fits = None if available_nbytes is None else estimated.peak <= available_nbytes
    return {name: getattr(estimated, name) for name in names} | {
        "available": available_nbytes,
        "fits": fits,
    }
