"""The queue of stores: bounded, in order, emptied at the end, and not ended by a failure."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from engine.transfer import StoreJob, Transfer
from kvstore.client import Found, Loaded, Source, Stored
from kvstore.types import (
    BlockKey,
    Fingerprint,
    MissReason,
    NamespaceInfo,
    SkipReason,
    TierName,
)

INFO = NamespaceInfo(Fingerprint(bytes(32)), block_bytes=100, block_tokens=4)


class Namespace:
    """Stores when it is let."""

    def __init__(self) -> None:
        self.info = INFO
        self.open = threading.Event()
        self.open.set()
        self.stored: list[BlockKey] = []
        self.loaded_by: list[str] = []

    def store(self, keys: Sequence[BlockKey], source: Any, parent: BlockKey | None) -> Stored:
        assert self.open.wait(20)
        source(0, memoryview(bytearray(100)))
        self.stored += keys
        return Stored(stored=len(keys))

    def lookup(self, keys: Sequence[BlockKey], again: bool) -> Found:
        assert again  # the session has asked before
        return Found(((TierName.CPU, len(keys) - 1),), MissReason.EVICTED)

    def load(self, found: Found, sink: Any, *, count: int, timeout_s: float) -> Loaded:
        self.loaded_by.append(threading.current_thread().name)
        for position in range(count):
            sink(position, memoryview(bytearray(100)))
        return Loaded(found.runs, None)


class Jobs:
    """Makes jobs, and notes what becomes of them."""

    def __init__(self) -> None:
        self.done: list[Stored] = []

    def of(self, blocks: int, source: Any = lambda index, view: None) -> StoreJob[Source]:
        keys = [BlockKey(bytes([len(self.done), index]) * 16) for index in range(blocks)]
        return StoreJob((keys,), (None,), 7, source, 100 * blocks, self.done.append)


@pytest.fixture
def namespace() -> Namespace:
    return Namespace()


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def transfer(namespace: Namespace) -> Iterator[Transfer]:
    transfer = Transfer(namespace, queue_bytes_max=1000)  # type: ignore[arg-type]
    yield transfer
    namespace.open.set()
    transfer.close()


def test_jobs_are_stored_in_order_on_one_thread(
    transfer: Transfer, namespace: Namespace, jobs: Jobs
) -> None:
    order: list[tuple[int, str]] = []
    for number in range(5):

        def source(index: int, view: memoryview, number: int = number) -> None:
            order.append((number, threading.current_thread().name))

        assert transfer.store(jobs.of(1, source))
    assert transfer.flush(20)
    assert order == [(number, "kvstore-store") for number in range(5)]


def test_a_full_queue_refuses_at_once_and_says_so(
    transfer: Transfer, namespace: Namespace, jobs: Jobs
) -> None:
    namespace.open.clear()
    assert transfer.store(jobs.of(6))
    assert transfer.store(jobs.of(4))
    assert not transfer.store(jobs.of(1))
    (refused,) = jobs.done
    assert refused.skipped == {SkipReason.QUEUE_FULL: 1}
    assert (refused.stored, refused.present) == (0, 0)
    namespace.open.set()
    assert transfer.flush(20)
    assert sum(done.stored for done in jobs.done) == 10
    assert transfer.store(jobs.of(10))


def test_a_job_larger_than_the_queue_is_taken_when_nothing_else_is_queued(
    transfer: Transfer, namespace: Namespace, jobs: Jobs
) -> None:
    namespace.open.clear()
    assert transfer.store(jobs.of(50))
    assert not transfer.store(jobs.of(1))
    namespace.open.set()
    assert transfer.flush(20)
    assert len(namespace.stored) == 50


def test_flush_waits_no_longer_than_it_is_told(
    transfer: Transfer, namespace: Namespace, jobs: Jobs
) -> None:
    assert transfer.flush(0)
    namespace.open.clear()
    transfer.store(jobs.of(1))
    assert not transfer.flush(0.01)
    namespace.open.set()
    assert transfer.flush(20)


def test_after_a_flush_every_job_has_been_told(transfer: Transfer, jobs: Jobs) -> None:
    for number in range(200):
        transfer.store(jobs.of(1))
        assert transfer.flush(20)
        assert len(jobs.done) == number + 1


def test_a_source_that_fails_is_counted_logged_and_not_the_end(
    transfer: Transfer, namespace: Namespace, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(index: int, view: memoryview) -> None:
        raise RuntimeError("the engine's buffer is gone")

    transfer.store(jobs.of(3, broken))
    transfer.store(jobs.of(2))
    assert transfer.flush(20)
    assert [done.skipped for done in jobs.done] == [{SkipReason.FAILED: 3}, {}]
    assert jobs.done[1].stored == 2
    assert "the engine's buffer is gone" in caplog.text


def test_a_report_that_fails_is_logged_and_not_the_end(
    transfer: Transfer, namespace: Namespace, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(stored: Stored) -> None:
        raise RuntimeError("nobody listens")

    transfer.store(dataclasses.replace(jobs.of(1), done=broken))
    transfer.store(jobs.of(1))
    assert transfer.flush(20)
    assert [done.stored for done in jobs.done] == [1]
    assert "nobody listens" in caplog.text


def test_closing_stores_what_is_queued_and_takes_no_more(namespace: Namespace, jobs: Jobs) -> None:
    transfer = Transfer(namespace, queue_bytes_max=1000)  # type: ignore[arg-type]
    namespace.open.clear()
    for _ in range(5):
        assert transfer.store(jobs.of(2))
    closing = threading.Thread(target=transfer.close)
    closing.start()
    while transfer.store(jobs.of(0)):  # until it is closing
        pass
    assert jobs.done[-1].skipped == {}  # nothing of nothing
    assert not transfer.store(jobs.of(1))
    assert jobs.done[-1].skipped == {SkipReason.QUEUE_FULL: 1}
    namespace.open.set()
    closing.join(20)
    assert not closing.is_alive()
    assert len(namespace.stored) == 10
    transfer.close()  # again, in vain


def test_loads_run_on_other_threads_and_say_how_far_they_came(
    transfer: Transfer, namespace: Namespace
) -> None:
    got: list[int] = []
    keys = [BlockKey(bytes([index]) * 32) for index in range(3)]
    arrived = transfer.load(keys, lambda position, view: got.append(position), 1.0).result(20)
    assert got == [0, 1]
    assert arrived.loaded == Loaded(((TierName.CPU, 2),), MissReason.EVICTED)
    ((tier, size_bytes, seconds),) = arrived.tiers
    assert (tier, size_bytes) == (TierName.CPU, 200)
    assert 0 <= seconds <= arrived.load_s
    assert namespace.loaded_by[0].startswith("kvstore-load")


def test_a_source_gets_positions_in_its_sequence(transfer: Transfer, jobs: Jobs) -> None:
    asked: list[int] = []
    transfer.store(jobs.of(1, lambda position, view: asked.append(position)))
    assert transfer.flush(20)
    assert asked == [7]
