"""One fetch for many askers, whatever becomes of the fetch or of an asker."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from kvstore.inflight import Inflight


class Fetcher:
    """A fetch that ends when it is told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.calls: list[list[str]] = []
        self.go_on = asyncio.Event()
        self._error = error

    async def __call__(self, keys: Sequence[str]) -> dict[str, str]:
        self.calls.append(list(keys))
        await self.go_on.wait()
        if self._error is not None:
            raise self._error
        return {key: key.upper() for key in keys}


def run(test: Coroutine[Any, Any, None]) -> None:
    async def within_time() -> None:
        async with asyncio.timeout(20):
            await test

    asyncio.run(within_time())


def test_those_who_ask_meanwhile_wait_for_the_same_fetch() -> None:
    async def test() -> None:
        inflight: Inflight[str, str] = Inflight()
        fetch = Fetcher()
        first = inflight.share(["a", "b"], fetch)
        await asyncio.sleep(0)
        second = inflight.share(["b", "c", "b"], fetch)
        await asyncio.sleep(0)
        assert fetch.calls == [["a", "b"], ["c"]]
        assert len(inflight) == 3
        fetch.go_on.set()
        assert await asyncio.gather(*first, *second) == ["A", "B", "B", "C", "B"]
        assert len(inflight) == 0

    run(test())


def test_after_a_fetch_has_ended_the_next_asker_starts_another() -> None:
    async def test() -> None:
        inflight: Inflight[str, str] = Inflight()
        fetch = Fetcher()
        fetch.go_on.set()
        await inflight.share(["a"], fetch)[0]
        await inflight.share(["a"], fetch)[0]
        assert fetch.calls == [["a"], ["a"]]

    run(test())


def test_an_error_reaches_every_asker_of_its_keys_and_no_other() -> None:
    async def test() -> None:
        inflight: Inflight[str, str] = Inflight()
        bad, good = Fetcher(OSError("no")), Fetcher()
        futures = inflight.share(["a", "b"], bad) + inflight.share(["a"], bad)
        other = inflight.share(["c"], good)
        bad.go_on.set()
        good.go_on.set()
        results = await asyncio.gather(*futures, *other, return_exceptions=True)
        assert [type(result) for result in results] == [OSError, OSError, OSError, str]
        assert len(inflight) == 0

    run(test())


def test_a_fetch_that_forgets_a_key_is_an_error_and_nobody_waits_for_ever() -> None:
    async def test() -> None:
        async def forgetful(keys: Sequence[str]) -> dict[str, str]:
            return {"a": "A"}

        inflight: Inflight[str, str] = Inflight()
        futures = inflight.share(["a", "b", "c"], forgetful)
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(result, KeyError) for result in results)
        assert len(inflight) == 0

    run(test())


def test_a_fetch_that_is_cancelled_cancels_its_askers() -> None:
    async def test() -> None:
        inflight: Inflight[str, str] = Inflight()
        fetch = Fetcher(asyncio.CancelledError())
        futures = inflight.share(["a"], fetch)
        fetch.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.shield(futures[0])
        assert len(inflight) == 0

    run(test())


def test_an_asker_that_gives_up_does_not_take_the_result_from_the_others() -> None:
    async def test() -> None:
        inflight: Inflight[str, str] = Inflight()
        fetch = Fetcher()

        async def ask() -> str:
            return await asyncio.shield(inflight.share(["a"], fetch)[0])

        askers = [asyncio.create_task(ask()) for _ in range(3)]
        await asyncio.sleep(0)
        askers[0].cancel()
        await asyncio.sleep(0)
        fetch.go_on.set()
        results = await asyncio.gather(*askers, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert results[1:] == ["A", "A"]
        assert fetch.calls == [["a"]]

    run(test())


def test_drain_waits_for_all_that_is_under_way() -> None:
    async def test() -> None:
        inflight: Inflight[str, str] = Inflight()
        fetch = Fetcher()
        futures = inflight.share(["a"], fetch)
        draining = asyncio.create_task(inflight.drain())
        await asyncio.sleep(0)
        assert not draining.done()
        fetch.go_on.set()
        await draining
        assert futures[0].done()
        await inflight.drain()

    run(test())
