"""How often splitting a prefill changes a greedy answer, by rounding alone. No store is involved.

A prompt is prefilled in one piece, and again in two, split at a block's end: the same sums in
products of other shapes, and so in another order. Where two tokens are nearly tied, the rounding
decides. Prints the share of answers that differ, for each dtype.

    python -m scripts.bench.flips --prompts 24 --json flips.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from engine.plugins.transformers.support import CACHE_ARGUMENT
from scripts import model
from scripts.scenarios import HANDBOOK

PROMPT_TOKENS = 200
SPLIT_TOKENS = 128
NEW_TOKENS = 24


def prompts(tokenizer: Any, count: int) -> list[torch.Tensor]:
    """So many pieces of the handbook, [1, tokens] each, that begin at different places."""
    ids = tokenizer(HANDBOOK.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    step = (len(ids) - PROMPT_TOKENS) // count
    return [
        ids[start : start + PROMPT_TOKENS].unsqueeze(0) for start in range(0, count * step, step)
    ]


@torch.no_grad()
def answer(net: Any, ids: torch.Tensor, split: bool) -> list[int]:
    """A greedy answer, prefilled in one piece or in two."""
    cache = DynamicCache(config=net.config)
    if split:
        net(input_ids=ids[:, :SPLIT_TOKENS], use_cache=True, **{CACHE_ARGUMENT: cache})
    output = net.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        **{CACHE_ARGUMENT: cache},
    )
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


def measure(dtype: str, count: int) -> dict[str, Any]:
    """Answers that differ, of so many."""
    folder = str(model.prepare("float32"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    differing = sum(
        answer(net, ids, split=False) != answer(net, ids, split=True)
        for ids in track(
            prompts(tokenizer, count), f"{dtype:9}", console=None, disable=not sys.stderr.isatty()
        )
    )
    return {"dtype": dtype, "answers": count, "differ": differing, "share": differing / count}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=24, help="answers a dtype (default: 24)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers for scripts")
    options = parser.parse_args()
    rows = [measure(dtype, options.prompts) for dtype in ("float32", "bfloat16", "float16")]
    for row in rows:
        print(f"{row['dtype']:9} {row['differ']} of {row['answers']} answers differ")
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
