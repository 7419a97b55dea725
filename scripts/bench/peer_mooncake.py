"""A client, or a holder of memory, of Mooncake Store: run by the Python that has it.

Knows nothing of this project. `peers.py` starts it and talks to it over its stdin and stdout, a
line of JSON each way. The blocks are in files that both have mapped, so that it copies the same
bytes as every other path, and what it loads can be compared.
"""

import ctypes
import json
import mmap
import sys

SEGMENT_BYTES_LEAST = 16 << 20


def mapped(path: str) -> tuple[mmap.mmap, int, int]:
    """A mapping, and the address and the size of a file in memory."""
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)


def main() -> None:
    """Arguments: the master's address, bytes to hold for others, then the files to copy from
    and to."""
    from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

    master, held, *files = sys.argv[1:]
    store = MooncakeDistributedStore()
    failed = store.setup(
        "127.0.0.1", "P2PHANDSHAKE", int(held), SEGMENT_BYTES_LEAST, "tcp", "", master
    )
    if failed:
        raise SystemExit(f"mooncake: setup failed with {failed}")
    memories = [mapped(path) for path in files]
    for _, address, size in memories:
        if store.register_buffer(address, size):
            raise SystemExit("mooncake: can't register a buffer")
    answer = sys.__stdout__
    print("\nready", file=answer, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        names, size = ask["names"], ask["block_bytes"]
        if ask["op"] == "forget":
            store.remove_all(True)
            done = True
        else:
            _, base, _ = memories[0 if ask["op"] == "store" else 1]
            places = [base + ask["start"] + index * size for index in range(len(names))]
            call = store.batch_put_from if ask["op"] == "store" else store.batch_get_into
            results = call(names, places, [size] * len(names))
            done = all(result >= 0 for result in results)
        print(f"\nanswer {json.dumps(done)}", file=answer, flush=True)


if __name__ == "__main__":
    main()
