"""Stream values: bytes of tensors in contiguous or chunked storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.engine.blobs import open_blobs
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.planning.plan import Stream
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint


@pytest.mark.parametrize("run_nbytes", [32, 100, 1 << 20])
def test_read_values_returns_tensors_in_c_order(tmp_path: Path, run_nbytes: int) -> None:
    tensors = make_checkpoint(tmp_path / "llama", LLAMA, "float16", vocab_size=12)
    assert (
        main(
            [
                "save-init",
                str(tmp_path / "llama"),
                "--out",
                str(tmp_path / "init"),
                "--mesh",
                "1,2,2",
                "-q",
            ]
        )
        == 0
    )
    for folder in ("llama", "init"):
        source = open_source(locate(str(tmp_path / folder)))
        assert len(source.tensors) == len(tensors)
        with open_blobs(source.byte_sources) as files:
            for tensor in source.tensors:
                stream = Stream(
                    tensor.name,
                    tensor.dtype,
                    tensor.shape,
                    (0, tensor.shape[0]),
                    tensor.placement,
                    (),
                )
                runs = [
                    (start, bytes(data))
                    for start, data in read_values(
                        files, stream, buffers=allocate_run_buffers(run_nbytes)
                    )
                ]
                content = b"".join(data for _, data in runs)
                assert content == tensors[source.names.full_name(tensor.name)].tobytes()
                assert [start for start, _ in runs] == [
                    sum(len(d) for _, d in runs[:i]) for i in range(len(runs))
                ]
                assert all(0 < len(data) <= run_nbytes for _, data in runs)
