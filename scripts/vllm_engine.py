"""A vLLM engine in a process of its own, for tests and benchmarks; and the other end, `Engine`.

The process reads a JSON command a line and writes a JSON answer a line. What vLLM prints goes to
the other end's `log`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PAGE_TOKENS = 32

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",  # else a connector takes a core, and so changes rounding
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

SETTINGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4096,
    "block_size": PAGE_TOKENS,
    "enable_prefix_caching": False,
}


def connector(target: str, **extra: Any) -> dict[str, Any]:
    """The setting that a user adds."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "engine.plugins.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"target": target, **extra},
    }


class EngineFailed(Exception):
    """The engine ended; the message is what it printed."""


class Engine:
    """The other end of the process. Use it as a context manager."""

    def __init__(
        self,
        model: Path,
        kv_transfer_config: dict[str, Any] | None = None,
        *,
        python: str = sys.executable,
        process: Path = Path(__file__),
        environment: dict[str, str] | None = None,
        **settings: Any,
    ):
        """Starts the process; `settings` are vLLM's, over `SETTINGS`."""
        settings = {**SETTINGS, "model": str(model), **settings}
        if kv_transfer_config is not None:
            settings["kv_transfer_config"] = kv_transfer_config
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(process), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            start_new_session=True,
        )

    def __enter__(self) -> Engine:
        self.answer()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
        if error is not None:
            print(self.output())

    def output(self) -> str:
        """What it and vLLM have printed."""
        self.log.seek(0)
        return self.log.read()

    def tell(self, do: str, **arguments: Any) -> None:
        """Sends a command without waiting."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """The next answer. Raises EngineFailed when the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(30)
            raise EngineFailed(self.output())
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> Any:
        """One command's answer."""
        self.tell(do, **arguments)
        return self.answer()

    def generate(self, *prompts: Any, max_tokens: int = 8, **options: Any) -> list[Any]:
        """Each prompt's answer as `do_generate` gives it; a prompt is token ids, or vLLM's dict."""
        asked = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
        answers: list[Any] = self.ask("generate", prompts=asked, max_tokens=max_tokens, **options)
        return answers


# -- in the process


def do_generate(
    llm: Any,
    prompts: list[dict[str, Any]],
    max_tokens: int,
    lora: list[Any] | None = None,
    drain: bool = True,
    params: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Tokens generated, prompt tokens that were not computed, and seconds, for each prompt."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    started_s = time.perf_counter()
    outputs = llm.generate(
        prompts,
        SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        ),
        use_tqdm=False,
        lora_request=LoRARequest(*lora) if lora else None,
    )
    total_s = time.perf_counter() - started_s
    if drain:
        drain_saves(llm)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "ttft_s": getattr(output.metrics, "first_token_latency", 0.0),
            "total_s": total_s,
        }
        for output in outputs
    ]


def drain_saves(llm: Any) -> None:
    """Steps until what finished is stored; in a process of its own, the engine does by itself."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    while core is not None and core.scheduler.has_requests():
        llm.llm_engine.step()


def serve(commands: dict[str, Callable[..., Any]]) -> None:
    """Makes the engine and answers commands until the input ends."""
    # What vLLM and its workers print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    from vllm import LLM

    llm = LLM(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = commands[command.pop("do")](llm, **command)
        print(json.dumps(answer), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    serve({"generate": do_generate})
