"""Real vLLM on the CPU, in processes of its own, against a real server with a real Valkey.

Collected only where vLLM is installed: `scripts/test --vllm`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from kvstore.client import Store
from kvstore.testing import ServerProcess
from scripts import model
from scripts.scenarios import HANDBOOK

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

PAGE_TOKENS = 32
BLOCK_TOKENS = 64
START_TIMEOUT_S = 300.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",  # else a connector takes a core, and so changes rounding
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
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


class Engine:
    """A vLLM engine in a process of its own. Use it as a context manager."""

    def __init__(
        self,
        target: str | None = None,
        *,
        extra: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **settings: Any,
    ):
        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "block_size": PAGE_TOKENS,
            "enable_prefix_caching": False,
            **settings,
        }
        if "model" not in settings:
            settings["model"] = str(model.prepare("float32"))
        if target is not None:
            settings["kv_transfer_config"] = connector(target, **(extra or {}))
        self.log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "engine_process.py"), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            start_new_session=True,
        )

    def __enter__(self) -> Engine:
        self._answer()
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

    def ask(self, do: str, **arguments: Any) -> Any:
        """One command's answer."""
        self.tell(do, **arguments)
        return self._answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """Sends a command without waiting."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(30)
            raise EngineFailed(self.output())
        return json.loads(line)

    answer = _answer

    def generate(self, *prompts: Any, max_tokens: int = 8, **options: Any) -> list[Any]:
        """Tokens and cached tokens of each prompt: token ids, or a dict of vLLM's."""
        asked = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
        answers: list[Any] = self.ask("generate", prompts=asked, max_tokens=max_tokens, **options)
        return answers


class EngineFailed(Exception):
    """The engine ended; the message is what it printed."""


def tokens_of(answers: list[Any]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def cached_of(answers: list[Any]) -> list[int]:
    return [answer["cached"] for answer in answers]


@pytest.fixture(scope="session")
def text() -> list[int]:
    """Token ids of a long text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.prepare("float32"))
    ids: list[int] = tokenizer(HANDBOOK.read_text(encoding="utf-8")).input_ids
    return ids


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    """A server of its own, with 512 MiB and a Valkey."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvv")))
        yield stack.enter_context(ServerProcess(folder, cpu_bytes="512MiB"))


def settled_report(server: ServerProcess, requests: int) -> dict[str, Any]:
    """The report, when it has so many requests and nothing is under way."""
    with Store(server.target) as store:
        assert store.wait_attached(20)
        for _ in range(200):
            report: dict[str, Any] = json.loads(store.report())
            control = report["control"]
            waiting = control["leases"] + control["reserved_slots"] + control["write_through_queue"]
            if report["totals"]["requests"] >= requests and not waiting:
                return report
            time.sleep(0.1)
    raise AssertionError(f"{report['totals']['requests']} requests were reported: {control}")
