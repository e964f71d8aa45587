"""Loaders of a checkpoint from a bucket: one process of a load in `bench.load_race`.

    python -m bench.race_loaders LOADER JOB

JOB is the JSON of a `Job`. The process imports the loader and joins the others, prints `ready`, waits for a line on
stdin, loads its shards and prints a `LoadResult` as JSON. An error of the loader is a result too.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from bench.throttled_store import BUCKET

Shards = dict[str, np.ndarray]

ROWS = "rows"
COLUMNS = "columns"
SPLITS = (ROWS, COLUMNS)
# LLaMA's rules split these weights along the other dim.
OUTPUT_PROJECTIONS = ("o_proj", "down_proj", "attn.o.", "mlp.down.")
NORM = "norm"
PREP_MODULES = (
    "prepcli.commands.operations.params",
    "trainer.run.params",
    "prepcli.sources.openers.tensor_files",
    "prepcli.models.families.llama",
    "trainer.training.checkpoint",
    "trainer.nn.model_spec",
    "obstore.store",
)
MAX_ERROR_CHARS = 200


@dataclass(frozen=True)
class Job:
    """The load of one process.

    Attributes:
        endpoint: URL of the store.
        index: Number of this process.
        processes: Number of processes.
        split: One of SPLITS.
        port: Port for the processes to meet.
        scratch: Folder of this process for downloads.
    """

    endpoint: str
    index: int
    processes: int
    split: str
    port: int
    scratch: str

    def mesh(self) -> str:
        """Return prep's mesh: mp splits the rows of LLaMA's queries, fsdp the columns."""
        if self.split == ROWS:
            return f"1,1,{self.processes}"
        return f"1,{self.processes},1"


@dataclass(frozen=True)
class LoadResult:
    """The result of one process.

    Attributes:
        nbytes: Bytes of its shards.
        word_sum: Sum of all 16-bit words of the sharded matrices, modulo 2^64.
        cpu_s: CPU time of the load.
        error: First line of the loader's error, or "".
    """

    nbytes: int = 0
    word_sum: int = 0
    cpu_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class RaceLoader:
    """A loader of the race.

    Attributes:
        prepare: Imports the library and joins the other processes.
        load: Returns the shards of this process.
    """

    prepare: Callable[[Job], object]
    load: Callable[[Job], Shards]


def word_sum(arrays: Iterable[np.ndarray]) -> int:
    """Return the sum of all 16-bit words, modulo 2^64. It depends on neither order nor layout."""
    total = sum(int(array.view(np.uint16).sum(dtype=np.uint64)) for array in arrays)
    return total % (1 << 64)


def shard_index(name: str, shape: tuple[int, ...], job: Job) -> tuple[slice, ...]:
    """Return one process's part of a matrix of a Hugging Face file. Norms are whole."""
    whole = tuple(slice(None) for _ in shape)
    if len(shape) < 2:
        return whole
    is_output = any(part in name for part in OUTPUT_PROJECTIONS)
    dim = int((job.split == COLUMNS) != is_output)
    return _split(whole, shape, dim, job)


def leaf_index(path: str, shape: tuple[int, ...], job: Job) -> tuple[slice, ...]:
    """Return one process's part of a leaf of prep's tree.

    Layers are stacked on the first dim. The queries are [layers, heads, head_dim, embed], the output projection is
    [layers, embed, heads, head_dim].
    """
    whole = tuple(slice(None) for _ in shape)
    if NORM in path:
        return whole
    matrix_start = int(path.startswith("params.layers."))
    is_output = any(part in path for part in OUTPUT_PROJECTIONS)
    first_dim = matrix_start
    second_dim = len(shape) - 1
    if is_output and len(shape) == 4:
        second_dim = 2
    is_first = (job.split == ROWS) != is_output
    dim = first_dim if is_first else second_dim
    return _split(whole, shape, dim, job)


def _split(
    whole: tuple[slice, ...], shape: tuple[int, ...], dim: int, job: Job
) -> tuple[slice, ...]:
    extent = shape[dim] // job.processes
    part = slice(job.index * extent, (job.index + 1) * extent)
    return (*whole[:dim], part, *whole[dim + 1 :])


