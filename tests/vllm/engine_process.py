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
        "threads": threading.active_count(),
        "free_pages": core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "preemptions": PREEMPTIONS[0],
    }


def do_reset(llm: LLM) -> bool:
    """Drops vLLM's own prefix cache."""
    return bool(llm.llm_engine.reset_prefix_cache())


PREEMPTIONS = [0]


def count_preemptions() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt = Scheduler._preempt_request

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        PREEMPTIONS[0] += 1
        return preempt(self, *arguments, **options)

    Scheduler._preempt_request = counted


if __name__ == "__main__":
    count_preemptions()
    main()
