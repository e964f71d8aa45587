"""Load the parameters of a checkpoint onto devices. The function imports jax."""

from __future__ import annotations

from typing import Literal, Unpack

from prepcli.commands.operations.open_params import open_params
from prepcli.commands.operations.opening import common_options, open_checkpoint
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.options import SourceOptions
from prepcli.core.observer import Observer, Progress, observer_of
from prepcli.core.option_spec import PathLike
from prepcli.models.param_tree import Tree
from prepcli.models.verbatim import CANNOT_TRAIN
from prepcli.restore.earlier_checkpoints import check_without_checksums
from trainer.run.verbatim_params import load_verbatim_params

LoadDtype = Literal["float32", "bfloat16", "keep"]


@public
def load_params(
    checkpoint: PathLike,
    mesh: str | None = None,
    *,
    dtype: LoadDtype = "float32",
    verify: bool = True,
    ema: bool = False,
    verbatim: bool | None = None,
    progress: Progress | Observer | None = None,
    **options: Unpack[SourceOptions],
) -> Tree:
    """Read the parameters of a checkpoint onto a device mesh.

    Each device gets only the byte ranges of its own shards. The source may have any format that prep reads.
    Sources that are not in prep's default layout are converted while they are read: layers stacked on the first axis,
    the vocabulary padded to the size that the mesh divides. No file is written.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        mesh: `dp,fsdp,mp` sizes, or named axes such as `fsdp:64,mp:4`. None: the first device.
        dtype: Dtype of the arrays, "float32" or "bfloat16". "keep": the stored dtype of each parameter.
        verify: Compare every byte with the checkpoint's checksums or digests.
        ema: Take the moving average of a run's parameters.
        verbatim: Read the tensors under the names of the file. Default: if no family has the model_type. False raises
            then.
        progress: Receives the bytes downloaded or checked. Default: none. See `Progress`.
        **options: See `SourceOptions`.

    Returns:
        Nested dict of arrays, sharded by the family's partition rules. Weights are `[out, in]`. The query weight of the
        stacked layers is `[layers, heads, head_dim, embed]`. Of a checkpoint without a family, a dict of arrays by path
        in the file, with `*` for stacked numbers. Its 64-bit tensors are NumPy arrays.

    Raises:
        UsageError: An argument is invalid, or the mesh does not fit the devices or does not divide a parameter.
        DamagedError: Files of the checkpoint are damaged.
        PrepError: The checkpoint cannot be read, or lacks a parameter.
    """
    observer = observer_of(progress)
    common = common_options(checkpoint, None, {**options, "ema": ema, "verbatim": verbatim})
    located, source = open_checkpoint(common, observer)
    if source.family.is_verbatim:
        observer.warn(f"{source.display_name}: {CANNOT_TRAIN}")
        return load_verbatim_params(
            source,
            located.files.path,
            mesh,
            dtype=None if dtype == "keep" else dtype,
            verify=verify,
            on_unchecked=lambda: check_without_checksums(source, source.tensors, observer),
        )
    with open_params(located, source, mesh, verify=verify, observer=observer) as opened:
        if dtype == "keep":
            return opened.load(opened.stored_dtype)
        return opened.load(lambda path: dtype)
