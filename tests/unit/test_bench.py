"""The benchmarks run and yield the keys that they promise; their numbers are not tested."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.bench import control_plane, data_plane, peers

ROOT = Path(__file__).resolve().parents[2]
PATHS = {
    "copy",
    "shm",
    "shm_verified",
    "stream",
    "grpc_bytes",
    "redis_tier",
    "redis_py",
    "raw_resp",
}


def run(*command: str) -> dict:
    done = subprocess.run(
        [sys.executable, *command, "--quick", "--json", "-"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document["machine"]) == {"cpu", "cores", "memory_gib", "python", "kernel"}
    assert document["commit"]
    assert document["date"]
    return document


def positive(*values: float) -> bool:
    return all(math.isfinite(value) and value > 0 for value in values)


def test_the_data_plane_benchmark_measures_every_path_at_every_size():
    document = run("-m", "scripts.bench.data_plane")
    rows = document["rows"]
    sizes = {row["block_bytes"] for row in rows}
    assert len(sizes) >= 2
    assert {(row["path"], row["op"], row["block_bytes"]) for row in rows} == {
        (path, op, size) for path in PATHS for op in ("store", "load") for size in sizes
    }
    assert positive(*(row[key] for row in rows for key in ("gb_s", "ratio_to_copy")))
    assert {(call["op"], call["block_bytes"]) for call in document["calls"]} == {
        (op, size) for op in ("store", "load") for size in sizes
    }
    assert positive(*(call[key] for call in document["calls"] for key in ("ms", "copy_ms")))


def test_the_benchmark_of_peers_names_those_that_are_absent():
    document = run("-m", "scripts.bench.peers")
    assert {row["path"] for row in document["rows"]} == PATHS
    assert document["absent"] == ["mooncake_tcp"]


def test_the_control_plane_benchmark_measures_lookups_and_hashing_run_as_a_file():
    document = run("scripts/bench/control_plane.py")
    assert positive(
        *(document[key] for key in ("empty_unary_ms", "lookup_512_ms", "lookup_512_over_empty")),
        *document["lookup_512_ms_by_index"].values(),
        *document["empty_unary_ms_by_index"].values(),
        *document["hash_128k_ms"].values(),
    )
    assert set(document["hash_128k_ms"]) == {"16", "64", "256"}


@pytest.mark.parametrize("main", [data_plane.main, control_plane.main, peers.main])
def test_help_explains_the_numbers(main: Callable, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "medians" in capsys.readouterr().out
