"""Blocks and pages are the same bytes, by the host's way and by the way of devices."""

from __future__ import annotations

import pytest
import torch

from engine.plugins.vllm.paged import PagedCache, page_bytes_of
from kvstore.errors import UnsupportedModel

PAGES = 12
SHAPE = (PAGES, 2, 4, 8)


@torch.inference_mode()  # as vLLM makes them
def layers_of(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(SHAPE, dtype=torch.bfloat16) for _ in range(3)]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("pages_a_block", "kept"), [(1, 0), (2, 0), (2, 1)])
def test_what_is_gathered_is_what_is_scattered(
    staged: bool, pages_a_block: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Room for two blocks, so that the third one needs another round.
    room = 2 * pages_a_block * 3 * 2 * 4 * 8 * 2
    monkeypatch.setattr("engine.plugins.vllm.paged.STAGED_BYTES_MAX", room)
    source, target = layers_of(1), layers_of(2)
    before = [layer.clone() for layer in target]
    here = PagedCache(source, PAGES, pages_a_block, staged)
    there = PagedCache(target, PAGES, pages_a_block, staged)
    from_pages = [7, 2, 9, 4, 0, 11][: 3 * pages_a_block]
    to_pages = [3, 8, 1, 10, 6, 5][: 3 * pages_a_block]
    gather, scatter = here.gather(from_pages), there.scatter(to_pages, kept)
    for position in (0, 1, 2):
        block = bytearray(here.block_bytes)
        gather.source(position, memoryview(block))
        scatter.sink(position, memoryview(block))
        block[:] = bytes(len(block))  # it was lent for the call alone
    scatter.finish()
    for layer, old, new in zip(source, before, target, strict=True):
        for number in range(PAGES):
            written = to_pages.index(number) if number in to_pages[kept:] else None
            expected = old[number] if written is None else layer[from_pages[written]]
            assert torch.equal(new[number], expected)


def test_a_source_may_skip_blocks_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.plugins.vllm.paged.STAGED_BYTES_MAX", 1)
    layers = layers_of(1)
    for staged in (False, True):
        cache = PagedCache(layers, PAGES, 1, staged)
        gather = cache.gather([5, 6, 7, 8])
        for position in (1, 3):
            block = bytearray(cache.block_bytes)
            gather.source(position, memoryview(block))
            expected = torch.stack([layer[5 + position] for layer in layers])
            assert bytes(block) == expected.view(torch.uint8).numpy().tobytes()


def test_pages_that_kernels_split_or_permute_are_still_pages() -> None:
    layer = torch.arange(PAGES * 64, dtype=torch.int16).view(PAGES * 2, 4, 8)
    assert page_bytes_of(layer, PAGES).shape == (PAGES, 128)
    permuted = torch.zeros(PAGES, 4, 2, 8).permute(0, 2, 1, 3)
    assert page_bytes_of(permuted, PAGES).shape == (PAGES, 256)
    apart = torch.zeros(PAGES, 16)[:, :8]
    assert page_bytes_of(apart, PAGES).stride() == (64, 1)


@pytest.mark.parametrize(
    "layer",
    [
        torch.zeros(PAGES, 4, 16)[:, :, :8],  # holes in a page
        torch.zeros(2, PAGES, 8).transpose(0, 1),  # keys of all pages, then values of all pages
        torch.zeros(PAGES + 1, 8),
    ],
)
def test_what_is_no_pages_is_refused(layer: torch.Tensor) -> None:
    with pytest.raises(UnsupportedModel, match="page"):
        page_bytes_of(layer, PAGES)
