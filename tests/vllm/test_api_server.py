"""The OpenAI-compatible server, as users run it: streams, aborts, metrics."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing import ServerProcess
from scripts import model
from scripts.vllm_engine import ENVIRONMENT, connector

from .conftest import settled_report

CLIENTS = 16
START_TIMEOUT_S = 300.0


class ApiServer:
    def __init__(self, target: str, log: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model.prepare("float32")), "--served-model-name", "small"),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
            *("--block-size", "32", "--port", self.url.rpartition(":")[2]),
            *("--max-num-batched-tokens", "512"),
            *("--kv-transfer-config", json.dumps(connector(target))),
        ]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
                start_new_session=True,
            )

    def wait(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, "it ended"
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return
            time.sleep(0.5)
        raise TimeoutError("the API server did not come up")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 15)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)

    def stream(self, prompt: list[int], max_tokens: int, stop_after: int | None = None) -> str:
        """The answer; cut by hanging up after so many pieces."""
        body = {
            "model": "small",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        asking = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        pieces: list[str] = []
        with urllib.request.urlopen(asking, timeout=300) as answer:
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if not data:
                    continue
                if data == "[DONE]" or (stop_after is not None and len(pieces) >= stop_after):
                    break
                pieces.append(json.loads(data)["choices"][0]["text"])
        return "".join(pieces)

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines)
            if name.startswith("vllm:kvstore")
        }


@pytest.fixture
def api(server: ServerProcess, tmp_path: Path) -> Iterator[ApiServer]:
    api = ApiServer(server.target, tmp_path / "api.log")
    try:
        api.wait()
        yield api
    finally:
        api.stop()
        print((tmp_path / "api.log").read_text()[-8000:])


def test_many_streams_of_which_half_are_hung_up_on(
    server: ServerProcess, api: ApiServer, text: list[int]
) -> None:
    prompts = [text[: 200 + 30 * (client // 2)] + text[client : client + 9] for client in range(16)]
    got: dict[int, str] = {}

    def ask(client: int, stop_after: int | None) -> None:
        got[client] = api.stream(prompts[client], 12, stop_after)

    def all_at_once(stop_after: int | None) -> None:
        threads = [
            threading.Thread(target=ask, args=(client, stop_after if client % 2 else None))
            for client in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    all_at_once(stop_after=3)
    first = dict(got)
    all_at_once(stop_after=None)
    for client in range(CLIENTS):
        assert got[client].startswith(first[client])
        assert len(got[client]) > len(first[client]) or client % 2 == 0

    report = settled_report(server, CLIENTS)
    totals = report["totals"]
    counted = [*totals["hits"].values(), *totals["misses"].values()]
    assert sum(one["tokens"] for one in counted) == totals["prompt"]["tokens"]
    assert totals["hits"]["gpu"]["tokens"] > 0
    assert totals["stored"]["blocks"] > 0

    # vLLM's own page tells the same story, once its next step has told it.
    api.stream(prompts[0], 2)
    shown: dict[str, Any] = {}
    for _ in range(100):
        shown = api.metrics()
        told = sum(value for name, value in shown.items() if "prompt_tokens_total{" in name)
        if told >= totals["prompt"]["tokens"]:
            break
        time.sleep(0.1)
    assert any('result="gpu"' in name and value > 0 for name, value in shown.items()), shown
    assert any('result="stored"' in name and value > 0 for name, value in shown.items())
    assert any("stored_bytes_total" in name and value > 0 for name, value in shown.items())
