"""Whether the decisions to load and to store are right: against never, always, and hindsight.

See --help.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList

import kvstore
from engine.admission import Override
from engine.costs import CostModel
from engine.plugins.transformers import CachedModel
from kvstore.embedded import EmbeddedValkey
from kvstore.testing import ServerProcess
from kvstore.types import TierName
from scripts import model
from scripts.bench import common
from scripts.bench.slow_link import SlowLink
from scripts.demo_engine import FirstToken
from scripts.scenarios import HANDBOOK

HELP = """\
workloads
  long_document      questions about two documents of 1,000 tokens, answers of 8 tokens
  chat               the turns of a conversation, each prompt the one before it and more
  short_prompt       prompts of 50 tokens that never come again, answers of 48 tokens
  mixed_small_cache  the three in turns, with four documents of which two fit into the cache
  slow_redis         documents that only Redis has, behind a link of 20 MB/s and 50 ms
modes
  off       the model alone
  always    all that is found is loaded, all that is computed is stored
  measured  the decisions as they are, by what was measured so far
  oracle    for each request the quicker one of off and always, chosen afterwards

A real small model computes on this machine's CPU; each mode has a server of its own, and every
request goes to all modes in turns. A request's time includes the time until what it stores is
stored. Each round has other texts and new servers. Numbers are of the medians over rounds, per
request; totals are their sums. The cost model starts with what an engine has measured in its
first minute.

JSON: workloads[] have name, mode, ttft_s (median), total_s (sum), total_over_off,
total_over_oracle, worst_over_off (of one request), bytes_stored, bytes_loaded.
"""

MODES = ("off", "always", "measured")
DOCUMENT_TOKENS = 1000
LINK_BYTES_PER_S, LINK_LATENCY_S = 20e6, 0.05
WARM_UP_TOKENS = (60, 100, 300, 700, 1050)


@dataclass(frozen=True)
class Ask:
    """One request: what was said before in its thread, and more."""

    thread: str
    tokens: list[int]
    answer_tokens: int
    goes_on: bool = False
    """Whether the thread's next request begins with this one and its answer."""
    from_redis: bool = False
    """Whether the arena is emptied before."""


@dataclass
class Workload:
    """Requests, and the server that they go to."""

    name: str
    asks: list[Ask]
    threads: dict[str, list[int]] = field(default_factory=dict)
    """What each thread begins with."""
    flags: tuple[str, ...] = ("--no-redis",)
    cpu_bytes: str = "1GiB"
    slow_redis: bool = False


@dataclass(frozen=True)
class Took:
    """One request's times, in seconds."""

    ttft_s: float
    total_s: float


class Texts:
    """Pieces of a real text, no two of which begin alike."""

    def __init__(self, ids: list[int], seed: int):
        self._ids = ids
        self._chance = random.Random(seed)

    def take(self, tokens: int) -> list[int]:
        """So many tokens, after a few that make them new."""
        start = self._chance.randrange(len(self._ids) - tokens)
        new = self._chance.choices(self._ids, k=4)
        return [*new, *self._ids[start : start + tokens - len(new)]]


def workloads(texts: Texts, quick: bool) -> list[Workload]:
    """All workloads of one round."""
    questions, turns, shorts = (2, 2, 2) if quick else (4, 5, 6)
    length = 200 if quick else DOCUMENT_TOKENS

    def document_asks(names: str, count: int, **how: Any) -> list[Ask]:
        return [Ask(name, texts.take(30), 8, **how) for _ in range(count) for name in names]

    def documents(names: str) -> dict[str, list[int]]:
        return {name: texts.take(length) for name in names}

    talk = [Ask("chat", texts.take(200 if turn == 0 else 60), 24, True) for turn in range(turns)]
    alone = [Ask(f"short {turn}", texts.take(50), 48) for turn in range(shorts)]
    order = "AACABADABACABADA"[: 4 if quick else None]
    mixed: list[Ask] = []
    for position, name in enumerate(order):
        mixed.append(Ask(name, texts.take(30), 8))
        if position % 4 == 1:
            mixed.append(Ask("chat", texts.take(60), 24, True))
        if position % 4 == 3:
            mixed.append(Ask(f"short {position}", texts.take(50), 48))
    return [
        Workload("long_document", document_asks("AB", questions), documents("AB")),
        Workload("chat", talk),
        Workload("short_prompt", alone),
        Workload("mixed_small_cache", mixed, documents("ABCD"), cpu_bytes="128MiB"),
        Workload(
            "slow_redis",
            document_asks("AB", questions, from_redis=True),
            documents("AB"),
            (),
            slow_redis=True,
        ),
    ]


