"""Copies of tensors on a thread beside the one that computes.

PyTorch splits a copy of 32,768 elements or more over a team of OpenMP threads, and every thread
that starts such a copy gets a team of its own. With more of them than cores, OpenMP lets all
teams sleep between their parts instead of spinning, the model's too: on two cores, one background
copy made all decoding after it take 1.4 times as long. So these copies are of smaller pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

PIECE_ELEMENTS_MAX = (1 << 15) - 1
_WIDE = torch.int64


@torch.inference_mode()  # an engine's tensors may be such that can't be changed outside it
def copy_beside(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source to its target of the same shape and dtype, on this thread alone.

    All in one call, so that the interpreter is asked for once.
    """
    pairs = [
        pair
        for target, source in zip(targets, sources, strict=True)
        for pair in zip(_pieces(target), _pieces(source), strict=True)
    ]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.numel() <= PIECE_ELEMENTS_MAX:
        yield tensor
    elif tensor.dim() == 1:
        yield from tensor.split(PIECE_ELEMENTS_MAX)
    else:
        for part in tensor.unbind(0):
            yield from _pieces(part)


def widest(page: torch.Tensor) -> torch.Tensor:
    """Bytes, [..., bytes], as larger elements where they can be: fewer of them are faster."""
    width = _WIDE.itemsize
    aligned = page.shape[-1] % width == 0 and page.storage_offset() % width == 0
    if not aligned or any(stride % width for stride in page.stride()[:-1]):
        return page
    return page.view(_WIDE)
