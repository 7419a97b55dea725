"""Clients that are killed, stopped or late leak nothing and write into no other's blocks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import kvstore
from kvstore.client import Store, Stored
from kvstore.testing import ServerProcess
from kvstore.types import MissReason, SkipReason
from kvstore.wire._pb import kvstore_pb2 as pb
from tests.helpers import eventually
from tests.integration.support import (
    BLOCK_BYTES,
    NOTHING_HELD,
    chain,
    content,
    control,
    info_of,
    load,
    raw,
    report,
    store,
    tier,
)

ROOT = Path(__file__).parents[2]
LEASE_WAIT_S = 45.0
"""More than the server's 30 s for a store."""


class Victim:
    """A client process that is stuck half way. See `tests.integration.victim`."""

    def __init__(self, mode: str, target: str, name: str, blocks: int):
        command = [sys.executable, "-m", "tests.integration.victim", mode, target, name]
        self.process = subprocess.Popen(
            [*command, str(blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def go_on(self) -> str:
        """Lets it go on; what came of it."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def server(module_folder: Path) -> Iterator[ServerProcess]:
    """A server whose arena holds more than gRPC buffers on the way: 567 blocks."""
    with ServerProcess(module_folder, "--no-redis", cpu_bytes="40MiB") as process:
        yield process


@pytest.fixture(scope="module")
def victims(server: ServerProcess) -> Iterator[dict[str, Victim]]:
    """Four stuck clients: two that store 10 and 6 blocks, one that stores 4, one that loads 8."""
    with kvstore.connect(server.target) as client:
        store(client.open(info_of("load")), chain("load", 8))
    target = server.target
    made = {
        "killed": Victim("store", target, "killed", 10),
        "stopped": Victim("store", target, "stopped", 6),
        "doomed": Victim("store", target, "doomed", 4),
        "loader": Victim("load", target, "load", 8),
    }
    try:
        for victim in made.values():
            assert victim.read() == "stuck"
        made["stopped"].signal(signal.SIGSTOP)
        made["doomed"].signal(signal.SIGSTOP)
        yield made
    finally:
        for victim in made.values():
            victim.end()


def test_blocks_that_are_being_stored_are_invisible(
    victims: dict[str, Victim], other: Store
) -> None:
    held = {"leases": 4, "reserved_slots": 20, "quarantined_slots": 0}
    assert control(other) == held
    assert other.open(info_of("killed")).lookup(chain("killed", 10)).blocks == 0


def test_the_leases_of_a_killed_reader_end_with_it(
    victims: dict[str, Victim], other: Store
) -> None:
    victims["loader"].signal(signal.SIGKILL)
    eventually(lambda: control(other)["leases"] == 3)
    other.clear()
    assert other.open(info_of("load")).lookup(chain("load", 8)).blocks == 0


def test_what_a_killed_client_was_storing_can_be_stored_by_another_at_once(
    victims: dict[str, Victim], other: Store
) -> None:
    victims["killed"].signal(signal.SIGKILL)
    eventually(lambda: control(other)["reserved_slots"] == 10)
    assert control(other)["quarantined_slots"] == 10
    namespace = other.open(info_of("killed"))
    keys = chain("killed", 10)
    assert namespace.lookup(keys).blocks == 0
    assert store(namespace, keys).stored == 10
    assert load(namespace, keys).blocks == 10


def test_a_source_that_raises_stores_nothing_and_its_error_is_the_callers(
    client: Store, name: str
) -> None:
    namespace = client.open(info_of(name))
    before = control(client)

    def source(index: int, into: memoryview) -> None:
        if index == 2:
            raise LookupError("the engine has lost this block")

    with pytest.raises(LookupError, match="has lost this block"):
        namespace.store(chain(name, 4), source)
    assert namespace.lookup(chain(name, 4), lease_s=0).blocks == 0
    eventually(lambda: control(client) == before)


def test_a_sink_that_raises_releases_the_lease(client: Store, name: str) -> None:
    namespace = client.open(info_of(name))
    keys = chain(name, 4)
    store(namespace, keys)
    before = control(client)

    def sink(index: int, view: memoryview) -> None:
        raise LookupError("the engine is full")

    with pytest.raises(LookupError, match="the engine is full"):
        namespace.load(namespace.lookup(keys), sink)
    eventually(lambda: control(client) == before)
    assert load(namespace, keys).blocks == 4


def test_a_slot_that_is_reused_during_a_read_is_a_miss(
    client: Store, other: Store, name: str
) -> None:
    # The lease ends in the sink, and another client fills the arena. The blocks were stored
    # through shared memory and have no checksums, so nothing but the slots' headers can tell.
    info = info_of(name, block_bytes=1 << 20)
    keys = chain(name, 24)
    client.clear()
    writer = other.open(info)
    stored = store(writer, keys).stored
    assert stored >= 20
    namespace = client.open(info)
    found = namespace.lookup(keys, lease_s=0.3)
    assert found.blocks == stored
    got: dict[int, bytes] = {}
    rounds = iter(range(1000))

    def overwritten() -> bool:
        number = next(rounds)
        for part in range(3):
            store(writer, chain(f"{name} {number} {part}", 3))
        return writer.lookup(keys, lease_s=0).blocks < stored

    def sink(index: int, view: memoryview) -> None:
        if not got:
            eventually(overwritten)
        got[index] = bytes(view)

    loaded = namespace.load(found, sink)
    for index in range(loaded.blocks):
        assert got[index] == content(keys[index], 1 << 20)
    assert loaded.blocks < stored
    assert loaded.miss_reason is MissReason.OVERWRITTEN


def test_a_put_that_outlives_its_session_writes_into_no_other_block(
    server: ServerProcess, other: Store, name: str
) -> None:
    # Its slots are free at the latest when the lease is up, while the stream goes on.
    info, keys = info_of(name), chain(name, 1)
    before = control(other)["reserved_slots"]
    with raw(server.target) as client:
        client.open(info)

        def messages() -> Iterator[pb.PutRequest]:
            header = pb.PutHeader(
                namespace=info.fingerprint,
                keys=keys[0],
                block_bytes=BLOCK_BYTES,
                session=client.session,
            )
            yield pb.PutRequest(header=header)
            yield pb.PutRequest(chunk=bytes(64))
            eventually(lambda: control(other)["reserved_slots"] == before + 1)
            client.detach()
            eventually(lambda: control(other)["reserved_slots"] == before)
            yield pb.PutRequest(chunk=bytes(64))
            yield pb.PutRequest(chunk=bytes(64))

        with pytest.raises(grpc.RpcError, match="took longer than its lease"):
            client.stub.Put(messages(), timeout=20.0)
    assert other.open(info).lookup(keys).blocks == 0


def test_mixed_operations_with_aborts_leak_nothing(folder: Path) -> None:
    chance = random.Random(7)
    with (
        ServerProcess(folder, "--no-redis", cpu_bytes="12MiB") as server,
        kvstore.connect(server.target) as shm,
        kvstore.connect(server.target, share_memory=False) as streams,
        raw(server.target) as evil,
    ):
        info = info_of("mixed")
        evil.open(info)

        def source_for(keys: list[kvstore.BlockKey]):  # type: ignore[no-untyped-def]
            def source(index: int, into: memoryview) -> None:
                if chance.random() < 0.05:
                    raise LookupError
                into[:] = content(keys[index])

            return source

        def sink(index: int, view: memoryview) -> None:
            if chance.random() < 0.05:
                raise LookupError

        for _ in range(300):
            client = chance.choice([shm, shm, streams])
            namespace = client.open(info)
            keys = chain(f"mixed {chance.randrange(25)}", chance.randint(1, 8))
            try:
                match chance.randrange(6):
                    case 0 | 1:
                        namespace.store(keys, source_for(keys))
                    case 2:
                        load(namespace, keys)
                    case 3:
                        namespace.load(namespace.lookup(keys), sink)
                    case 4:
                        namespace.lookup(keys, lease_s=0.2)  # forgotten
                    case 5:
                        lease = evil.reserve(info, keys).lease
                        if lease:
                            evil.stub.Abort(pb.AbortRequest(lease=lease))
            except LookupError:
                pass
        eventually(lambda: control(shm) == NOTHING_HELD)
        cpu = tier(shm, "cpu")
        assert cpu["used_bytes"] == cpu["blocks"] * BLOCK_BYTES
        assert cpu["counters"]["evicted"] > 0
        assert cpu["counters"]["aborted"] > 0
        shm.clear()
        assert tier(shm, "cpu")["used_bytes"] == 0
        assert report(shm)["namespaces"][0]["blocks"] == 0


def test_a_stopped_client_writes_into_no_other_block_and_its_late_commit_is_refused(
    victims: dict[str, Victim], other: Store, name: str
) -> None:
    # Ten slots of the killed one are free; four and six of the stopped ones are set aside.
    waiting = {"leases": 2, "reserved_slots": 0, "quarantined_slots": 10}
    eventually(lambda: control(other) == waiting, LEASE_WAIT_S)
    namespace = other.open(info_of(name))
    prefixes = [chain(f"{name} {number}", 100) for number in range(6)]
    for keys in prefixes:  # more than the arena holds, so every slot that can be had is taken
        assert store(namespace, keys).stored == 100
    victims["stopped"].signal(signal.SIGCONT)
    failed = Stored(skipped={SkipReason.FAILED: 6})
    assert victims["stopped"].go_on() == str(failed)
    assert [load(namespace, keys).blocks for keys in prefixes[2:]] == [100] * 4
    assert other.open(info_of("stopped")).lookup(chain("stopped", 6)).blocks == 0
    eventually(lambda: control(other)["quarantined_slots"] == 4)


def test_the_slots_of_a_stopped_client_are_free_when_it_dies(
    victims: dict[str, Victim], other: Store
) -> None:
    victims["doomed"].signal(signal.SIGKILL)
    eventually(lambda: control(other) == NOTHING_HELD)
    held_bytes = sum(entry["bytes"] for entry in report(other)["namespaces"])
    assert tier(other, "cpu")["used_bytes"] == held_bytes