class Bench:
    """The model, and what it has learnt of itself."""

    def __init__(self) -> None:
        folder = str(model.prepare("float32"))
        self.net: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.text: list[int] = tokenizer(HANDBOOK.read_text(encoding="utf-8")).input_ids
        self.costs = CostModel()

    def ask(
        self, generate: Callable[..., Any], prompt: list[int], answer_tokens: int, **how: Any
    ) -> tuple[Took, list[int]]:
        """One greedy answer, without what is stored after it."""
        tokens = torch.tensor([prompt])
        first = FirstToken()
        started_s = time.perf_counter()
        output = generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=answer_tokens,
            min_new_tokens=answer_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([first]),
            **how,
        )
        ended_s = time.perf_counter()
        took = Took(first.at_s - started_s, ended_s - started_s)
        return took, output[0, len(prompt) :].tolist()

    def warm_up(self, quick: bool) -> None:
        """What an engine learns in its first minute."""
        texts = Texts(self.text, seed=99)
        with engine(self.net, Workload("warm_up", [])) as cached:
            for tokens in WARM_UP_TOKENS[: 2 if quick else None]:
                for _ in range(2):
                    self.ask(cached.generate, texts.take(tokens), 16)
            self.costs = cached.session.costs


@contextmanager
def engine(net: Any, workload: Workload) -> Iterator[CachedModel]:
    """A server of its own, and the model with it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd")))
        flags = list(workload.flags)
        if workload.slow_redis:
            valkey = EmbeddedValkey(folder / "valkey", 1 << 30)
            valkey.start()
            stack.callback(valkey.stop, 5.0)
            link = stack.enter_context(SlowLink(valkey.socket, LINK_BYTES_PER_S, LINK_LATENCY_S))
            flags.append(f"--redis-url={link.url}")
        server = stack.enter_context(
            ServerProcess(folder / "s", *flags, cpu_bytes=workload.cpu_bytes)
        )
        store = stack.enter_context(kvstore.connect(server.target))
        yield stack.enter_context(CachedModel(net, store=store, pool_bytes=0))


@dataclass
class Played:
    """A workload's requests in all modes, in one round."""

    took: dict[str, list[Took]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    bytes_stored: dict[str, int] = field(default_factory=dict)
    bytes_loaded: dict[str, int] = field(default_factory=dict)


def play(bench: Bench, workload: Workload, advance: common.Advance) -> Played:
    """Every request in every mode, each beginning with another one."""
    played = Played()
    threads = {name: list(tokens) for name, tokens in workload.threads.items()}
    with engine(bench.net, workload) as always, engine(bench.net, workload) as measured:
        cached = {"always": always, "measured": measured}
        measured.session.learn(lambda costs: bench.costs)
        for turn, ask in enumerate(workload.asks):
            prompt = [*threads.get(ask.thread, []), *ask.tokens]
            for mode in common.rotated(MODES, turn):
                took, answer = _ask(bench, cached.get(mode), mode, prompt, ask)
                played.took[mode].append(took)
            if ask.goes_on:
                threads[ask.thread] = [*prompt, *answer]
            advance(workload.name)
        for mode, one in cached.items():
            usage = one.session.usage
            played.bytes_stored[mode] = usage.stored.bytes
            played.bytes_loaded[mode] = sum(
                hit.bytes for tier, hit in usage.hits.items() if tier is not TierName.GPU
            )
    return played


def _ask(
    bench: Bench, cached: CachedModel | None, mode: str, prompt: list[int], ask: Ask
) -> tuple[Took, list[int]]:
    if cached is None:
        return bench.ask(bench.net.generate, prompt, ask.answer_tokens)
    if ask.from_redis:
        cached._store.clear(arena_only=True)  # which waits for the write-through
    how = {"load": Override.ALWAYS, "keep": Override.ALWAYS} if mode == "always" else {}
    took, answer = bench.ask(cached.generate, prompt, ask.answer_tokens, **how)
    started_s = time.perf_counter()
    cached.session.flush()
    return Took(took.ttft_s, took.total_s + time.perf_counter() - started_s), answer


def rows_of(name: str, rounds: Sequence[Played]) -> list[dict[str, Any]]:
    """One row a mode."""
    requests = range(len(rounds[0].took["off"]))

    def medians(mode: str, part: str) -> list[float]:
        return [
            statistics.median(getattr(played.took[mode][request], part) for played in rounds)
            for request in requests
        ]

    totals = {mode: medians(mode, "total_s") for mode in MODES}
    ttfts = {mode: medians(mode, "ttft_s") for mode in MODES}
    oracle = ["off" if totals["off"][at] <= totals["always"][at] else "always" for at in requests]
    totals["oracle"] = [totals[mode][at] for at, mode in enumerate(oracle)]
    ttfts["oracle"] = [ttfts[mode][at] for at, mode in enumerate(oracle)]
    return [
        {
            "name": name,
            "mode": mode,
            "ttft_s": statistics.median(ttfts[mode]),
            "total_s": sum(total),
            "total_over_off": sum(total) / sum(totals["off"]),
            "total_over_oracle": sum(total) / sum(totals["oracle"]),
            "worst_over_off": max(a / b for a, b in zip(total, totals["off"], strict=True)),
            "bytes_stored": _median_of(rounds, "bytes_stored", mode),
            "bytes_loaded": _median_of(rounds, "bytes_loaded", mode),
        }
        for mode, total in totals.items()
    ]


def _median_of(rounds: Sequence[Played], part: str, mode: str) -> int:
    return int(statistics.median(getattr(played, part).get(mode, 0) for played in rounds))


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """All rows."""
    table = common.table(
        "never, always, by measured cost, and the better of the first two in hindsight",
        ("workload", "mode", "TTFT, s", "total, s", "/ off", "/ oracle", "worst / off",
         "stored, MB", "loaded, MB"),
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["name"],
            row["mode"],
            f"{row['ttft_s']:.3f}",
            f"{row['total_s']:.2f}",
            f"{row['total_over_off']:.3f}",
            f"{row['total_over_oracle']:.3f}",
            f"{row['worst_over_off']:.2f}",
            f"{row['bytes_stored'] / 1e6:,.0f}",
            f"{row['bytes_loaded'] / 1e6:,.0f}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = common.parser(__doc__.splitlines()[0], HELP)
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--only", metavar="WORKLOAD", action="append", help="may be given again")
    options = parser.parse_args(arguments)
    rounds = 1 if options.quick else options.rounds
    bench = Bench()
    bench.warm_up(options.quick)
    played: dict[str, list[Played]] = {}
    everything = [
        [
            workload
            for workload in workloads(Texts(bench.text, seed), options.quick)
            if not options.only or workload.name in options.only
        ]
        for seed in range(rounds)
    ]
    steps = sum(len(workload.asks) for one in everything for workload in one)
    with common.progress("decisions", steps) as advance:
        for one in everything:
            for workload in one:
                played.setdefault(workload.name, []).append(play(bench, workload, advance))
    rows = [row for name, each in played.items() for row in rows_of(name, each)]
    document = {**common.circumstances(), "workloads": rows}
    common.publish(document, [table_of(rows)], options.json)


if __name__ == "__main__":
    main()
