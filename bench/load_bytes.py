"""Load a checkpoint's parameters in several processes: bytes read, seconds and peak memory of each process.

    python -m bench.load_bytes CHECKPOINT --mesh 1,1,8 --processes 8
    python -m bench.load_bytes HF_FOLDER --mesh 1,1,8 --processes 8 --orbax
    python -m bench.load_bytes CHECKPOINT --processes 8 --bucket --hub

Each mesh is loaded twice: with own reads of every process, and with reads that are exchanged over the devices. The page
cache of the files is dropped before each load. Bytes are those that the reader counts. All processes run on this
machine and exchange bytes over the loopback interface, so that the seconds say little about a cluster.

`--orbax` loads the tensors of a Hugging Face folder with the safetensors loader of Orbax v1, split by rows and by
columns over all devices. Its bytes are the `rchar` counter of /proc/self/io.

`--bucket` and `--hub` load from a fake bucket and a fake hub on the loopback interface instead of the folder. Bytes are
those that the server has sent to each process: while it opens the checkpoint (listings are not counted), and while it
loads.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.counting_store import BUCKET_URL, HUB_ID
from bench.restore import drop_page_cache, read_process_counter
from prepcli.launch.local import free_port

WORKER = "PREP_BENCH_PROCESS"


def start_worker(options: argparse.Namespace, index: int) -> None:
    """Connect this process with the others."""
    import jax

    jax.config.update("jax_num_cpu_devices", options.devices)
    jax.distributed.initialize(
        f"127.0.0.1:{options.port}",
        num_processes=options.processes,
        process_id=index,
        cluster_detection_method="deactivate",
    )
    jax.block_until_ready(jax.numpy.zeros(()))


def sent_nbytes(options: argparse.Namespace) -> int:
    """Return the bytes that the store has sent to this process."""
    with urllib.request.urlopen(f"{options.counts}/{os.environ[WORKER]}") as answer:
        return int(answer.read())


def load_with_prep(options: argparse.Namespace) -> tuple[Any, int, int]:
    """Load the parameters in float32, and return them and the bytes read by loading and by opening."""
    from jax.experimental import multihost_utils

    from prepcli.sources.locate import Access, locate
    from prepcli.sources.opening import open_source
    from trainer.run.params import open_model
    from trainer.training.checkpoint import load_leaves
    from trainer.training.leaf_loading import LeafLoader

    name = {"bucket": BUCKET_URL, "hub": HUB_ID}.get(options.load, str(options.checkpoint))
    located = locate(name, access=Access(allow_urls=True, stream=options.load == "hub"))
    source, path = open_source(located), located.files.path
    with open_model(source, path, options.mesh, verify=True, on_unchecked=lambda: None) as opened:
        multihost_utils.sync_global_devices("opened")
        opening_nbytes = sent_nbytes(options) if options.counts else 0
        loader = LeafLoader(opened.reader, exchanges=options.load != "own")
        params = load_leaves(
            loader, opened.model.leaves, sharding=opened.sharding, dtype_of=lambda path: "float32"
        )
        read_nbytes = (
            sent_nbytes(options) - opening_nbytes if options.counts else opened.reader.read_nbytes
        )
        return params, read_nbytes, opening_nbytes


def load_with_orbax(options: argparse.Namespace) -> tuple[Any, int, int]:
    """Load all tensors of a safetensors file, split along one dim over all devices."""
    import jax
    import orbax.checkpoint.experimental.v1 as orbax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(jax.devices(), ("devices",))
    dim = {"orbax-rows": 0, "orbax-columns": 1}[options.load]
    with orbax.Context(checkpoint_layout=orbax.options.CheckpointLayout.SAFETENSORS):
        metadata = orbax.pytree_metadata(options.checkpoint).metadata
        target = {
            name: jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=NamedSharding(
                    mesh,
                    PartitionSpec(*(None,) * dim, "devices")
                    if len(leaf.shape) > 1 and leaf.shape[dim] % mesh.size == 0
                    else PartitionSpec(),
                ),
            )
            for name, leaf in metadata.items()
        }
        before = read_process_counter("rchar")
        tree = orbax.load_pytree(options.checkpoint, target)
    jax.block_until_ready(tree)
    return tree, read_process_counter("rchar") - before, 0


def run_worker(options: argparse.Namespace, index: int) -> dict[str, float]:
    """Load once, and return the cost in this process."""
    import jax
    from jax.experimental import multihost_utils

    start_worker(options, index)
    multihost_utils.sync_global_devices("start")
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak RSS
    anonymous_nbytes, start_s = read_process_counter("RssAnon"), time.monotonic()
    load = load_with_orbax if options.load.startswith("orbax") else load_with_prep
    tree, read_nbytes, opening_nbytes = load(options)
    jax.block_until_ready(tree)
    seconds = time.monotonic() - start_s
    peak_nbytes = read_process_counter("VmHWM") - read_process_counter("RssFile") - anonymous_nbytes
    leaves = jax.tree.leaves(tree)
    device_nbytes = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    multihost_utils.sync_global_devices("end")
    return {
        "read": read_nbytes,
        "opening": opening_nbytes,
        "seconds": seconds,
        "arrays": device_nbytes,
        "extra": peak_nbytes - device_nbytes,
    }


@contextlib.contextmanager
def serve_remotely(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Serve the checkpoint as a bucket and a hub, and yield the output of `bench.counting_store`."""
    command = [
        sys.executable,
        "-m",
        "bench.counting_store",
        str(options.checkpoint),
        str(options.processes),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())
        finally:
            server.stdin.close()


