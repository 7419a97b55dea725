"""How fast blocks move through this project, and through others that keep KV. See --help."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path as File
from typing import Any

if not __package__:  # run as a file
    sys.path.insert(0, str(File(__file__).resolve().parents[2]))

from scripts.bench import common, data_plane
from scripts.bench.paths import Batch, Buffers, Path

HELP = """\
The paths of `data_plane` (see its --help), in the same rounds with those of peers:

  mooncake_tcp  Mooncake Store over TCP: a master, a process that holds memory, and a client.
                Make it an environment of its own:
                  python3 -m venv mc && mc/bin/pip install mooncake-transfer-engine-non-cuda
                (it needs Debian's libibverbs1), and name its Python with --mooncake.

Mooncake's shared-memory mode and LMCache are not measured.
A peer that is not named is listed as absent, and not measured. All copy between the same two
buffers, and what was loaded is compared. Numbers are medians over rounds.

JSON: as data_plane's, and absent: the peers that were not measured.
"""

START_S = 30.0


class Mooncake(Path):
    """Mooncake Store's client in a process of its own, with the benchmark's buffers mapped."""

    name = "mooncake_tcp"

    def __init__(self, worker: subprocess.Popen[str], buffers: Buffers):
        self._worker = worker
        self._buffers = buffers

    def store(self, batch: Batch) -> None:
        self._ask("store", batch, batch.source.ctypes.data - self._buffers.source.ctypes.data)

    def load(self, batch: Batch) -> None:
        self._ask("load", batch, batch.target.ctypes.data - self._buffers.target.ctypes.data)

    def forget(self) -> None:
        self._say({"op": "forget", "names": [], "block_bytes": 0})

    def clear(self) -> None:
        self.forget()

    def _ask(self, op: str, batch: Batch, start: int) -> None:
        names = [key.hex() for key in batch.keys]
        ask = {"op": op, "names": names, "block_bytes": batch.block_bytes, "start": start}
        assert self._say(ask), f"mooncake: {op} failed"

    def _say(self, ask: dict[str, Any]) -> bool:
        assert self._worker.stdin is not None
        self._worker.stdin.write(json.dumps(ask) + "\n")
        self._worker.stdin.flush()
        return bool(json.loads(_line(self._worker, "answer")))


def _line(worker: subprocess.Popen[str], word: str) -> str:
    """The rest of the next line that begins with a word; libraries write there too."""
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith(word):
            return line[len(word) :]
    raise RuntimeError(f"the peer ended with {worker.wait()}: see what it wrote above")


@contextmanager
def mooncake(python: str, buffers: Buffers, held_bytes: int) -> Iterator[Path]:
    """Mooncake Store, started and ready."""
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())

        def start(*command: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        port = common.free_port()
        binary = str(File(python).parent / "mooncake_master")
        command = [binary, f"--rpc_port={port}", f"--metrics_port={common.free_port()}"]
        master = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(master.wait)
        stack.callback(master.kill)
        time.sleep(1.0)
        script = str(File(__file__).with_name("peer_mooncake.py"))
        address = f"127.0.0.1:{port}"
        holder = start(python, script, address, str(held_bytes))
        _line(holder, "ready")
        worker = start(python, script, address, "0", *map(str, buffers.files))
        _line(worker, "ready")
        yield Mooncake(worker, buffers)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = common.parser("Measures how fast blocks move, here and through peers.", HELP)
    parser.add_argument(
        "--mooncake", metavar="PYTHON", help="the Python of an environment with Mooncake Store"
    )
    chosen: argparse.Namespace = parser.parse_args(arguments)
    if chosen.mooncake and shutil.which(chosen.mooncake) is None:
        parser.error(f"there is no Python at {chosen.mooncake}")
    scale = data_plane.QUICK if chosen.quick else data_plane.FULL
    with ExitStack() as stack:
        folder = File(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        buffers = Buffers(scale.working_bytes, folder)
        peers: list[Path] = []
        if chosen.mooncake:
            peers.append(stack.enter_context(mooncake(chosen.mooncake, buffers, scale.arena_bytes)))
        rows, calls = data_plane.measure(scale, buffers, peers)
    document = {
        **common.circumstances(),
        "quick": chosen.quick,
        "rows": rows,
        "calls": calls,
        "absent": [] if chosen.mooncake else ["mooncake_tcp"],
    }
    common.publish(document, data_plane.tables(rows, calls), chosen.json)
    if document["absent"]:
        print(f"absent: {', '.join(document['absent'])} (see --help)", file=sys.stderr)


if __name__ == "__main__":
    main()
