"""One engine process of the demo: plays every scenario once, and prints one JSON line a request.

The demo starts it anew for each pass, so that nothing but the store carries KV from one to the
next.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    StoppingCriteria,
    StoppingCriteriaList,
)

import kvstore
from engine.plugins.transformers import CachedModel
from scripts.scenarios import Scenario, scenarios

WARM_UP_TOKENS = 300


class FirstToken(StoppingCriteria):
    """Notes when the first token was there."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.at_s = self.at_s or time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Engine:
    """The model, with the store or without."""

    def __init__(self, model_dir: str, target: str | None, pool_bytes: int, empty_arena: bool):
        torch.set_num_threads(2)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.store = kvstore.connect(target) if target is not None else None
        self.cached = (
            CachedModel(
                self.model, name=Path(model_dir).name, store=self.store, pool_bytes=pool_bytes
            )
            if self.store is not None
            else None
        )
        self._empty_arena = empty_arena
        # The first call of a process pays for page faults and buffers. That is no one's prefill.
        ids = torch.arange(1000, 1000 + WARM_UP_TOKENS).unsqueeze(0)
        mask = torch.ones_like(ids)
        self.model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)

    def answer(self, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        """One greedy answer: its tokens, its times, and where its prompt's KV came from."""
        if self._empty_arena and self.store is not None:
            self.store.clear(arena_only=True)
        tokens = torch.tensor([ids])
        first = FirstToken()
        generate = self.cached.generate if self.cached is not None else self.model.generate
        before = self.cached.session.usage if self.cached is not None else None
        started_s = time.perf_counter()
        output = generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([first]),
        )
        ended_s = time.perf_counter()
        line = {
            "prompt_tokens": len(ids),
            "tokens": output[0, len(ids) :].tolist(),
            "ttft_s": first.at_s - started_s,
            "total_s": ended_s - started_s,
        }
        if self.cached is not None and before is not None:
            self.cached.session.flush()
            usage = self.cached.session.usage
            line["hits"] = {
                tier: count.tokens - (before.hits[tier].tokens if tier in before.hits else 0)
                for tier, count in usage.hits.items()
            }
            line["stored_blocks"] = usage.stored.blocks - before.stored.blocks
            line["skipped"] = {
                reason: count.blocks
                - (before.skipped[reason].blocks if reason in before.skipped else 0)
                for reason, count in usage.skipped.items()
            }
        return line

    def play(self, scenario: Scenario) -> None:
        """Asks the scenario's prompts one after the other."""
        answers: list[str] = []
        while (ids := scenario.next_prompt(self.tokenizer, answers)) is not None:
            line = self.answer(ids, scenario.max_new_tokens)
            answers.append(self.tokenizer.decode(line["tokens"], skip_special_tokens=True))
            print(json.dumps({"scenario": scenario.name, **line}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--target", help="the server; without it, the store is not used")
    parser.add_argument("--pool-bytes", type=int, default=0)
    parser.add_argument("--empty-arena", action="store_true", help="before each request")
    options = parser.parse_args()
    engine = Engine(str(options.model_dir), options.target, options.pool_bytes, options.empty_arena)
    with engine.cached or nullcontext():
        for scenario in scenarios():
            engine.play(scenario)
    if engine.store is not None:
        engine.store.close()


if __name__ == "__main__":
    main()
