"""The command `kvstore replay`: options in, tables, curves and JSON out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import click
from rich.console import Console

from kvstore.config import parse_seconds
from kvstore.errors import ConfigError, KVStoreError
from kvstore.eviction import DEFAULT, POLICIES
from kvstore.replay import page, progress, read, table
from kvstore.replay.admission import ADMISSIONS
from kvstore.replay.model import DEFAULT_MODEL, ModelShape, model_shape
from kvstore.replay.sweep import Plan, Weight, block_bytes, default_capacities, sweep
from kvstore.replay.trace import Trace

GIB = 1 << 30


class _List(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """Values with commas between them."""

    def __init__(self, name: str, one: Callable[[str], object]):
        self.name = name
        self._one = one

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        if not isinstance(value, str):
            return value
        try:
            return [self._one(part.strip()) for part in value.split(",")]
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _above_zero(convert: Callable[[str], float], what: str) -> Callable[[str], float]:
    def one(text: str) -> float:
        try:
            number = convert(text)
        except ValueError:
            number = 0
        if not 0 < number < 1 << 40:
            raise ValueError(f"{text!r} is not {what}; write one, or several with commas")
        return number

    return one


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def one(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is none of {', '.join(names)}")
        return text

    return one


def _ttl(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    try:
        return None if value is None else parse_seconds(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "policies",
    type=_List("names", _one_of(tuple(POLICIES))),
    default=",".join(POLICIES),
    show_default=True,
    help=f"Eviction policies, with commas. The server's own, {DEFAULT}, always runs too.",
)
@click.option(
    "--admission",
    "admissions",
    type=_List("names", _one_of(tuple(ADMISSIONS))),
    default="all",
    show_default=True,
    help="Rules for what is stored, with commas: all; second-sight, what was asked for before; "
    "gain, the server's: at first sight where a sample shows that it pays.",
)
@click.option(
    "--capacity-blocks",
    "blocks",
    type=_List("numbers", _above_zero(int, "a number of blocks")),
    help="Capacities in blocks, with commas.  [default: 1, 5, 10, 25, 50 % of different blocks]",
)
@click.option(
    "--capacity-gib",
    "gib",
    type=_List("numbers", _above_zero(float, "a size in GiB")),
    help="Capacities in GiB, with commas; --model tells how large a block is.",
)
@click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    help="For bytes and prefill seconds: llama-3.1-8b, llama-3.1-70b, or a folder or file with "
    "a model's config.json.",
)
@click.option("--ttl", callback=_ttl, help="Drop what was not used so long: 15m, 12h.")
@click.option(
    "--warmup",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="The share of requests, from the first, that fills the store and is not counted.",
)
@click.option(
    "--weight",
    type=click.Choice(["tokens", "blocks"]),
    default="tokens",
    show_default=True,
    help="What the curves and the share of the optimal are counted in.",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(1, 1 << 20),
    help="Tokens a block, where the trace doesn't say.  [default for Mooncake: 512]",
)
@click.option("--tokenizer", help="For traces of text: a tokenizer.json, its folder, or a name.")
@click.option("--skip-bad", is_flag=True, help="Leave damaged lines out, and count them.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write curves and table as one self-contained page.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line a trace, for scripts.")
def replay(
    traces: tuple[Path, ...],
    policies: list[str],
    admissions: list[str],
    blocks: list[int] | None,
    gib: list[float] | None,
    model: str,
    ttl: float | None,
    warmup: float,
    weight: str,
    block_tokens: int | None,
    tokenizer: str | None,
    skip_bad: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """What a store of some size would earn: its own index and policies over recorded traffic.

    TRACES are files, plain or gzip: Mooncake JSONL, coding-agent session JSON (all sessions
    given make one trace), JSONL of token ids or of text, or what `kvstore record` wrote.

    \b
    Examples:
      kvstore replay trace.jsonl.gz
      kvstore replay trace.jsonl.gz --capacity-gib 16,64,256 --model llama-3.1-70b
      kvstore replay session_*.json --policy lru --admission all,second-sight --html replay.html
      kvstore replay prompts.jsonl --block-tokens 64 --tokenizer ./my-model
    """
    if blocks and gib:
        raise click.UsageError("give --capacity-blocks or --capacity-gib, not both")
    console = Console()
    console.width = max(console.width, table.WIDTH_MIN)
    try:
        shape = model_shape(model)
        tokenize = read.tokenizer(tokenizer) if tokenizer else None
        options = read.Options(block_tokens, tokenize, skip_bad)
        found = _read(traces, options)
        plans = [
            Plan(
                _capacities(trace, shape, blocks, gib),
                policies,
                admissions,
                ttl,
                warmup,
                cast(Weight, weight),
            )
            for trace in found
        ]
    except KVStoreError as error:
        raise click.ClickException(str(error)) from error
    steps = sum(plan.steps(trace) for plan, trace in zip(plans, found, strict=True))
    with progress.bar("replaying", steps) as advance:
        results = [
            sweep(trace, plan, shape, advance) for trace, plan in zip(found, plans, strict=True)
        ]
    for trace, plan, swept in zip(found, plans, results, strict=True):
        if as_json:
            click.echo(json.dumps(swept.document))
            if trace.skipped:
                click.echo(f"{trace.name}: {trace.skipped} damaged lines left out", err=True)
        else:
            table.show(console, trace, plan, swept)
    if html is not None:
        html.write_text(page.render(results, cast(Weight, weight)), encoding="utf-8")
        click.echo(f"wrote {html}", err=True)


def _read(paths: Sequence[Path], options: read.Options) -> list[Trace]:
    sizes = [path.stat().st_size for path in paths if path.exists()]
    with progress.bar("reading", sum(sizes)) as advance:
        return read.read(paths, options, advance)


def _capacities(
    trace: Trace, model: ModelShape, blocks: list[int] | None, gib: list[float] | None
) -> list[int]:
    if gib:
        blocks = [int(size * GIB / block_bytes(trace, model)) for size in gib]
        if not all(blocks):
            raise ConfigError(f"--capacity-gib: {min(gib):g} GiB is less than one block")
    return sorted(set(blocks)) if blocks else default_capacities(trace)
