"""Watchers hear of everything in order, or lose their place and know it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstore import watch
from kvstore.errors import FellBehind
from kvstore.types import BlockKey, Fingerprint, TierName
from kvstore.watch import Event, EventKind, Watchers

ONE, OTHER = Fingerprint(b"1" * 32), Fingerprint(b"2" * 32)


def publish(watchers: Watchers, number: int, namespace: Fingerprint = ONE) -> None:
    key = BlockKey(number.to_bytes(32, "big"))
    watchers.publish(EventKind.STORED, namespace, [key], TierName.CPU)


async def numbers(events: AsyncIterator[Event]) -> list[int]:
    return [int.from_bytes(event.keys[0], "big") async for event in events]


def test_a_watcher_hears_its_namespace_in_order_from_the_subscription_on() -> None:
    async def test() -> None:
        watchers = Watchers()
        publish(watchers, 0)
        mine, everything = watchers.subscribe(ONE), watchers.subscribe(None)
        for number in range(1, 5):
            publish(watchers, number, ONE if number % 2 else OTHER)
        watchers.close()
        assert await numbers(mine) == [1, 3]
        assert await numbers(everything) == [1, 2, 3, 4]

    asyncio.run(test())


def test_one_that_falls_behind_is_told_and_the_others_are_not_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "EVENTS_MAX", 10)

    async def test() -> None:
        watchers = Watchers()
        slow, quick = watchers.subscribe(ONE), watchers.subscribe(ONE)
        heard = []
        for number in range(25):
            publish(watchers, number)
            heard.append((await anext(quick)).keys[0][-1])
        assert heard == list(range(25))
        with pytest.raises(FellBehind, match="10 events"):
            await numbers(slow)
        assert len(watchers._watchers) == 1
        watchers.close()
        assert await numbers(quick) == []

    asyncio.run(test())


def test_exactly_the_bound_is_not_behind_and_one_more_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVENTS_MAX", 10)

    async def test() -> None:
        watchers = Watchers()
        events, behind = watchers.subscribe(ONE), watchers.subscribe(None)
        for number in range(10):
            publish(watchers, number)
        publish(watchers, 10, OTHER)
        watchers.close()
        assert await numbers(events) == list(range(10))
        with pytest.raises(FellBehind):
            await numbers(behind)

    asyncio.run(test())


def test_keys_that_wait_are_bounded_and_those_read_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "KEYS_MAX", 10)
    keys = [BlockKey(number.to_bytes(32, "big")) for number in range(6)]

    async def test() -> None:
        watchers = Watchers()
        slow, quick = watchers.subscribe(ONE, asked=True), watchers.subscribe(ONE, asked=True)
        for _ in range(5):
            watchers.publish(EventKind.ASKED, ONE, keys)
            assert (await anext(quick)).keys == tuple(keys)
        with pytest.raises(FellBehind, match="10 keys"):
            await numbers(slow)

    asyncio.run(test())


def test_a_watcher_hears_of_stores_or_of_what_is_asked_not_of_both() -> None:
    async def test() -> None:
        watchers = Watchers()
        stores, asked = watchers.subscribe(None), watchers.subscribe(None, asked=True)
        publish(watchers, 1)
        watchers.publish(EventKind.ASKED, ONE, [BlockKey(bytes(32))])
        watchers.close()
        assert [event.kind async for event in stores] == [EventKind.STORED]
        assert [event.kind async for event in asked] == [EventKind.ASKED]

    asyncio.run(test())


def test_one_that_stops_watching_is_forgotten() -> None:
    async def test() -> None:
        watchers = Watchers()
        events = watchers.subscribe(None)
        waiting = asyncio.create_task(numbers(events))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not watchers._watchers
        publish(watchers, 1)

    asyncio.run(test())
