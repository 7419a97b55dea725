"""Copies on several threads: each once, and none under way when it is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstore.client.copiers import SHARE_BYTES_MIN, Copiers


@pytest.fixture(params=[1, 2, 5])
def copiers(request: pytest.FixtureRequest) -> Iterator[Copiers]:
    made = Copiers(request.param)
    yield made
    made.close()


def test_every_copy_is_made_once_and_before_it_returns(copiers: Copiers) -> None:
    for count in (0, 1, 2, 100):
        made: list[int] = []
        copiers.each(count, SHARE_BYTES_MIN, lambda number: made.append(number) or True)  # noqa: B023
        assert sorted(made) == list(range(count))


def test_small_batches_are_copied_by_the_calling_thread_alone(copiers: Copiers) -> None:
    threads = set()

    def copy(number: int) -> bool:
        threads.add(threading.get_ident())
        return True

    copiers.each(100, SHARE_BYTES_MIN // 100, copy)
    assert threads == {threading.get_ident()}


def test_large_batches_are_shared() -> None:
    copiers = Copiers(2)
    both = threading.Barrier(2)  # passed only by two threads at a time
    threads = set()

    def copy(number: int) -> bool:
        both.wait(20.0)
        threads.add(threading.get_ident())
        return True

    copiers.each(2, SHARE_BYTES_MIN, copy)
    assert len(threads) == 2
    copiers.close()


@pytest.mark.parametrize("who", ["the calling thread", "a helper"])
def test_when_a_copy_raises_none_is_under_way_afterwards_and_no_more_begin(who: str) -> None:
    copiers = Copiers(2)
    caller = threading.get_ident()
    both = threading.Barrier(2)
    failed = threading.Event()
    ended: list[int] = []

    def copy(number: int) -> bool:
        both.wait(20.0)
        if (threading.get_ident() == caller) == (who == "the calling thread"):
            failed.set()
            raise LookupError("of this copy")
        failed.wait(20.0)
        for _ in range(1000):  # still copying, when the other has failed
            threading.Event().wait(0.0)
        ended.append(number)
        return True

    with pytest.raises(LookupError, match="of this copy"):
        copiers.each(100, SHARE_BYTES_MIN, copy)
    assert len(ended) == 1
    copiers.close()


def test_no_copy_begins_after_one_that_says_stop(copiers: Copiers) -> None:
    made: list[int] = []

    def copy(number: int) -> bool:
        made.append(number)
        return number != 3

    copiers.each(1000, SHARE_BYTES_MIN, copy)
    assert {0, 1, 2, 3} <= set(made)
    assert len(made) < 1000