def join_with_jax(job: Job) -> None:
    """Connect the processes, and start the CPU device."""
    import jax

    if job.processes > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{job.port}",
            num_processes=job.processes,
            process_id=job.index,
            cluster_detection_method="deactivate",
        )
    jax.block_until_ready(jax.numpy.zeros(()))


def local_shards(tree: Any) -> Shards:
    """Return the shards of JAX arrays on this process's device."""
    import jax

    shards: Shards = {}
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shards[name] = np.asarray(array.addressable_shards[0].data)
    return shards


def prepare_prep(job: Job) -> None:
    """Import all modules of `prep.load_params`, without waiting for their first use."""
    for module in PREP_MODULES:
        import_module(module)
    join_with_jax(job)


def load_folder_with_prep(job: Job) -> Shards:
    """Load the Hugging Face folder with `prep.load_params`."""
    import prepcli as prep

    return local_shards(prep.load_params(f"s3://{BUCKET}/model", job.mesh(), dtype="keep"))


def load_item_with_prep(job: Job) -> Shards:
    """Load the Orbax item with `prep.load_params`."""
    import prepcli as prep

    return local_shards(prep.load_params(f"s3://{BUCKET}/item", job.mesh(), dtype="keep"))


def prepare_orbax(job: Job) -> None:
    """Import Orbax."""
    import_module("orbax.checkpoint")
    join_with_jax(job)


def load_with_orbax(job: Job) -> Shards:
    """Restore the item with Orbax."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        return local_shards(checkpointer.restore(f"s3://{BUCKET}/item"))


def prepare_orbax_safetensors(job: Job) -> None:
    """Import Orbax v1."""
    import_module("orbax.checkpoint.experimental.v1")
    join_with_jax(job)


def load_safetensors_with_orbax(job: Job) -> Shards:
    """Load the folder with the safetensors loader of Orbax v1."""
    import jax
    import orbax.checkpoint.experimental.v1 as orbax
    from etils import epath
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    folder = epath.Path(f"s3://{BUCKET}/model")
    mesh = Mesh(jax.devices(), ("devices",))
    with orbax.Context(checkpoint_layout=orbax.options.CheckpointLayout.SAFETENSORS):
        metadata: Any = orbax.pytree_metadata(folder).metadata
        target: dict[str, Any] = {}
        for name, leaf in metadata.items():
            index = shard_index(name, leaf.shape, job)
            axes = ["devices" if part != slice(None) else None for part in index]
            sharding = NamedSharding(mesh, PartitionSpec(*axes))
            target[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return local_shards(orbax.load_pytree(folder, target))


def prepare_tensorstore(job: Job) -> None:
    """Import TensorStore."""
    import_module("tensorstore")


def load_with_tensorstore(job: Job) -> Shards:
    """Read the item's arrays with TensorStore's own S3 driver, all at once."""
    import tensorstore as ts

    base = {
        "driver": "s3",
        "bucket": BUCKET,
        "path": "item/",
        "endpoint": job.endpoint,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "anonymous"},
    }
    context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}})
    items = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#ocdbt"}
    keys = ts.KvStore.open(items, context=context).result().list().result()
    paths = [key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray")]
    opened = dict[str, Any]()
    for path in paths:
        spec = {"driver": "zarr", "kvstore": {**items, "path": f"{path}/"}}
        opened[path] = ts.open(spec, context=context, open=True)
    reads = dict[str, Any]()
    for path, future in opened.items():
        store = future.result()
        reads[path] = store[leaf_index(path, store.shape, job)].read()
    return {path: read.result() for path, read in reads.items()}


def prepare_runai(job: Job) -> None:
    """Import the streamer."""
    import_module("runai_model_streamer")


def prepare_runai_group(job: Job) -> None:
    """Import the streamer, and join torch's process group for the exchange of tensors."""
    import torch.distributed

    prepare_runai(job)
    address = f"tcp://127.0.0.1:{job.port}"
    torch.distributed.init_process_group(
        "gloo", init_method=address, rank=job.index, world_size=job.processes
    )


