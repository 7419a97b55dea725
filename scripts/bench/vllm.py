"""What the store does for vLLM: time to first token with it, without, and beside others.

See --help.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # its folder has another vllm

from rich.table import Table

from kvstore.testing import ServerProcess
from scripts import model
from scripts.bench import common
from scripts.scenarios import HANDBOOK
from scripts.vllm_engine import Engine, connector

HELP = """\
Run it with the environment that `scripts/test --vllm` makes: .venv-vllm/bin/python.

workloads
  long_document  questions about one document of 3,000 tokens, answers of 8 tokens
  chat           the turns of a conversation, each prompt the one before it and more
  short_prompt   prompts of 60 tokens that never come again, answers of 64 tokens
modes
  off            vLLM without a connector
  kvstore        with this project's
  disk           with vLLM's ExampleConnector, which keeps KV in files
  lmcache        with LMCache's server and connector, if --lmcache names a Python that has both

One engine a mode plays everything once, so that it is stored, and is ended. New engines then
play it again, request by request in turns, so that all modes see the same machine. vLLM's own
prefix cache is off, so that every request asks the store. Ratios are medians over requests and
rounds of time over that of `off` for the same request in the same round.

JSON: workloads[] have name, mode, ttft_s, total_s, cached_tokens, ttft_over_off, total_over_off.
"""

DOCUMENT_TOKENS = 3000
MODES = ("off", "kvstore", "disk", "lmcache")
LMCACHE_START_S = 60.0


@dataclass(frozen=True)
class Ask:
    """One request."""

    workload: str
    prompt: list[int]
    answer_tokens: int


def asks_of(text: list[int], seed: int, quick: bool) -> list[Ask]:
    """All requests of one pass; `seed` makes the short prompts new ones."""
    document = (text * 3)[:DOCUMENT_TOKENS]
    asks = [
        Ask("long_document", [*document, *text[start : start + 30]], 8)
        for start in range(0, 60 if quick else 120, 30)
    ]
    conversation = text[400:800]
    for turn in range(2 if quick else 4):
        conversation = [*conversation, *text[turn * 100 : turn * 100 + 90]]
        asks.append(Ask("chat", list(conversation), 24))
    for number in range(2 if quick else 5):
        start = 100 + (seed * 37 + number * 61) % 1200
        asks.append(Ask("short_prompt", [seed + 300, *text[start : start + 60]], 64))
    return asks


@contextmanager
def lmcache_server(python: str, port: int) -> Iterator[None]:
    """LMCache's own server, as its documentation starts it for engines without a GPU."""
    command = [
        str(Path(python).parent / "lmcache"),
        *("server", "--host", "127.0.0.1", "--port", str(port), "--l1-size-gb", "1"),
        *("--eviction-policy", "LRU", "--no-l1-use-lazy"),
        *("--supported-transfer-mode", "engine_driven", "--shm-name", f"bench{os.getpid()}"),
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline_s = time.monotonic() + LMCACHE_START_S
            while time.monotonic() < deadline_s and process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.2)
            else:
                log.seek(0)
                raise RuntimeError(f"lmcache server: {log.read()[-2000:].decode()}")
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


