"""`kvstore replay`: what scripts read, what people read, and what wrong options are told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvstore.cli import cli
from kvstore.eviction import DEFAULT, POLICIES
from kvstore.replay import page
from kvstore.replay.sweep import Swept


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty chats whose turns take turns, each turn a block longer."""
    lines = []
    for turn in range(5):
        for chat in range(40):
            ids = [chat * 100 + block for block in range(turn + 2)]
            lines.append(
                {
                    "timestamp": 1000 * (turn * 40 + chat),
                    "input_length": 512 * len(ids),
                    "output_length": 10,
                    "hash_ids": ids,
                }
            )
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, ["replay", *map(str, arguments)])


def document(*arguments: Any) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_the_document(trace: Path) -> None:
    found = document(trace, "--capacity-blocks", "80,400", "--policy", "lru")
    assert list(found) == [
        "trace",
        "requests",
        "blocks",
        "unique_blocks",
        "infinite",
        "results",
    ]
    assert (found["trace"], found["requests"], found["blocks"]) == ("chats", 200, 800)
    assert found["unique_blocks"] == 240
    assert found["infinite"] == {"block_hit_rate": 0.7, "token_hit_rate": 0.7}
    for result in found["results"]:
        assert list(result) == [
            "policy",
            "admission",
            "capacity_blocks",
            "block_hit_rate",
            "token_hit_rate",
            "blocks_written",
            "share_of_optimal",
        ]
    by_name = {(each["policy"], each["capacity_blocks"]): each for each in found["results"]}
    assert set(by_name) == {
        (name, size) for name in ("lru", DEFAULT, "default", "optimal") for size in (80, 400)
    }
    assert by_name["optimal", 80]["share_of_optimal"] == 1
    assert by_name["lru", 80]["block_hit_rate"] < by_name["optimal", 80]["block_hit_rate"] < 0.7
    enough = by_name["default", 400]
    assert (enough["block_hit_rate"], enough["blocks_written"]) == (0.7, 240)
    assert enough["share_of_optimal"] == 1


def test_the_default_policy_stands_beside_its_own_name(trace: Path) -> None:
    results = document(trace, "--capacity-blocks", 100)["results"]
    assert {each["policy"] for each in results} == {*POLICIES, "default", "optimal"}
    named, default = (
        next(each for each in results if each["policy"] == name) for name in (DEFAULT, "default")
    )
    assert {**named, "policy": "default"} == default


def test_capacities_are_shares_of_the_trace_when_none_are_given(trace: Path) -> None:
    results = document(trace)["results"]
    assert {each["capacity_blocks"] for each in results} == {2, 12, 24, 60, 120}


def test_a_size_in_gib_counts_the_models_blocks(trace: Path) -> None:
    results = document(trace, "--capacity-gib", 10, "--model", "llama-3.1-70b")["results"]
    assert {each["capacity_blocks"] for each in results} == {64}  # 0.15625 GiB each


def test_a_model_is_read_from_its_config(trace: Path, tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    results = document(trace, "--capacity-gib", 10, "--model", tmp_path)["results"]
    assert {each["capacity_blocks"] for each in results} == {64}


def test_the_warm_up_counts_neither_hits_nor_writes(trace: Path) -> None:
    (result,) = (
        each
        for each in document(trace, "--capacity-blocks", 400, "--warmup", 0.2)["results"]
        if each["policy"] == "default"
    )
    assert result["block_hit_rate"] == pytest.approx(1 - 160 / 720)
    assert result["blocks_written"] == 160


def test_a_time_to_live_shorter_than_the_gaps_leaves_nothing(trace: Path) -> None:
    results = document(trace, "--capacity-blocks", 400, "--ttl", "39s")["results"]
    assert {each["block_hit_rate"] for each in results if each["policy"] == "default"} == {0}


def test_admission_rules_stand_side_by_side(trace: Path) -> None:
    results = document(
        trace, "--capacity-blocks", 400, "--admission", "all,second-sight,gain", "--policy", "lru"
    )["results"]
    rows = {each["admission"]: each for each in results if each["policy"] == "lru"}
    assert rows["second-sight"]["blocks_written"] < rows["all"]["blocks_written"]
    assert rows["second-sight"]["block_hit_rate"] < rows["all"]["block_hit_rate"]
    assert rows["gain"]["block_hit_rate"] == rows["all"]["block_hit_rate"], "a cold start stores"


def test_several_traces_print_a_line_each(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(trace.read_bytes())
    done = run(trace, other, "--json", "--capacity-blocks", 10)
    assert [json.loads(line)["trace"] for line in done.stdout.splitlines()] == ["chats", "other"]


def test_the_table_and_the_page_say_what_the_document_says(trace: Path, tmp_path: Path) -> None:
    html = tmp_path / "out.html"
    done = run(trace, "--capacity-blocks", "80,400", "--html", html)
    assert done.exit_code == 0, done.output
    found = document(trace, "--capacity-blocks", "80,400")
    text = html.read_text()
    embedded = re.search(r'id="replay">(.*?)</script>', text)
    assert embedded is not None
    assert json.loads(embedded[1]) == [found]
    for result in found["results"]:
        assert f"{result['token_hit_rate']:.4f}" in done.stdout
        assert f"{result['token_hit_rate']:.4f}" in text
    assert "llama-3.1-8b at 400 TFLOP/s" in done.stdout, "the cost model is stated"
    assert "0.7000" in done.stdout, "the infinite store"


def test_a_name_in_the_page_is_only_text(trace: Path) -> None:
    found = document(trace, "--capacity-blocks", 10)
    found["trace"] = "</script><script>alert(1)"
    swept = Swept(found, [0.0] * len(found["results"]), 0.0, 1, "<script>alert(2)")  # type: ignore[arg-type]
    assert "<script>alert" not in page.render([swept], "tokens")


def test_a_damaged_line_stops_or_is_counted(trace: Path) -> None:
    trace.write_text(trace.read_text() + "{oops\n")
    done = run(trace, "--json")
    assert done.exit_code == 1
    assert "chats.jsonl:201: not JSON" in done.output
    assert "--skip-bad" in done.output
    done = run(trace, "--json", "--skip-bad", "--capacity-blocks", 10)
    assert done.exit_code == 0
    assert "1 damaged lines left out" in done.stderr
    assert "1 damaged lines were left out" in run(trace, "--skip-bad").stdout


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--policy", "luck"], "none of lru"),
        (["--admission", "none"], "second-sight"),
        (["--capacity-blocks", "0"], "not a number of blocks"),
        (["--capacity-blocks", "many"], "not a number of blocks"),
        (["--capacity-gib", "1e-9"], "less than one block"),
        (["--capacity-gib", "1", "--capacity-blocks", "1"], "not both"),
        (["--model", "my-model"], "llama-3.1-8b"),
        (["--ttl", "soon"], "12h"),
        (["--warmup", "1"], "0<=x<1"),
    ],
)
def test_wrong_options_are_told_what_is_right(trace: Path, options: list[str], why: str) -> None:
    done = run(trace, *options)
    assert done.exit_code != 0
    assert why in " ".join(done.output.split())


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = run(tmp_path / "none.jsonl")
    assert done.exit_code == 1
    assert "No such file" in done.output
