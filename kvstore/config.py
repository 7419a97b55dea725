"""Configuration: one schema, read from flags, environment and a TOML file.

Later sources win: defaults, then the file, then `KVSTORE_…` variables, then flags. Whatever is
unknown or can't be parsed stops the start, with the nearest right name or the expected form in
the message. Only `kvstore.assemble` reads a `Config`.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError

PREFIX = "KVSTORE_"
SECONDS_MAX = 1e9
_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """`"4GiB"`, `"512 MiB"` or a number of bytes."""
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].lower().removesuffix("b") if match else None
    scale = {name.removesuffix("b"): factor for name, factor in _UNITS.items()}.get(unit or "")
    if match is None or scale is None or (unit and not match[2].lower().endswith("ib")):
        raise ValueError("write a number of bytes, or one with KiB, MiB, GiB or TiB: 4GiB")
    size_bytes = float(match[1]) * scale
    if not 1 <= size_bytes < 1 << 63:
        raise ValueError("write a size above 0 that a machine can have")
    return int(size_bytes)


def parse_seconds(text: str) -> float:
    """`"30"`, `"90s"`, `"15m"`, `"12h"` or `"7d"`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if match is None or not 0 < float(match[1]) < SECONDS_MAX:
        raise ValueError("write a positive time in seconds, or with s, m, h or d: 12h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def parse_address(text: str) -> str:
    """`"host:port"`, or `"none"`."""
    host, _, port = text.rpartition(":")
    if text != "none" and not (host and port.isdecimal() and int(port) < 65536):
        raise ValueError("write host:port, or none")
    return text


def parse_bool(text: str) -> bool:
    """`"true"` or `"false"`."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError("write true or false")
    return text.lower() in ("true", "1")


def parse_verify(text: str) -> str:
    """`"moves"` or `"always"`."""
    if text not in ("moves", "always"):
        raise ValueError("write moves or always")
    return text


def parse_path(text: str) -> Path:
    """A path; `~` is the home folder."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError("write a path; there is no such user") from error


def _setting(parse: Callable[[str], Any], default: Any, text: str) -> Any:
    return field(default=default, metadata={"parse": parse, "help": text})


def default_state_dir() -> Path:
    """Where a server keeps its socket and its embedded Valkey's data."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "kvstore"


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a server."""

    listen: str = _setting(
        parse_address,
        "127.0.0.1:7700",
        "TCP address for clients. Whoever reaches it can read and write: open it to trusted "
        "networks alone. Default: 127.0.0.1:7700.",
    )
    state_dir: Path = _setting(
        parse_path,
        None,
        "Folder for the unix socket (kvstore.sock) and the embedded Valkey's data. "
        "Default: ~/.local/state/kvstore.",
    )
    cpu_bytes: int | None = _setting(
        parse_bytes, None, "Size of the CPU tier, as 4GiB. Default: a quarter of the free memory."
    )
    shm_dir: Path = _setting(
        parse_path,
        Path("/dev/shm"),
        "Mount that holds the CPU tier: memory, not a disk. Default: /dev/shm.",
    )
    share_arena: bool = _setting(
        parse_bool,
        True,
        "Let clients of this user on this host map the CPU tier. Without it they use streams. "
        "Default: true.",
    )
    verify: str = _setting(
        parse_verify,
        "moves",
        "Check a block's checksum when it moves between hosts or tiers (moves), or on every "
        "read from shared memory too (always). Default: moves.",
    )
    redis_url: str = _setting(
        str,
        "embedded",
        "Redis or Valkey of the redis tier: redis://host:port, rediss://…, "
        "redis+cluster://host:port, unix:///path, or embedded: a Valkey of the server's own. "
        "Default: embedded.",
    )
    no_redis: bool = _setting(parse_bool, False, "Go without a redis tier.")
    redis_bytes: int | None = _setting(
        parse_bytes,
        None,
        "Most bytes of KV that the redis tier keeps, counted over all servers. Default: as much "
        "as the CPU tier when embedded, else 16GiB.",
    )
    redis_ttl_s: float = _setting(
        parse_seconds,
        86400.0,
        "Time after which the redis tier forgets an unused block, as 12h. Default: 24h.",
    )
    metrics: str = _setting(
        parse_address,
        "127.0.0.1:7701",
        "Address of /metrics for Prometheus, or none. Default: 127.0.0.1:7701.",
    )
    drain_s: float = _setting(
        parse_seconds,
        10.0,
        "Most time that stopping may take to finish what is under way. Default: 10s.",
    )


def settings() -> tuple[Field[Any], ...]:
    """The schema: each field's metadata has `parse` and `help`."""
    return fields(Config)


def load(
    flags: Mapping[str, str], environment: Mapping[str, str], file: Path | None = None
) -> Config:
    """The configuration of these sources.

    Raises:
        ConfigError: a key is unknown, a value can't be parsed, or the file can't be read.
    """
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_from_file(file))
    for name, text in environment.items():
        if name.startswith(PREFIX):
            key = name.removeprefix(PREFIX).lower()
            _check_known(key, f"environment variable {name}", lambda k: PREFIX + k.upper())
            values[key] = _parse(key, text, f"environment variable {name}")
    for key, text in flags.items():
        _check_known(key, f"flag {key}", lambda k: "--" + k.replace("_", "-"))
        values[key] = _parse(key, text, f"--{key.replace('_', '-')}")
    values.setdefault("state_dir", default_state_dir())
    return Config(**values)


def _from_file(file: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    values = {}
    for key, value in document.items():
        _check_known(key, f"{file}: {key}", lambda k: k)
        if not isinstance(value, str | int | float | bool):
            raise ConfigError(f"{file}: {key}: a {type(value).__name__} where one value belongs")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        values[key] = _parse(key, text, f"{file}: {key}")
    return values


def _check_known(key: str, where: str, spell: Callable[[str], str]) -> None:
    names = [setting.name for setting in settings()]
    if key in names:
        return
    nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.4)
    hint = f"did you mean {spell(nearest[0])}?" if nearest else f"known: {', '.join(names)}"
    raise ConfigError(f"{where} is not a setting; {hint}")


def _parse(key: str, text: str, where: str) -> Any:
    parse = next(setting.metadata["parse"] for setting in settings() if setting.name == key)
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {text!r} is not right; {error}") from error