@contextmanager
def modes(lmcache: str | None) -> Iterator[dict[str, dict[str, Any]]]:
    """The arguments of each mode's engine, while what they need is running."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvb")))
        server = stack.enter_context(ServerProcess(folder / "kv", cpu_bytes="1GiB"))
        made: dict[str, dict[str, Any]] = {
            "off": {},
            "kvstore": {"kv_transfer_config": connector(server.target)},
            "disk": {
                "kv_transfer_config": {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"shared_storage_path": str(folder / "disk")},
                }
            },
        }
        if lmcache is not None:
            port = common.free_port()
            stack.enter_context(lmcache_server(lmcache, port))
            made["lmcache"] = {
                "python": lmcache,
                "kv_transfer_config": {
                    "kv_connector": "LMCacheMPConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {
                        "lmcache.mp.host": "tcp://127.0.0.1",
                        "lmcache.mp.port": port,
                    },
                },
            }
        yield made


def measure(text: list[int], lmcache: str | None, quick: bool) -> list[dict[str, Any]]:
    """The rows of the JSON."""
    rounds = 1 if quick else 3
    seen: dict[tuple[str, str], list[tuple[float, float, int]]] = {}
    names = [name for name in MODES if name != "lmcache" or lmcache is not None]
    steps = len(names) * (rounds + 1) * len(asks_of(text, 0, quick))
    with ExitStack() as stack:
        settings = stack.enter_context(modes(lmcache))
        advance = stack.enter_context(common.progress("vLLM", steps))

        def engine(name: str) -> Engine:
            made = Engine(model.prepare("float32"), disable_log_stats=False, **settings[name])
            return stack.enter_context(made)

        for name in names:
            with Engine(
                model.prepare("float32"), disable_log_stats=False, **settings[name]
            ) as first:
                for ask in asks_of(text, 0, quick):
                    first.generate(ask.prompt, max_tokens=ask.answer_tokens)
                    advance(f"{name}, storing")
        engines = {name: engine(name) for name in names}
        for one in engines.values():
            one.generate(text[900:1300], max_tokens=2)  # what the first request pays for alone
        for turn in range(rounds):
            for number, ask in enumerate(asks_of(text, turn + 1, quick)):
                for name in common.rotated(names, turn + number):
                    (answer,) = engines[name].generate(ask.prompt, max_tokens=ask.answer_tokens)
                    seen.setdefault((ask.workload, name), []).append(
                        (answer["ttft_s"], answer["total_s"], answer["cached"])
                    )
                    advance(f"{name}, {ask.workload}")
    rows = []
    for (workload, name), values in seen.items():
        ttft_s, total_s, cached = zip(*values, strict=True)
        off_ttft_s, off_total_s, _ = zip(*seen[workload, "off"], strict=True)
        rows.append(
            {
                "name": workload,
                "mode": name,
                "ttft_s": statistics.median(ttft_s),
                "total_s": statistics.median(total_s),
                "cached_tokens": sum(cached),
                "ttft_over_off": common.median_ratio(ttft_s, off_ttft_s),
                "total_over_off": common.median_ratio(total_s, off_total_s),
            }
        )
    return sorted(rows, key=lambda row: (str(row["name"]), MODES.index(str(row["mode"]))))


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table."""
    names = ["workload", "mode", "TTFT, s", "total, s", "TTFT / off", "total / off", "cached"]
    table = common.table("vLLM on the CPU, each request in a fresh engine process", names)
    for row in rows:
        table.add_row(
            row["name"],
            row["mode"],
            f"{row['ttft_s']:.3f}",
            f"{row['total_s']:.3f}",
            f"{row['ttft_over_off']:.3f}",
            f"{row['total_over_off']:.3f}",
            f"{row['cached_tokens']:,}",
        )
    return table


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = common.parser("Measures what the store does for vLLM.", HELP)
    parser.add_argument(
        "--lmcache", metavar="PYTHON", help="the Python of an environment with vLLM and LMCache"
    )
    chosen = parser.parse_args(arguments)
    if chosen.lmcache and shutil.which(chosen.lmcache) is None:
        parser.error(f"there is no Python at {chosen.lmcache}")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.prepare("float32"))
    text = tokenizer(HANDBOOK.read_text(encoding="utf-8")).input_ids
    rows = measure(text, chosen.lmcache, chosen.quick)
    document = {
        **common.circumstances(),
        "quick": chosen.quick,
        "workloads": rows,
        "absent": [] if chosen.lmcache else ["lmcache"],
    }
    common.publish(document, [table_of(rows)], chosen.json)


if __name__ == "__main__":
    main()
