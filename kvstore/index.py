"""Which blocks are in the arena: key to block, parents, and the longest prefix (D5).

Invariants: a block's `children` are the blocks in the index, or being stored, whose parent it is;
a block whose parent is not here waits among the orphans, and is adopted when the parent
comes. Knows nothing of slots' contents, sizes, leases, or of what to evict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.types import BlockKey, NamespaceInfo


class Block:
    """One block of KV in the arena. Compared and hashed by identity."""

    __slots__ = (
        "_children",
        "checksum",
        "colder",
        "generation",
        "key",
        "namespace",
        "offset",
        "parent",
        "parent_key",
        "pins",
        "touched",
        "warmer",
    )

    def __init__(
        self, namespace: Namespace, key: BlockKey, parent_key: BlockKey | None, offset: int
    ):
        self.namespace = namespace
        self.key = key
        self.parent_key = parent_key
        self.parent: Block | None = None
        self._children: Block | set[Block] | None = None  # mostly one; a set takes 200 bytes
        self.pins = 0
        """Leases and background work that need the block to stay."""
        self.offset = offset
        self.generation = 0
        """What the slot's header carries while the block is readable; 0 until committed."""
        self.checksum: int | None = None
        self.touched = 0
        """When it was last used, as a count of uses; for comparing blocks of different sizes."""
        self.colder: Block | None = None
        """Its neighbours in its eviction policy's order: the policy's own."""
        self.warmer: Block | None = None

    @property
    def children(self) -> list[Block]:
        """The blocks that follow this one directly."""
        if self._children is None:
            return []
        return list(self._children) if isinstance(self._children, set) else [self._children]

    def add_child(self, child: Block) -> None:
        """Links a block that follows this one."""
        child.parent = self
        if self._children is None:
            self._children = child
        elif isinstance(self._children, set):
            self._children.add(child)
        else:
            self._children = {self._children, child}

    def remove_child(self, child: Block) -> None:
        """Unlinks a block that follows this one."""
        child.parent = None
        if isinstance(self._children, set) and len(self._children) > 1:
            self._children.remove(child)
        else:
            self._children = None

    def ancestors(self) -> list[Block]:
        """The blocks before this one that are linked to it, first block first."""
        path = []
        block = self.parent
        while block is not None:
            path.append(block)
            block = block.parent
        path.reverse()
        return path

    @property
    def evictable(self) -> bool:
        """Whether nothing needs the block: no lease, and no block that comes after it."""
        return self.pins == 0 and self._children is None


class Namespace:
    """The blocks of one namespace. All have the same size."""

    def __init__(self, info: NamespaceInfo):
        self.info = info
        self._blocks: dict[BlockKey, Block] = {}
        self._pending: dict[BlockKey, Block] = {}
        self._orphans: dict[BlockKey, list[Block]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def get(self, key: BlockKey) -> Block | None:
        """The readable block of this key, if it is here."""
        return self._blocks.get(key)

    def is_pending(self, key: BlockKey) -> bool:
        """Whether somebody is storing this block right now."""
        return key in self._pending

    def is_storing(self, block: Block) -> bool:
        """Whether this very block is still reserved, and its slot its holder's to write to."""
        return self._pending.get(block.key) is block

    @property
    def pending(self) -> Iterator[Block]:
        """The blocks that are being stored."""
        return iter(self._pending.values())

    def longest_prefix(self, keys: Sequence[BlockKey]) -> list[Block]:
        """The blocks of the longest run of present keys from the start of `keys`."""
        blocks = list(map(self._blocks.get, keys))
        if None in blocks:
            del blocks[blocks.index(None) :]
        return blocks  # type: ignore[return-value]  # no None is left

    def begin(self, block: Block) -> None:
        """Notes a block as being stored: lookups don't see it, and its parent stays meanwhile."""
        assert block.key not in self._pending
        assert block.key not in self._blocks
        self._pending[block.key] = block
        if block.parent_key is not None:
            parent = self._blocks.get(block.parent_key) or self._pending.get(block.parent_key)
            self._link(block, parent)

    def commit(self, block: Block) -> None:
        """Makes a block that was being stored visible, and adopts the orphans that follow it."""
        del self._pending[block.key]
        self._blocks[block.key] = block
        if block.parent is None and block.parent_key is not None:
            parent = self._blocks.get(block.parent_key) or self._pending.get(block.parent_key)
            if parent is not None:
                self._link(block, parent)
            else:
                self._orphans.setdefault(block.parent_key, []).append(block)
        for child in self._orphans.pop(block.key, ()):
            self._link(child, block)

    def abort(self, block: Block) -> None:
        """Forgets a block that was being stored."""
        del self._pending[block.key]
        self._unlink(block)

    def remove(self, block: Block) -> None:
        """Forgets a readable block. What came after it, if anything, becomes an orphan."""
        del self._blocks[block.key]
        self._unlink(block)

    def _link(self, block: Block, parent: Block | None) -> None:
        if parent is None or parent is block or (block.children and block in parent.ancestors()):
            return  # a client made keys up: a hash can't follow itself
        parent.add_child(block)

    def _unlink(self, block: Block) -> None:
        if block.parent is not None:
            block.parent.remove_child(block)
        elif block.parent_key in self._orphans:
            siblings = self._orphans[block.parent_key]
            if block in siblings:
                siblings.remove(block)
                if not siblings:
                    del self._orphans[block.parent_key]
        for child in block.children:
            block.remove_child(child)
            if child.key in self._blocks:
                self._orphans.setdefault(block.key, []).append(child)
