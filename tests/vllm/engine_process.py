"""A vLLM engine in a process of its own: reads a JSON command a line, writes an answer a line.

    {"do": "generate", "prompts": [{"prompt_token_ids": [...]}], "max_tokens": 8}
    {"do": "state"}
    {"do": "reset"}
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

# What vLLM and its workers print must not mix with the answers.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

from engine.plugins.vllm.worker import WorkerSide  # noqa: E402


def main() -> None:
    settings = json.loads(sys.argv[1])
    llm = LLM(**settings)
    tell({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        tell(globals()["do_" + command.pop("do")](llm, **command))
    llm.llm_engine.engine_core.shutdown()


def tell(answer: Any) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def do_generate(
    llm: LLM,
    prompts: list[dict[str, Any]],
    max_tokens: int,
    lora: list[Any] | None = None,
    drain: bool = True,
) -> list[dict[str, Any]]:
    """Tokens generated, and prompt tokens that were not computed, for each prompt."""
    outputs = llm.generate(
        prompts,
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        use_tqdm=False,
        lora_request=LoRARequest(*lora) if lora else None,
    )
    if drain:
        drain_saves(llm)
    return [
        {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}
        for output in outputs
    ]


def drain_saves(llm: LLM) -> None:
    """Steps until what finished is stored; in a process of its own, the engine does by itself."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    while core is not None and core.scheduler.has_requests():
        llm.llm_engine.step()


def do_state(llm: LLM) -> dict[str, Any]:
    """What could leak, of an engine that is in this process."""
    core = llm.llm_engine.engine_core.engine_core
    side = core.scheduler.connector._scheduler
    return {
        "requests": len(core.scheduler.requests),
        "tracked": len(side._tracked),
        "threads": sorted(
            thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore")
        ),
        "free_pages": core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "preemptions": COUNTS["preemptions"],
        "failed_loads": COUNTS["failed_loads"],
        "misses": {why: miss.tokens for why, miss in side.session.usage.misses.items()},
    }


def do_reset(llm: LLM) -> bool:
    """Drops vLLM's own prefix cache."""
    return bool(llm.llm_engine.reset_prefix_cache())


COUNTS = {"preemptions": 0, "failed_loads": 0}


def count(owner: type, method: str, name: str) -> None:
    """Counts the calls that return nothing at all, or something that is not empty."""
    original = getattr(owner, method)

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        result = original(self, *arguments, **options)
        COUNTS[name] += result is None or bool(result)
        return result

    setattr(owner, method, counted)


if __name__ == "__main__":
    count(Scheduler, "_preempt_request", "preemptions")
    count(WorkerSide, "_missing", "failed_loads")
    main()
