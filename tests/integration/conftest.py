"""Real servers, shared by the tests of a module, and clients on both data planes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import kvstore
from kvstore.client import Store
from kvstore.testing import ServerProcess
from kvstore.wire._pb import kvstore_pb2 as pb
from tests.integration.support import Raw, info_of, raw, report
from tests.integration.wrong import INFO, KEYS, body, header


@pytest.fixture(scope="module")
def module_folder() -> Iterator[Path]:
    """A folder with a short path, since it holds unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """The same for one test."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def server(module_folder: Path) -> Iterator[ServerProcess]:
    """A server without a redis tier, whose arena holds 189 blocks."""
    with ServerProcess(module_folder / "cpu", "--no-redis", cpu_bytes="16MiB") as process:
        yield process


@pytest.fixture(scope="module")
def redis_server(module_folder: Path) -> Iterator[ServerProcess]:
    """A server with an embedded Valkey."""
    with ServerProcess(module_folder / "redis", cpu_bytes="16MiB") as process:
        yield process


@pytest.fixture(params=[True, False], ids=["shared-memory", "stream"])
def share_memory(request: pytest.FixtureRequest) -> bool:
    """Which way the blocks go."""
    return bool(request.param)


@pytest.fixture
def client(server: ServerProcess, share_memory: bool) -> Iterator[Store]:
    """A client of the server, on each data plane."""
    with kvstore.connect(server.target, share_memory=share_memory) as store:
        assert store.shares_memory is share_memory
        yield store


@pytest.fixture
def other(server: ServerProcess) -> Iterator[Store]:
    """Another client of the server, that shares its memory."""
    with kvstore.connect(server.target) as store:
        yield store


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name of its own for each test, so that tests which share a server don't meet."""
    return str(request.node.name)


@pytest.fixture
def namespace(client: Store, name: str) -> kvstore.client.store.Namespace:
    """A namespace of the test's own."""
    return client.open(info_of(name))


# -- for wrong requests


@pytest.fixture(scope="module")
def watcher(server: ServerProcess) -> Iterator[kvstore.Store]:
    """A well-behaved client, which sees whether anything changed."""
    with kvstore.connect(server.target) as client:
        yield client


@pytest.fixture(scope="module")
def evil(server: ServerProcess) -> Iterator[Raw]:
    """A raw client with the namespace open and its four blocks stored."""
    with raw(server.target) as client:
        client.open(INFO)
        answer = client.stub.Put(iter([header(client), *body(KEYS)]))
        assert list(answer.answers) == [pb.ReserveResponse.ANSWER_RESERVED] * 4
        yield client


@pytest.fixture
def refused(watcher: kvstore.Store, evil: Raw) -> Callable[..., None]:
    """Makes the call, and checks its status, its message, and that nothing has changed."""

    def state() -> Any:
        document = report(watcher)
        cpu = next(tier for tier in document["tiers"] if tier["name"] == "cpu")
        del cpu["counters"]["aborted"]  # the one trace of a Put that goes wrong half way
        del document["control"]["rpc"], document["taken_at"], document["server"]
        return document

    def check(code: grpc.StatusCode, words: str, call: Callable[[], Any]) -> None:
        before = state()
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert isinstance(caught.value, grpc.Call)
        assert (caught.value.code(), words in (caught.value.details() or "")) == (code, True), (
            caught.value.code(),
            caught.value.details(),
        )
        assert state() == before

    return check
