"""What a user may set in `kv_connector_extra_config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
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
        names = [field.name for field in fields(cls)]
        for key in given:
            if key not in names:
                nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.4)
                hint = f"; did you mean {nearest[0]}?" if nearest else ""
                raise ConfigError(
                    f"kv_connector_extra_config has no {key!r}{hint} Known are {', '.join(names)}."
                )
        values = dict(given)
        for name in ("load", "store"):
            if name in values and values[name] not in list(Override):
                raise ConfigError(
                    f"{name} is {', '.join(Override)}, not {values[name]!r} "
                    "(in kv_connector_extra_config)"
                )
            if name in values:
                values[name] = Override(values[name])
        for name in ("target", "tenant", "salt"):
            if not isinstance(values.get(name, ""), str):
                raise ConfigError(f"{name} is a text, not {values[name]!r}")
        tokens = values.get("block_tokens", 1)
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise ConfigError(f"block_tokens is a number of tokens, not {tokens!r}")
        return cls(**values)

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
