"""vLLM's paged KV cache as blocks of the store.

A page is what vLLM calls a block: so many tokens of one layer. A block of the store is a whole
number of pages of all layers: layer, page, the page's bytes. What is inside a page is the
attention kernel's own affair; its bytes are moved as they are.

On the host, blocks go between the arena and the pages in one copy. On a device they go through
a buffer there, many at a time: one transfer a block, and one index operation a layer for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from engine.plugins.copying import copy_beside, widest
from kvstore.errors import UnsupportedModel

STAGED_BYTES_MAX = 64 << 20


class Scatter(Protocol):
    """Fills pages with blocks."""

    def sink(self, position: int, view: memoryview) -> None:
        """Takes a block's bytes; they need not stay."""
        ...

    def finish(self) -> None:
        """Returns when all that was taken is in its pages."""
        ...


class Gather(Protocol):
    """Makes blocks of pages."""

    def source(self, position: int, view: memoryview) -> None:
        """Writes a block's bytes."""
        ...


class PagedCache:
    """The pages of all layers of one worker. Raises UnsupportedModel when they are no pages."""

    def __init__(
        self, layers: Sequence[torch.Tensor], pages: int, pages_a_block: int, staged: bool | None
    ):
        """`layers` are [pages, ...] of any shape and type; `staged` forces the way of devices."""
        self.layers = [page_bytes_of(layer, pages) for layer in layers]
        self.page_bytes = self.layers[0].shape[1]
        if any(layer.shape[1] != self.page_bytes for layer in self.layers):
            raise UnsupportedModel("the layers' pages differ in size")
        self.pages_a_block = pages_a_block
        self.block_bytes = len(self.layers) * pages_a_block * self.page_bytes
        self._staged = self.layers[0].device.type != "cpu" if staged is None else staged

    def scatter(self, pages: Sequence[int], kept: int) -> Scatter:
        """For blocks that go to these pages, of which the first `kept` are left alone."""
        return (_StagedScatter if self._staged else _HostScatter)(self, pages, kept)

    def gather(self, pages: Sequence[int]) -> Gather:
        """For blocks that are in these pages."""
        return (_StagedGather if self._staged else _HostGather)(self, pages)

    def pages_of(self, pages: Sequence[int], position: int) -> list[int]:
        """The pages of one block."""
        start = position * self.pages_a_block
        return list(pages[start : start + self.pages_a_block])

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """A block: layer, page, byte."""
        return len(self.layers), self.pages_a_block, self.page_bytes


def page_bytes_of(layer: torch.Tensor, pages: int) -> torch.Tensor:
    """The same memory as [pages, bytes of one page].

    Raises:
        UnsupportedModel: a page's bytes don't lie together.
    """
    if layer.shape[0] != pages:
        # Kernels with smaller blocks see each page as several.
        if layer.shape[0] % pages:
            raise UnsupportedModel(f"a layer's cache of shape {tuple(layer.shape)} has no pages")
        layer = layer.unflatten(0, (pages, -1))
    size = layer.element_size()
    page_bytes = layer[0].numel() * size
    sides = zip(layer.shape[1:], layer.stride()[1:], strict=True)
    if sum((length - 1) * stride for length, stride in sides) + 1 != layer[0].numel():
        raise UnsupportedModel(
            f"a page's bytes don't lie together: shape {tuple(layer.shape)}, "
            f"strides {layer.stride()}"
        )
    if pages > 1 and layer.stride(0) * size < page_bytes:
        raise UnsupportedModel(f"pages overlap: strides {layer.stride()}")
    return torch.tensor([], dtype=torch.uint8, device=layer.device).set_(
        layer.untyped_storage(),
        layer.storage_offset() * size,
        (pages, page_bytes),
        (layer.stride(0) * size, 1),
    )


