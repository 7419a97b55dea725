"""What a user may set in `kv_connector_extra_config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from engine.admission import Override
from engine.layout import choose_block_tokens
from kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options:
    """The connector's settings; none is needed."""

    target: str | None = None
    """The server: "host:port" or "unix:/path"; by default the one on this host."""
    block_tokens: int | None = None
    """Tokens a block in the store; by default 64, or the next multiple of vLLM's block size."""
    tenant: str = "default"
    """Whose blocks these are: tenants share nothing, and the report lists each."""
    salt: str = ""
    """The tenant's secret."""
    load: Override = Override.DEFAULT
    """Whether to load what is found: "default" decides by measured cost, or "always", "never"."""
    store: Override = Override.DEFAULT
    """Whether to store what was computed: "default", "always", "never"."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Options:
        """Checks what the user gave.

        Raises:
            ConfigError: a key is unknown, or a value is of the wrong kind.
        """
        where = "kv_connector_extra_config"
        _check_names(where, given, [field.name for field in fields(cls)])
        values = {**given, **_overrides(where, given)}
        for name in ("target", "tenant", "salt"):
            if not isinstance(values.get(name, ""), str):
                raise ConfigError(f"{name} is a text, not {values[name]!r}")
        tokens = values.get("block_tokens", 1)
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise ConfigError(f"block_tokens is a number of tokens, not {tokens!r}")
        return cls(**values)

    def for_request(self, params: Mapping[str, Any] | None) -> Options:
        """With what one request says in `kv_transfer_params["kvstore"]`: "load" and "store".

        Raises:
            ConfigError: it says anything else.
        """
        given = (params or {}).get("kvstore")
        if given is None:
            return self
        where = 'kv_transfer_params["kvstore"]'
        if not isinstance(given, Mapping):
            raise ConfigError(f"{where} is an object with load and store, not {given!r}")
        _check_names(where, given, ["load", "store"])
        return replace(self, **_overrides(where, given))

    def block_tokens_for(self, page_tokens: int) -> int:
        """Tokens a block for an engine whose own blocks have `page_tokens`.

        Raises:
            ConfigError: the given number is no multiple of them.
        """
        if self.block_tokens is None:
            return choose_block_tokens(page_tokens)
        if self.block_tokens % page_tokens:
            raise ConfigError(
                f"block_tokens must be a multiple of vLLM's block size, {page_tokens}, "
                f"not {self.block_tokens}"
            )
        return self.block_tokens


def _check_names(where: str, given: Mapping[str, Any], names: list[str]) -> None:
    for key in given:
        if key not in names:
            nearest = difflib.get_close_matches(str(key), names, n=1, cutoff=0.4)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ConfigError(f"{where} has no {key!r}{hint} Known are {', '.join(names)}.")


def _overrides(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for name in ("load", "store"):
        if name in given:
            if given[name] not in list(Override):
                raise ConfigError(
                    f"{name} is {', '.join(Override)}, not {given[name]!r} (in {where})"
                )
            chosen[name] = Override(given[name])
    return chosen
