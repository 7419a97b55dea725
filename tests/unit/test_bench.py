"""The benchmarks run and yield the keys that they promise; their numbers are not tested."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.bench import control_plane, data_plane, growth, peers, replay
from scripts.bench.growth_page import Plot, page

ROOT = Path(__file__).resolve().parents[2]
SHM_PATHS = {"shm", "shm_threads", "shm_verified"}
PATHS = {"copy", *SHM_PATHS, "stream", "grpc_bytes", "redis_tier", "redis_py", "raw_resp"}


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
    clients = document["clients"]
    assert positive(*(clients[f"{kind}_per_s"] for kind in ("bare", "empty", "lookup")))
    assert positive(clients["processes"], clients["empty_over_bare"])


def test_the_growth_benchmark_draws_its_plots(tmp_path: Path):
    file = tmp_path / "growth.html"
    document = run("-m", "scripts.bench.growth", "--html", str(file))
    names = [plot["name"] for plot in document["plots"]]
    assert names == ["block_bytes", "blocks", "clients", "index"]
    drawn = file.read_text()
    assert drawn.count("<svg") == 4
    for plot in document["plots"]:
        assert plot["title"] in drawn
        for values in plot["series"].values():
            assert len(values) == len(plot["xs"])
            assert positive(*values)


def test_a_page_is_one_well_formed_svg_a_plot():
    plot = Plot("n", "<title>", "a & b", "ms", [1, 10, 1000], {"<line>": [0.2, 2.0, 50.0]})
    machine = {"cpu": "<c>", "cores": 1, "memory_gib": 1, "kernel": "6", "python": "3"}
    drawn = page({"machine": machine, "commit": "c", "date": "d"}, [plot])
    svg = drawn[drawn.index("<svg") : drawn.index("</svg>") + 6]
    assert len(ElementTree.fromstring(svg).findall("circle")) == 3
    assert "<line>" not in drawn
    assert "<c>" not in drawn


def test_the_replay_benchmark_measures_time_and_memory_by_size():
    rows = run("-m", "scripts.bench.replay")["rows"]
    assert len(rows) >= 2
    assert [row["touches"] for row in rows] == sorted(row["touches"] for row in rows)
    names = [name for name in rows[0] if not name.endswith("_mib")]
    assert positive(*(row[name] for row in rows for name in names))


MAINS = [control_plane.main, data_plane.main, growth.main, peers.main, replay.main]


@pytest.mark.parametrize("main", MAINS)
def test_help_explains_the_numbers(main: Callable, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "medians" in capsys.readouterr().out
