"""The command line: serve, report, explain, clear, record, replay.

Thin: each command calls what does the work.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import kvstore
from kvstore.config import load, parse_seconds, settings
from kvstore.errors import ConfigError, KVStoreError
from kvstore.replay.command import replay

TARGET_HELP = "The server: host:port or unix:/path. Default: the one on this host."


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvstore.__version__)
def cli() -> None:
    """A KV-cache offload and reuse service for LLM inference."""


def _server_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """One flag for each setting of the schema."""
    for setting in reversed(settings()):
        name = "--" + setting.name.replace("_", "-")
        switch = setting.default is False
        command = click.option(
            name,
            setting.name,
            help=setting.metadata["help"],
            is_flag=switch,
            flag_value="true" if switch else None,
            default=None,
        )(command)
    return command


@cli.command()
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    help="TOML file with any of the settings below, spelled with _ instead of -.",
)
@_server_flags
def serve(file: Path | None, **flags: str | None) -> None:
    """Run a server until Ctrl-C or SIGTERM.

    Every setting can be a flag, an environment variable (KVSTORE_CPU_BYTES=4GiB) or a line of
    the TOML file (cpu_bytes = "4GiB"); flags win over the environment, and that over the file.

    \b
    Examples:
      kvstore serve
      kvstore serve --cpu-bytes 32GiB --redis-url redis://cache.internal:6379
      kvstore serve --no-redis --listen 0.0.0.0:7700
    """
    from kvstore.assemble import assemble  # the server's parts are not needed by other commands

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        config = load(given, os.environ, file)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error

    async def run() -> None:
        server = assemble(config)
        try:
            await server.start()
        except BaseException:
            await server.close(config.drain_s)
            raise
        gib = server.store.cpu.arena.capacity_bytes / (1 << 30)
        click.echo(f"kvstore {kvstore.__version__} serves on {', '.join(server.targets)}")
        click.echo(f"CPU tier: {gib:.2f} GiB of shared memory in {server.store.cpu.arena.path}")
        if server.metrics_address is not None:
            click.echo(f"Metrics: http://{server.metrics_address}/metrics")
        sys.stdout.flush()
        await server.run_until_signalled()
        click.echo("kvstore has stopped")

    try:
        asyncio.run(run())
    except ConfigError as error:
        raise click.ClickException(str(error)) from error


@cli.command()
@click.argument("target", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the JSON document, for scripts.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report as one self-contained page.",
)
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
def report(target: str | None, as_json: bool, html: Path | None, show: bool) -> None:
    """Show what was hit, what was missed and why, and what it saved.

    TARGET is the server: host:port or unix:/path. Default: the one on this host.
    """
    from kvstore.report import page, text

    with kvstore.connect(target) as store:
        document = json.loads(_answer(store.report))
    if html is not None:
        html.write_text(page.render(document), encoding="utf-8")
        click.echo(f"wrote {html}", err=True)
        if show:
            webbrowser.open(html.resolve().as_uri())
    if as_json:
        click.echo(json.dumps(document, indent=2))
    elif html is None:
        click.echo(text.render(document, shutil.get_terminal_size((100, 24)).columns))


@cli.command()
@click.argument("target", required=False)
@click.option(
    "--last", default=10, show_default=True, type=click.IntRange(1), help="How many requests."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, for scripts.")
def explain(target: str | None, last: int, as_json: bool) -> None:
    """Show what was decided about the last requests, and the numbers behind it.

    For each request, the latest first: what was found, what of it was loaded, what was stored,
    and what loading, computing and storing were expected to take. The server keeps the last
    1,000.

    TARGET is the server: host:port or unix:/path. Default: the one on this host.
    """
    from kvstore.report import explain as words

    with kvstore.connect(target) as store:
        decisions = json.loads(_answer(lambda: store.explain(last)))
    if as_json:
        click.echo(json.dumps(decisions, indent=2))
    else:
        click.echo(words.render(decisions, shutil.get_terminal_size((100, 24)).columns), nl=False)


@cli.command()
@click.argument("target", required=False)
@click.option(
    "--arena-only", is_flag=True, help="Empty the CPU tier alone; the redis tier keeps its blocks."
)
@click.confirmation_option("--yes", prompt="Drop every block?")
def clear(target: str | None, arena_only: bool) -> None:
    """Drop all blocks: from every tier, or from the CPU tier alone.

    TARGET is the server: host:port or unix:/path. Default: the one on this host.
    """
    with kvstore.connect(target) as store:
        blocks, redis_blocks = _answer(lambda: store.clear(arena_only=arena_only))
    click.echo(f"dropped {blocks} blocks from the CPU tier, {redis_blocks} from the redis tier")


@cli.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("target", required=False)
@click.option("--namespace", help="Only this one; `kvstore report --json` has the fingerprints.")
@click.option(
    "--for", "time", help="End by itself after so long: 15m, 12h. Default: Ctrl-C ends it."
)
def record(file: Path, target: str | None, namespace: str | None, time: str | None) -> None:
    """Write down what requests ask a running server for, for `kvstore replay`.

    FILE, compressed when its name ends in .gz, gets a line for each request: when it came, and
    which blocks it asked for, as numbers. It has no tokens, no text and no names, and the numbers
    are made from block keys with a random secret that is never written, so that nobody can find
    out by guessing whether a known prompt is in it.

    TARGET is the server: host:port or unix:/path. Default: the one on this host.

    \b
    Examples:
      kvstore record monday.jsonl.gz --for 12h
      kvstore replay monday.jsonl.gz --capacity-gib 16,64,256
    """
    from kvstore import record as recording

    try:
        fingerprint = bytes.fromhex(namespace) if namespace else None
        seconds = parse_seconds(time) if time else None
    except ValueError as error:
        raise click.UsageError(
            f"--namespace wants hexadecimal digits, --for a time: {error}"
        ) from error
    with kvstore.connect(target) as store:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl-C does
        try:
            requests = recording.record(store, file, fingerprint, seconds)
        except KVStoreError as error:
            raise click.ClickException(str(error)) from error
    click.echo(f"wrote {requests:,} requests to {file}")


cli.add_command(replay)


def _answer(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except KVStoreError as error:
        raise click.ClickException(f"{error}\nIs `kvstore serve` running?") from error


def main() -> None:
    """The `kvstore` command."""
    cli()