def load_with_runai(job: Job) -> Shards:
    """Stream the files, and keep this process's part of each tensor."""
    streamer: Any = import_module("runai_model_streamer")
    paths = streamer.list_safetensors(f"s3://{BUCKET}/model")
    shards: Shards = {}
    with streamer.SafetensorsStreamer() as stream:
        stream.stream_files(paths, is_distributed=True)
        for name, tensor in stream.get_tensors():
            array = tensor.numpy()
            shards[name] = array[shard_index(name, array.shape, job)].copy()
    return shards


def prepare_download(job: Job) -> None:
    """Import boto3 and safetensors."""
    import_module("boto3")
    import_module("safetensors.numpy")


def prepare_fastsafetensors(job: Job) -> None:
    """Import boto3 and fastsafetensors."""
    import_module("boto3")
    import_module("fastsafetensors")


def download(job: Job) -> list[Path]:
    """Download the missing weight files of this process, and return all paths."""
    boto3: Any = import_module("boto3")
    client = boto3.client("s3", endpoint_url=job.endpoint)
    folder = Path(job.scratch)
    paths: list[Path] = []
    for entry in client.list_objects_v2(Bucket=BUCKET, Prefix="model/")["Contents"]:
        path = folder / entry["Key"].rpartition("/")[2]
        if path.suffix != ".safetensors":
            continue
        if not path.exists():
            # boto3 writes to a temporary name, and renames the whole file.
            client.download_file(BUCKET, entry["Key"], str(path))
        paths.append(path)
    return paths


def load_with_safetensors(job: Job) -> Shards:
    """Download the files, and read this process's part of each tensor."""
    from safetensors import safe_open

    shards: Shards = {}
    for path in download(job):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                tensor = file.get_slice(name)
                shape = tuple(tensor.get_shape())
                shards[name] = tensor[shard_index(name, shape, job)]
    return shards


def load_with_fastsafetensors(job: Job) -> Shards:
    """Download the files, and read them with fastsafetensors without GPUDirect Storage."""
    library: Any = import_module("fastsafetensors")
    paths = [str(path) for path in download(job)]
    loader = library.SafeTensorsFileLoader(library.SingleGroup(), "cpu", nogds=True)
    shards: Shards = {}
    loader.add_filenames({0: paths})
    try:
        buffers = loader.copy_files_to_device()
        for name in loader.get_keys():
            array = buffers.get_tensor(name).numpy()
            shards[name] = array[shard_index(name, array.shape, job)].copy()
        buffers.close()
    finally:
        loader.close()
    return shards


LOADERS: Mapping[str, RaceLoader] = {
    "prep, folder": RaceLoader(prepare_prep, load_folder_with_prep),
    "prep, item": RaceLoader(prepare_prep, load_item_with_prep),
    "Orbax, item": RaceLoader(prepare_orbax, load_with_orbax),
    "Orbax, folder": RaceLoader(prepare_orbax_safetensors, load_safetensors_with_orbax),
    "TensorStore, item": RaceLoader(prepare_tensorstore, load_with_tensorstore),
    "Run:ai": RaceLoader(prepare_runai, load_with_runai),
    "Run:ai, group": RaceLoader(prepare_runai_group, load_with_runai),
    "safetensors": RaceLoader(prepare_download, load_with_safetensors),
    "fastsafetensors": RaceLoader(prepare_fastsafetensors, load_with_fastsafetensors),
}


def run_loader(loader: RaceLoader, job: Job) -> LoadResult:
    """Load when a line comes on stdin, and return the result."""
    try:
        loader.prepare(job)
        print("ready", flush=True)
        sys.stdin.readline()
        start_s = time.process_time()
        shards = loader.load(job)
        cpu_s = time.process_time() - start_s
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        return LoadResult(error=f"{type(error).__name__}: {first_line}"[:MAX_ERROR_CHARS])
    print("loaded", flush=True)
    matrices = [array for name, array in shards.items() if NORM not in name]
    nbytes = sum(array.nbytes for array in shards.values())
    return LoadResult(nbytes, word_sum(matrices), cpu_s)


def main() -> None:
    """Load once."""
    job = Job(**json.loads(sys.argv[2]))
    result = run_loader(LOADERS[sys.argv[1]], job)
    print(json.dumps(dataclasses.asdict(result)), flush=True)
    # The process that serves JAX's coordination ends last.
    time.sleep(0 if job.index else 1)


if __name__ == "__main__":
    main()
