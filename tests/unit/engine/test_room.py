"""Memory is given to the next one only when nothing refers to it any more."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from engine.plugins.room import Room


def test_memory_that_nobody_uses_is_used_again() -> None:
    room = Room()
    first = room.take(1000)
    where = first.data_ptr()
    del first
    assert room.take(500).data_ptr() == where
    assert room.take(1000).data_ptr() == where


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[100:200],
        lambda tensor: tensor.view(torch.float32)[3:9].unsqueeze(0),
        lambda tensor: torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()),
    ],
    ids=["itself", "a view", "a view of another type", "its storage"],
)
def test_memory_that_anybody_still_uses_is_not_touched(
    hold: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    room = Room()
    first = room.take(1024).fill_(7)
    held = hold(first)
    del first
    gc.collect()
    room.take(1024).fill_(1)
    assert set(bytes(held.untyped_storage())) == {7}


def test_a_larger_prefix_gets_more() -> None:
    room = Room()
    assert room.take(10).numel() == 10
    assert room.take(1 << 20).numel() == 1 << 20
