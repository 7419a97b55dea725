"""Configuration: what is wrong stops the start, and the message says what would be right."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import (
    Config,
    load,
    parse_address,
    parse_bytes,
    parse_seconds,
    settings,
)
from kvstore.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    file = folder / "kvstore.toml"
    file.write_text(text, encoding="utf-8")
    return file


# -- sources


def test_without_sources_the_defaults_hold() -> None:
    config = load({}, {"HOME": "/root", "PATH": "/bin"})
    assert config == Config(state_dir=config.state_dir)
    assert config.cpu_bytes is None
    assert config.listen.startswith("127.0.0.1:")


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'cpu_bytes = "1GiB"\nverify = "always"\nredis_ttl_s = "12h"\n')
    environment = {"KVSTORE_CPU_BYTES": "2GiB", "KVSTORE_REDIS_TTL_S": "90s"}
    config = load({"cpu_bytes": "3GiB"}, environment, file)
    assert config.cpu_bytes == 3 << 30
    assert config.redis_ttl_s == 90.0
    assert config.verify == "always"
    assert load({}, environment, file).cpu_bytes == 2 << 30
    assert load({}, {}, file).cpu_bytes == 1 << 30


def test_the_file_takes_tomls_own_numbers_and_booleans(tmp_path: Path) -> None:
    file = write(tmp_path, "cpu_bytes = 1073741824\nno_redis = true\ndrain_s = 2.5\n")
    config = load({}, {}, file)
    assert (config.cpu_bytes, config.no_redis, config.drain_s) == (1 << 30, True, 2.5)


def test_every_setting_can_come_from_every_source(tmp_path: Path) -> None:
    samples = {
        "listen": "0.0.0.0:1", "state_dir": "/x", "cpu_bytes": "1GiB", "shm_dir": "/y",
        "share_arena": "false", "verify": "always", "redis_url": "redis://h:1",
        "no_redis": "true", "redis_bytes": "1GiB", "redis_ttl_s": "1h", "metrics": "none",
        "drain_s": "3",
    }  # fmt: skip
    assert set(samples) == {setting.name for setting in settings()}
    file = write(tmp_path, "".join(f'{name} = "{text}"\n' for name, text in samples.items()))
    environment = {f"KVSTORE_{name.upper()}": text for name, text in samples.items()}
    assert load(samples, {}) == load({}, environment) == load({}, {}, file)


# -- unknown names


def test_an_unknown_flag_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean --cpu-bytes"):
        load({"cpu_byte": "4GiB"}, {})


def test_an_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"KVSTORE_REDIS_URI.*did you mean KVSTORE_REDIS_URL"):
        load({}, {"KVSTORE_REDIS_URI": "redis://h:1"})


def test_an_unknown_key_of_the_file_names_the_file_and_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kvstore\.toml: metric .*did you mean metrics"):
        load({}, {}, write(tmp_path, 'metric = "none"\n'))


def test_a_name_that_resembles_nothing_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match="known: listen, state_dir"):
        load({}, {"KVSTORE_QQQQ": "1"})


# -- wrong values


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cpu_bytes", "4GB"),
        ("cpu_bytes", "4G"),
        ("cpu_bytes", "lots"),
        ("cpu_bytes", "-1"),
        ("cpu_bytes", "0"),
        ("cpu_bytes", ""),
        ("cpu_bytes", "9" * 400 + "GiB"),
        ("redis_bytes", "0GiB"),
        ("redis_ttl_s", "0"),
        ("redis_ttl_s", "-5"),
        ("redis_ttl_s", "soon"),
        ("redis_ttl_s", "9" * 400),
        ("drain_s", "1w"),
        ("listen", "7700"),
        ("listen", "host:"),
        ("listen", ":7700"),
        ("listen", "host:70000"),
        ("metrics", "host:port"),
        ("verify", "sometimes"),
        ("no_redis", "maybe"),
        ("share_arena", "yes"),
        ("shm_dir", "~no-such-user-at-all/x"),
    ],
)
def test_a_wrong_value_is_quoted_with_where_it_came_from_and_what_would_be_right(
    name: str, text: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load({}, {f"KVSTORE_{name.upper()}": text})
    message = str(raised.value)
    assert f"KVSTORE_{name.upper()}" in message
    assert repr(text) in message
    assert "write " in message


def test_4gb_is_refused_with_the_units_that_are_taken() -> None:
    with pytest.raises(ConfigError, match="KiB, MiB, GiB or TiB"):
        load({"cpu_bytes": "4GB"}, {})


@pytest.mark.parametrize("text", ["cpu_bytes = [1, 2]\n", "[cpu_bytes]\nsize = 1\n"])
def test_a_list_or_table_in_the_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="where one value belongs"):
        load({}, {}, write(tmp_path, text))


def test_a_file_that_is_missing_or_not_toml_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load({}, {}, tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=r"kvstore\.toml"):
        load({}, {}, write(tmp_path, "cpu_bytes = = 1"))
    file = tmp_path / "latin.toml"
    file.write_bytes(b'listen = "\xff"\n')
    with pytest.raises(ConfigError, match=r"latin\.toml"):
        load({}, {}, file)


# -- single parsers


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("512 MiB", 512 << 20),
        ("512mib", 512 << 20),
        (" 1TiB ", 1 << 40),
        ("64KiB", 64 << 10),
        ("123", 123),
    ],
)
def test_sizes_are_numbers_with_binary_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("1.5s", 1.5), ("15m", 900), ("12h", 43200), ("7d", 604800)]
)
def test_times_are_numbers_with_units(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@given(st.text(max_size=20))
def test_no_text_makes_a_parser_raise_anything_but_a_config_error(text: str) -> None:
    for setting in settings():
        with contextlib.suppress(ConfigError):
            load({setting.name: text}, {})


@pytest.mark.parametrize("text", ["none", "127.0.0.1:0", "[::1]:7700", "host.internal:65535"])
def test_addresses_are_taken_as_they_are(text: str) -> None:
    assert parse_address(text) == text
