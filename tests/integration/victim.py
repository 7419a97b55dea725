"""A client process that gets stuck half way, to be stopped and killed by a test.

    python -m tests.integration.victim store|load TARGET NAME BLOCKS

It prints "stuck" when half the blocks are done, waits for a line, fills the rest of the block in
its hands with garbage, goes on, and prints what came of it.
"""

from __future__ import annotations

import sys

import kvstore
from tests.integration.support import chain, content, info_of

GARBAGE = 0xEE


def main() -> None:
    mode, target, name, count = sys.argv[1:]
    keys = chain(name, int(count))

    def wait(index: int) -> None:
        if index == len(keys) // 2:
            print("stuck", flush=True)
            sys.stdin.readline()

    def source(index: int, into: memoryview) -> None:
        into[:] = content(keys[index], len(into))
        wait(index)
        if index == len(keys) // 2:
            into[:] = bytes([GARBAGE]) * len(into)

    with kvstore.connect(target) as client:
        assert client.shares_memory
        namespace = client.open(info_of(name))
        if mode == "store":
            print(namespace.store(keys, source), flush=True)
        else:
            found = namespace.lookup(keys, lease_s=600)
            print(namespace.load(found, lambda index, view: wait(index)), flush=True)


if __name__ == "__main__":
    main()
