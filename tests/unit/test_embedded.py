"""The embedded Valkey: saves and loads, is taken over when orphaned, comes back when killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvstore import embedded
from kvstore.embedded import EmbeddedValkey
from kvstore.errors import ConfigError
from tests.helpers import eventually

CAPACITY_BYTES = 8 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kve-", dir="/tmp"))
    yield made / "valkey"
    shutil.rmtree(made)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def start(folder: Path, stack: contextlib.ExitStack) -> EmbeddedValkey:
    server = EmbeddedValkey(folder, CAPACITY_BYTES)
    server.start()
    stack.callback(end, folder)
    return server


def end(folder: Path) -> None:
    """Kills what still runs in this folder."""
    with contextlib.suppress(redis.RedisError), client_of(folder) as client:
        client.shutdown(nosave=True)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def client_of(folder: Path) -> redis.Redis:
    return redis.Redis(
        unix_socket_path=str(folder / "valkey.sock"),
        socket_timeout=5,
        retry=Retry(NoBackoff(), 0),
    )


def pid_of(folder: Path) -> int:
    with client_of(folder) as client:
        return int(client.info("server")["process_id"])


def test_what_it_holds_is_there_after_stop_and_start(
    folder: Path, stack: contextlib.ExitStack
) -> None:
    server = start(folder, stack)
    with client_of(folder) as client:
        client.set("key", b"\0\xff" * 100, px=600_000)
    server.stop(timeout_s=10)
    assert not server._alive()
    again = start(folder, stack)
    with client_of(folder) as client:
        assert client.get("key") == b"\0\xff" * 100
        assert client.pttl("key") > 0
    again.stop(timeout_s=10)


def test_it_listens_on_a_socket_of_its_users_alone_and_on_no_port(
    folder: Path, stack: contextlib.ExitStack
) -> None:
    server = start(folder, stack)
    assert server.url == f"unix://{folder}/valkey.sock"
    assert folder.stat().st_mode & 0o077 == 0
    with client_of(folder) as client:
        assert client.config_get("port") == {"port": "0"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert int(client.config_get("maxmemory")["maxmemory"]) > CAPACITY_BYTES


def test_one_that_a_killed_server_left_is_taken_over_with_its_data(
    folder: Path, stack: contextlib.ExitStack
) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path;"
        "from kvstore.embedded import EmbeddedValkey;"
        f"EmbeddedValkey(Path({str(folder)!r}), 1 << 20).start();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    died = subprocess.run([sys.executable, "-c", script], check=False)
    assert died.returncode == -signal.SIGKILL
    orphan = pid_of(folder)
    stack.callback(kill, orphan)
    with client_of(folder) as client:
        client.set("key", b"value")
    server = start(folder, stack)
    assert pid_of(folder) == orphan
    assert server._alive()
    with client_of(folder) as client:
        assert client.get("key") == b"value"
        assert int(client.config_get("maxmemory")["maxmemory"]) > CAPACITY_BYTES
    server.stop(timeout_s=10)
    eventually(lambda: not server._alive())
    again = start(folder, stack)
    with client_of(folder) as client:
        assert client.get("key") == b"value"
    again.stop(timeout_s=10)


def test_one_that_is_killed_is_started_again(
    folder: Path, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "CHECK_S", 0.01)
    server = start(folder, stack)

    async def test() -> None:
        watching = asyncio.create_task(server.watch())
        for _ in range(2):
            killed = await asyncio.to_thread(pid_of, folder)
            os.kill(killed, signal.SIGKILL)

            def is_another(killed: int = killed) -> bool:
                try:
                    return pid_of(folder) != killed
                except redis.RedisError:
                    return False

            await asyncio.to_thread(eventually, is_another)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(test())
    server.stop(timeout_s=10)


def test_data_that_it_cannot_load_is_put_aside_and_it_starts_empty(
    folder: Path, stack: contextlib.ExitStack
) -> None:
    folder.mkdir(mode=0o700)
    (folder / "dump.rdb").write_bytes(b"not an RDB file")
    server = start(folder, stack)
    with client_of(folder) as client:
        assert client.dbsize() == 0
    assert (folder / "dump.rdb.unreadable").read_bytes() == b"not an RDB file"
    server.stop(timeout_s=10)


def test_a_stop_when_it_has_died_already_does_not_raise(
    folder: Path, stack: contextlib.ExitStack
) -> None:
    server = start(folder, stack)
    os.kill(pid_of(folder), signal.SIGKILL)
    server.stop(timeout_s=10)


def test_a_folder_too_long_for_a_socket_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shorter folder"):
        EmbeddedValkey(tmp_path / ("x" * 100), 1)
