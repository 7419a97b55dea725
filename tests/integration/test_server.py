"""A server's life: health, metrics, configuration, start, refusal, restart; and its commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
import pytest
import redis
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from prometheus_client.parser import text_string_to_metric_families

import kvstore
from kvstore.cli import cli
from kvstore.client import Store
from kvstore.testing import ServerProcess
from kvstore.types import BlockCount, MissReason, TierName, Usage
from tests.helpers import eventually
from tests.integration.support import chain, info_of, load, raw, report, store


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line, as a user would call it."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("KVSTORE_")}
    return subprocess.run(
        [sys.executable, "-m", "kvstore", *arguments],
        capture_output=True,
        text=True,
        env=clean | environment,
        timeout=60,
    )


def refuse(folder: Path, *flags: str, **environment: str) -> str:
    """What `kvstore serve` says when it refuses to start."""
    given = ("--listen=none", "--metrics=none", "--no-redis", "--cpu-bytes=8MiB")
    command = ["serve", *given, f"--state-dir={folder}", *flags]
    answer = CliRunner().invoke(cli, command, env=environment)
    assert answer.exit_code == 1, answer.output
    assert isinstance(answer.exception, SystemExit)  # a message, and no traceback
    return answer.output


# -- while it runs


def test_it_is_healthy_as_a_whole_and_as_a_service(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvstore.v1.KVStore"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_the_service(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.target) as channel:
        services = list(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert "kvstore.v1.KVStore" in services


def test_metrics_parse_and_agree_with_the_report(
    server: ServerProcess, other: Store, name: str
) -> None:
    namespace = other.open(info_of(name, model="m"))
    store(namespace, chain(name, 3))
    hits = {TierName.CPU: BlockCount(32, 2, 128)}
    misses = {MissReason.TAIL: BlockCount(5)}
    usage = Usage(requests=1, prompt=BlockCount(37, 2, 128), hits=hits, misses=misses)
    before = report(other)["totals"]["requests"]
    namespace.record(usage)
    eventually(lambda: report(other)["totals"]["requests"] == before + 1)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as answer:
        text = answer.read().decode()
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    document = report(other)
    group, cpu = document["by_model"]["m"], document["tiers"][1]
    assert samples["kvstore_requests_total", "m"] == group["requests"]
    assert samples["kvstore_hit_tokens_total", "cpu", "m"] == group["hits"]["cpu"]["tokens"]
    assert samples["kvstore_miss_tokens_total", "m", "tail"] == group["misses"]["tail"]["tokens"]
    assert samples["kvstore_prompt_tokens_total", "m"] == group["prompt"]["tokens"]
    assert samples["kvstore_tier_used_bytes", "cpu"] == cpu["used_bytes"] > 0
    assert samples["kvstore_tier_blocks", "cpu"] == cpu["blocks"]
    assert samples["kvstore_tier_up", "cpu"] == 1
    assert samples["kvstore_tier_up", "redis"] == 0
    assert samples["kvstore_clients",] == document["server"]["clients"]
    assert samples["kvstore_leases",] == 0
    assert samples["kvstore_calls_total", "Reserve"] == document["control"]["rpc"]["Reserve"]


# -- what it refuses


def test_a_second_server_on_the_same_addresses_is_refused_and_the_first_goes_on(
    redis_server: ServerProcess, folder: Path, name: str
) -> None:
    server = redis_server
    said = refuse(folder, f"--listen={server.target}")
    assert f"can't listen on {server.target}: another server has it" in said
    assert "Use another --listen and --state-dir" in said
    metrics = f"127.0.0.1:{server.metrics_port}"
    assert f"can't serve metrics on {metrics}" in refuse(folder / "2", f"--metrics={metrics}")
    socket = server.folder / "valkey" / "valkey.sock"
    with (
        kvstore.connect(f"unix:{server.folder}/kvstore.sock") as client,
        redis.Redis(unix_socket_path=str(socket)) as asking,
    ):
        pid = asking.info()["process_id"]
        answer = run("serve", f"--state-dir={server.folder}", "--listen=none", "--metrics=none")
        assert answer.returncode == 1
        assert "kvstore.sock: another server has it" in answer.stderr
        assert "Traceback" not in answer.stderr
        assert asking.info()["process_id"] == pid  # the first one's Valkey is left alone
        store(client.open(info_of(name)), chain(name, 2))
        assert load(client.open(info_of(name)), chain(name, 2)).blocks == 2


def test_settings_that_cannot_be_are_refused_with_what_to_do(folder: Path) -> None:
    large = refuse(folder, "--cpu-bytes=500TiB")
    assert "doesn't fit: /dev/shm has" in large
    assert "GiB free. Give a smaller size" in large
    typo = refuse(folder, KVSTORE_CPU_BYTE="8MiB")
    assert "KVSTORE_CPU_BYTE is not a setting; did you mean KVSTORE_CPU_BYTES?" in typo
    unit = refuse(folder, "--cpu-bytes=8GB")
    assert "--cpu-bytes: '8GB' is not right; write a number of bytes" in unit
    assert "smaller than one slab" in refuse(folder, "--cpu-bytes=1MiB")
    file = folder / "kvstore.toml"
    file.write_text("cpu_byte = 1\n")
    said = refuse(folder, f"--config={file}")
    assert "cpu_byte is not a setting; did you mean cpu_bytes?" in said


def test_a_toml_file_sets_what_flags_do_not(folder: Path) -> None:
    file = folder / "kvstore.toml"
    file.write_text('verify = "always"\nno_redis = true\ncpu_bytes = "4GiB"\n')
    with (
        ServerProcess(folder / "state", f"--config={file}", cpu_bytes="8MiB") as server,
        raw(server.target) as client,
    ):
        assert client.answer.verify_always
        assert client.answer.arena_bytes < 9 << 20  # the flag wins


# -- start and restart


def test_the_arena_of_a_killed_server_is_removed_by_the_next_start(folder: Path) -> None:
    shm = f"--shm-dir={folder}"
    server = ServerProcess(folder / "state", "--no-redis", shm, cpu_bytes="8MiB")
    with server, ServerProcess(folder / "2", "--no-redis", shm, cpu_bytes="8MiB") as neighbour:
        with raw(neighbour.target) as client:
            living = Path(client.answer.arena_path)
        with raw(server.target) as client:
            stale = Path(client.answer.arena_path)
        server.kill()
        assert stale.exists()
        server.start()
        with raw(server.target) as client:
            assert {living, Path(client.answer.arena_path)} == set(folder.glob("*.arena"))


def test_what_was_stored_outlives_a_graceful_restart(folder: Path, name: str) -> None:
    keys = chain(name, 6)
    server = ServerProcess(folder, cpu_bytes="8MiB")
    with server:
        with kvstore.connect(server.target) as client:
            store(client.open(info_of(name)), keys)
        server.stop()  # at once: what waits to be written through is written first
        server.start()
        with kvstore.connect(server.target) as client:
            loaded = load(client.open(info_of(name)), keys).loaded
            assert loaded.runs == ((TierName.REDIS, 6),)


def test_the_valkey_of_a_killed_server_is_taken_over_and_stops_with_the_next(
    folder: Path, name: str
) -> None:
    keys = chain(name, 6)
    server = ServerProcess(folder, cpu_bytes="8MiB")
    asking = redis.Redis(unix_socket_path=str(folder / "valkey" / "valkey.sock"))
    with server, asking:
        with kvstore.connect(server.target) as client:
            store(client.open(info_of(name)), keys)
            client.clear(arena_only=True)  # all is in Valkey now
        pid = asking.info()["process_id"]
        server.kill()
        assert asking.info()["process_id"] == pid  # an orphan
        server.start()
        assert asking.info()["process_id"] == pid
        with kvstore.connect(server.target) as client:
            assert load(client.open(info_of(name)), keys).blocks == 6
        server.stop()
        eventually(lambda: not Path(f"/proc/{pid}/cmdline").exists())


# -- commands


def test_report_and_clear_speak_to_the_server(
    server: ServerProcess, other: Store, folder: Path, name: str
) -> None:
    other.clear()
    store(other.open(info_of(name, model="a model")), chain(name, 3))
    as_json = run("report", server.target, "--json")
    assert as_json.returncode == 0
    assert json.loads(as_json.stdout)["tiers"][1]["blocks"] == 3
    page = folder / "report.html"
    as_page = run("report", server.target, f"--html={page}")
    assert (as_page.returncode, as_page.stderr) == (0, f"wrote {page}\n")
    assert page.read_text().startswith("<!")
    as_text = run("report", f"unix:{server.folder}/kvstore.sock")
    assert as_text.returncode == 0
    assert "cpu" in as_text.stdout
    cleared = run("clear", server.target, "--yes")
    assert cleared.returncode == 0
    assert "dropped 3 blocks from the CPU tier, 0 from the redis tier" in cleared.stdout
    assert report(other)["tiers"][1]["blocks"] == 0


@pytest.mark.parametrize("command", [["report"], ["clear", "--yes"]], ids=["report", "clear"])
def test_a_command_without_a_server_says_so(command: list[str], folder: Path) -> None:
    answer = run(*command, f"unix:{folder}/nobody.sock")
    assert answer.returncode == 1
    assert "Is `kvstore serve` running?" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""


def test_every_command_explains_itself() -> None:
    assert CliRunner().invoke(cli, ["--version"]).output.strip().endswith(kvstore.__version__)
    for command in ([], *([name] for name in cli.commands)):
        answer = CliRunner().invoke(cli, [*command, "--help"])
        assert answer.exit_code == 0
        assert "Usage:" in answer.output
    for setting in ("--cpu-bytes", "--redis-url", "--verify", "--drain-s"):
        assert setting in CliRunner().invoke(cli, ["serve", "--help"]).output