class _Host:
    def __init__(self, cache: PagedCache, pages: Sequence[int], kept: int = 0):
        self._cache = cache
        self._layers = [widest(layer) for layer in cache.layers]
        self._pages = pages
        self._kept = kept

    def _pairs(
        self, position: int, view: memoryview, kept: int = 0
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A block's pages, and the same in its bytes."""
        pages = self._cache.pages_of(self._pages, position)[kept:]
        block = torch.frombuffer(view, dtype=torch.uint8).view(self._cache.block_shape)[:, kept:]
        paged = [layer[page] for layer in self._layers for page in pages]
        if self._layers[0].dtype != block.dtype:
            block = block.view(self._layers[0].dtype)
        return paged, list(block.flatten(0, 1).unbind(0))


# One call copies all pages of a block: the thread that computes waits for the interpreter once,
# not once a page.
class _HostScatter(_Host):
    def sink(self, position: int, view: memoryview) -> None:
        paged, block = self._pairs(position, view, self._kept if position == 0 else 0)
        copy_beside(paged, block)

    def finish(self) -> None:
        """Nothing is left to do."""


class _HostGather(_Host):
    def source(self, position: int, view: memoryview) -> None:
        paged, block = self._pairs(position, view)
        copy_beside(block, paged)


class _Staged:
    def __init__(self, cache: PagedCache, pages: Sequence[int], kept: int = 0):
        self._cache = cache
        self._device = cache.layers[0].device
        self._pages = pages
        self._kept = kept
        blocks = len(pages) // cache.pages_a_block
        self._room = max(1, min(blocks, STAGED_BYTES_MAX // cache.block_bytes))

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.long, device=self._device)

    def _buffer(self, blocks: int, device: Any) -> torch.Tensor:
        # Layer first, so that each layer's part is one run of pages.
        layers, pages, page_bytes = self._cache.block_shape
        return torch.empty((layers, blocks, pages, page_bytes), dtype=torch.uint8, device=device)


class _StagedScatter(_Staged):
    def __init__(self, cache: PagedCache, pages: Sequence[int], kept: int = 0):
        super().__init__(cache, pages, kept)
        self._stage: torch.Tensor | None = None
        self._positions: list[int] = []

    @torch.inference_mode()
    def sink(self, position: int, view: memoryview) -> None:
        if self._stage is None:  # not before its turn: many loads may be queued
            self._stage = self._buffer(self._room, self._device)
        block = torch.frombuffer(view, dtype=torch.uint8).view(self._cache.block_shape)
        self._stage[:, len(self._positions)].copy_(block)
        self._positions.append(position)
        if len(self._positions) == self._room:
            self._flush()

    @torch.inference_mode()
    def finish(self) -> None:
        self._flush()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _flush(self) -> None:
        if self._stage is None or not self._positions:
            return
        blocks = [self._cache.pages_of(self._pages, position) for position in self._positions]
        pages = [page for block in blocks for page in block]
        used = torch.ones(len(pages), dtype=torch.bool, device=self._device)
        if 0 in self._positions:
            start = self._positions.index(0) * self._cache.pages_a_block
            used[start : start + self._kept] = False
        index = self._index(pages)[used]
        for layer, staged in zip(self._cache.layers, self._stage, strict=True):
            content = staged[: len(self._positions)].flatten(0, 1)
            layer.index_copy_(0, index, content[used] if self._kept else content)
        self._positions.clear()


class _StagedGather(_Staged):
    def __init__(self, cache: PagedCache, pages: Sequence[int]):
        super().__init__(cache, pages)
        self._first = self._end = 0
        self._stage = torch.empty(0)

    @torch.inference_mode()
    def source(self, position: int, view: memoryview) -> None:
        if not self._first <= position < self._end:
            self._fill(position)
        block = torch.frombuffer(view, dtype=torch.uint8).view(self._cache.block_shape)
        block.copy_(self._stage[:, position - self._first])

    def _fill(self, position: int) -> None:
        step = self._cache.pages_a_block
        self._first = position
        self._end = min(position + self._room, len(self._pages) // step)
        index = self._index(self._pages[self._first * step : self._end * step])
        gathered = self._buffer(self._end - self._first, self._device)
        for layer, staged in zip(self._cache.layers, gathered, strict=True):
            torch.index_select(layer, 0, index, out=staged.flatten(0, 1))
        self._stage = gathered.cpu()
