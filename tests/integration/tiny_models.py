"""Random tiny models, and what the Transformers plugin's tests watch them with.

Weights are drawn wide, so that an answer depends on every token of its prompt: with the usual
narrow ones a tiny model repeats itself whatever it read, and a test of reuse could not fail.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvstore
from engine.admission import Override
from engine.plugins.transformers import CachedModel
from kvstore.types import TierName, Usage
from tests.helpers import eventually

torch.set_num_threads(1)

VOCABULARY = 160
BLOCK = 64
ALWAYS = {"load": Override.ALWAYS, "keep": Override.ALWAYS}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def seeded(make: Callable[[], Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model with weights drawn from this seed, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval().to(dtype)


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Two layers, four heads, two of keys and values."""
    return seeded(lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})), seed, dtype)


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    """One row of random tokens, without the padding token 0."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(1, VOCABULARY, (1, tokens), generator=generator)


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows padded on the left to one length."""
    width = max(row.shape[1] for row in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, width - row.shape[1] :] = row
        mask[index, width - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


class Watched:
    """A `CachedModel` that notes what it computes and what it reports."""

    def __init__(self, model: Any, store: kvstore.Store, pool_bytes: int = 0, **options: Any):
        self.model = model
        self.cached = CachedModel(model, store=store, pool_bytes=pool_bytes, **options)
        self.forwards: list[tuple[int, int]] = []
        """Rows and columns of each forward pass's input."""
        self.usage = Usage()
        self._record = self.cached.session.record
        self.cached.session.record = self._note  # type: ignore[method-assign]
        self._hook = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()
        self.cached.close()

    def _note(self, usage: Usage, *more: Any) -> None:
        self.usage += usage
        self._record(usage, *more)

    def _see(self, module: Any, arguments: Any, options: dict[str, Any]) -> None:
        ids = options.get("input_ids")
        if ids is not None:
            self.forwards.append(tuple(ids.shape))

    def generate(self, ids: Any, **options: Any) -> Any:
        """Generates with reuse, and waits until all is stored."""
        inputs = {"input_ids": ids} if isinstance(ids, torch.Tensor) else dict(ids)
        output = self.cached.generate(**inputs, **{**ALWAYS, **_asked(options)})
        assert self.cached.session.flush(30)
        return output

    def plain(self, ids: Any, **options: Any) -> Any:
        """Generates without; its passes are not noted."""
        inputs = {"input_ids": ids} if isinstance(ids, torch.Tensor) else dict(ids)
        noted = len(self.forwards)
        output = self.model.generate(**inputs, **_asked(options))
        del self.forwards[noted:]
        return output

    def check(self, ids: Any, **options: Any) -> torch.Tensor:
        """Generates both ways; the tokens are the same, and the logits nearly."""
        more = {**options, "return_dict_in_generate": True, "output_logits": True}
        ours = self.generate(ids, **more)
        theirs = self.plain(ids, **{k: v for k, v in more.items() if k not in ("load", "keep")})
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        for mine, other in zip(ours.logits, theirs.logits, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)
        return ours.sequences

    @contextmanager
    def counting(self) -> Iterator[Counted]:
        """What happens within."""
        counted = Counted(self)
        yield counted
        counted.end()


def _asked(options: dict[str, Any]) -> dict[str, Any]:
    """A greedy answer of eight tokens, unless these say otherwise."""
    if "generation_config" in options:
        return options
    return {"max_new_tokens": 8, "do_sample": False, **options}


class Counted:
    """What one or more requests did."""

    def __init__(self, watched: Watched):
        self._watched = watched
        watched.usage, watched.forwards = Usage(), []
        self.usage = Usage()
        self.forwards: list[tuple[int, int]] = []

    def end(self) -> None:
        self.usage, self.forwards = self._watched.usage, self._watched.forwards

    def hits(self, tier: TierName) -> int:
        """Tokens that came from this tier."""
        return self.usage.hits[tier].tokens if tier in self.usage.hits else 0

    @property
    def prefilled(self) -> int:
        """Columns of the first forward pass."""
        return self.forwards[0][1]


def model_report(store: kvstore.Store, name: str, requests: int) -> dict[str, Any]:
    """The server's sums for a model, once all its requests were reported."""

    def found() -> dict[str, Any]:
        groups: dict[str, Any] = json.loads(store.report())["by_model"]
        return dict(groups.get(name, {}))

    eventually(lambda: found().get("requests") == requests)
    time.sleep(0.2)  # stores are reported by themselves
    return found()
