"""The engine's process, with commands that look into it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.vllm_engine import do_generate, drain_saves, serve

COUNTS = {"preemptions": 0, "failed_loads": 0, "asked": 0, "timed_out": 0}


def do_state(llm: Any) -> dict[str, Any]:
    """What could leak, and what happened."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    side = scheduler.connector._scheduler
    return {
        "requests": len(scheduler.requests),
        "tracked": len(side._tracked),
        "threads": sorted(
            thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore")
        ),
        "free_pages": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "skipped": {why: skip.blocks for why, skip in side.session.usage.skipped.items()},
        "misses": {why: miss.tokens for why, miss in side.session.usage.misses.items()},
        **COUNTS,
    }


def do_abort(llm: Any, prompt: list[int], steps: int) -> int:
    """Begins a prompt, aborts it after some steps, and says how much of it was computed."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    engine.add_request("cut", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=100))
    scheduler = engine.engine_core.engine_core.scheduler
    (request,) = scheduler.requests.values()
    done = 0
    while done < steps:
        engine.step()
        done += request.num_computed_tokens > 0
    computed: int = request.num_computed_tokens
    engine.abort_request([request.request_id], internal=True)
    drain_saves(llm)
    return computed


def do_reset(llm: Any, reset_connector: bool = False) -> bool:
    """Drops vLLM's own prefix cache, and the store's blocks."""
    return bool(llm.llm_engine.reset_prefix_cache(reset_connector=reset_connector))


def count(owner: type, method: str, name: str, all_calls: bool = True) -> None:
    """Counts a method's calls, or those that return something that is not empty."""
    original = getattr(owner, method)

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        COUNTS[name] += all_calls
        result = original(self, *arguments, **options)
        COUNTS[name] += not all_calls and bool(result)
        return result

    setattr(owner, method, counted)


if __name__ == "__main__":
    from vllm.v1.core.sched.scheduler import Scheduler

    from engine.plugins.vllm.scheduler import SchedulerSide
    from engine.plugins.vllm.worker import WorkerSide
    from kvstore.client import Store

    count(Scheduler, "_preempt_request", "preemptions")
    count(WorkerSide, "_missing", "failed_loads", all_calls=False)
    count(SchedulerSide, "_ask", "asked")
    count(Store, "_note", "timed_out")
    serve({"generate": do_generate, "state": do_state, "reset": do_reset, "abort": do_abort})
