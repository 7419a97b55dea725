"""Host memory that prefixes are loaded into, kept for the next one.

The first touch of fresh memory takes several times as long as the copy into it. A model's first
step mostly copies what was loaded into tensors of its own, and then the memory is free again.
"""

from __future__ import annotations

import sys
import threading

import numpy as np
import torch

_OWN_REFERENCES = 3
"""Of an array that no tensor uses: the attribute's, the local name's, and the counting call's."""


class Room:
    """Keeps as much as the largest prefix took. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._array = np.empty(0, np.uint8)

    def take(self, size_bytes: int) -> torch.Tensor:
        """So many bytes of any content. They are kept until no tensor refers to them any more."""
        with self._lock:
            array = self._array
            # A tensor's storage holds a reference to the array, and so does each view of it.
            if array.nbytes < size_bytes or sys.getrefcount(array) > _OWN_REFERENCES:
                self._array = array = np.empty(size_bytes, np.uint8)
            return torch.from_numpy(array[:size_bytes])
