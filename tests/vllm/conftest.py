"""Real vLLM on the CPU, in processes of its own, against a real server with a real Valkey.

Collected only where vLLM is installed: `scripts/test --vllm`.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Store
from kvstore.testing import ServerProcess
from scripts import model, vllm_engine
from scripts.scenarios import HANDBOOK

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

BLOCK_TOKENS = 64


class Engine(vllm_engine.Engine):
    """With the real small model and a look inside, unless told otherwise."""

    def __init__(
        self, target: str | None = None, *, extra: dict[str, Any] | None = None, **settings: Any
    ):
        config = None if target is None else vllm_engine.connector(target, **(extra or {}))
        if config is not None and "role" in settings:
            config["kv_role"] = settings.pop("role")
        settings.setdefault("model", model.prepare("float32"))
        process = Path(__file__).parent / "engine_process.py"
        super().__init__(kv_transfer_config=config, process=process, **settings)


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