def run_load(options: argparse.Namespace, mesh: str, load: str) -> list[dict[str, float]]:
    """Load once with cold files, and return the cost of each process."""
    drop_page_cache(options.checkpoint)
    command = [
        sys.executable,
        "-m",
        "bench.load_bytes",
        str(options.checkpoint),
        "--mesh",
        mesh,
        "--load",
        load,
    ]
    command += [
        "--processes",
        str(options.processes),
        "--devices",
        str(options.devices),
        "--port",
        str(free_port()),
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with (
        serve_remotely(options) if load in ("bucket", "hub") else contextlib.nullcontext() as store
    ):
        environments = store["environments"] if store else [{}] * options.processes
        command += ["--counts", store["counts"]] if store else []
        workers = [
            subprocess.Popen(
                command,
                env={**environment, **client, WORKER: str(index)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index, client in enumerate(environments)
        ]
        outputs = [worker.communicate() for worker in workers]
    for worker, (_, stderr) in zip(workers, outputs):
        if worker.returncode:
            raise SystemExit(stderr[-3000:])
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in outputs]


def cost_text(costs: list[dict[str, float]], nbytes: int) -> str:
    """Return one line with the bytes, time and memory of a load."""
    read = [cost["read"] for cost in costs]
    each = f"{min(read) / 1e6:.0f} to {max(read) / 1e6:.0f} MB each"
    total = f"{sum(read) / 1e6:.0f} MB in all = {sum(read) / nbytes:.3f} x"
    opening = sum(cost["opening"] for cost in costs)
    if opening:
        total += f" (and {opening / 1e6:.2f} MB to open it)"
    memory = f"{max(cost['extra'] for cost in costs) / 2**20:.0f} MiB beyond the arrays"
    return f"{max(cost['seconds'] for cost in costs):6.2f} s, {each}, {total}, at most {memory}"


def stored_nbytes(checkpoint: Path) -> int:
    """Return the bytes of all parameters as they are stored."""
    from prepcli.sources.locate import locate
    from prepcli.sources.opening import open_source

    return sum(tensor.nbytes for tensor in open_source(locate(str(checkpoint))).tensors)


def main() -> None:
    """Load with each mesh and method, and print the costs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="folder of an init or a Hugging Face model")
    parser.add_argument("--mesh", action="append", help="mesh; may be repeated")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--devices", type=int, default=1, help="CPU devices of each process")
    parser.add_argument("--orbax", action="store_true", help="load with Orbax v1 too")
    parser.add_argument("--bucket", action="store_true", help="load from a bucket that counts")
    parser.add_argument(
        "--hub", action="store_true", help="load from a hub that counts, with `--stream`"
    )
    parser.add_argument("--counts", default="", help=argparse.SUPPRESS)
    parser.add_argument("--load", default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    meshes = options.mesh or ["8,1,1", "1,8,1", "1,2,4"]
    if WORKER in os.environ:
        options.mesh = meshes[0]
        print(json.dumps(run_worker(options, int(os.environ[WORKER]))))
        return
    nbytes = stored_nbytes(options.checkpoint)
    remote = [load for load in ("bucket", "hub") if getattr(options, load)]
    loads = [(mesh, load) for mesh in meshes for load in remote or ("own", "exchange")]
    if options.orbax:
        loads += [(meshes[0], "orbax-rows"), (meshes[0], "orbax-columns")]
    print(
        f"{options.checkpoint.name}: {nbytes / 1e6:.0f} MB, {options.processes} x {options.devices} CPU devices"
    )
    for mesh, load in loads:
        name = load if load.startswith("orbax") else f"{mesh} {load}"
        print(f"{name:16} {cost_text(run_load(options, mesh, load), nbytes)}", flush=True)


if __name__ == "__main__":
    main()
