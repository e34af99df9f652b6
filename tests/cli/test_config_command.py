"""`tierkv config`: each setting and where it is from; what is wrong, and what was meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tierkv.cli import main


def config(*arguments: str | Path, **environ: str) -> Result:
    return CliRunner().invoke(main, ["config", *map(str, arguments)], env=environ)


def told(*arguments: str | Path, **environ: str) -> dict[str, Any]:
    shown = config(*arguments, "--json", **environ)
    assert shown.exit_code == 0, shown.output
    found: dict[str, Any] = json.loads(shown.stdout)["settings"]
    return found


@pytest.mark.promise("`tierkv config` shows the origin of each setting and masks secrets.")
def test_each_setting_says_where_it_is_from(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[cache]\nblock_size = 32\nhost_blocks = 9\n[storage.redis]\ntimeout_s = 2.0\n")
    settings = told("--config", file, TIERKV_CACHE__HOST_BLOCKS="7")
    assert settings["cache.block_size"] == {"value": 32, "from": str(file)}
    assert settings["storage.redis.timeout_s"] == {"value": 2.0, "from": str(file)}
    assert settings["cache.host_blocks"] == {"value": 7, "from": "TIERKV_CACHE__HOST_BLOCKS"}
    assert settings["node.port"] == {"value": 8100, "from": "default"}


@pytest.mark.promise("`tierkv config` shows the origin of each setting and masks secrets.")
def test_secrets_are_masked() -> None:
    url = "redis://user:hunter2@127.0.0.1:1/0"
    shown = config(TIERKV_STORAGE__URL=url, TIERKV_CACHE__TENANT="acme")
    assert "hunter2" not in shown.output
    assert "acme" not in shown.output
    assert "TIERKV_STORAGE__URL" in shown.output


def test_names_choose_settings_and_whole_tables() -> None:
    assert list(told("node.port")) == ["node.port"]
    assert set(told("tls")) == {"tls.cert", "tls.key", "tls.client_ca"}
    assert "gateway.prefill" in told("--of", "gateway", "gateway")


def test_the_default_store_is_told_as_it_would_be_used(tmp_path: Path) -> None:
    settings = told("storage.url", XDG_CACHE_HOME=str(tmp_path))
    assert settings["storage.url"]["value"] == f"file://{tmp_path}/tierkv/store"


@pytest.mark.promise("An unknown setting is an error with a suggestion.")
@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("TIERKV_CACHE__BLOCKSIZE", "cache.blocksize (did you mean cache.block_size?)"),
        ("TIERKV_NODE__BLOCK_SIZE", "node.block_size (did you mean cache.block_size?)"),
        ("TIERKV_CAHCE__TENANT", "cahce (did you mean cache?)"),
        ("TIERKV_NODE__QQQQ", "node.qqqq; this table has allow_insecure_bind"),
    ],
)
def test_an_unknown_key_is_an_error_that_suggests_the_right_one(wrong: str, meant: str) -> None:
    for command in ("config", "serve"):
        shown = CliRunner().invoke(main, [command], env={wrong: "1"})
        assert shown.exit_code == 1
        assert f"there is no setting {meant}" in shown.stderr
        assert shown.stderr.count("\n") == 1


def test_an_unknown_name_suggests_the_right_one() -> None:
    shown = config("node.prot")
    assert (shown.exit_code, shown.stderr) == (
        1,
        "error: there is no setting node.prot (did you mean node.port?)\n",
    )


def test_a_variable_with_one_underline_too_few_is_noticed() -> None:
    shown = config("node.port", TIERKV_NODE_PORT="tcp://10.0.0.1:80")  # Kubernetes sets such ones
    assert shown.exit_code == 0
    assert (
        "the variable TIERKV_NODE_PORT has no effect: did you mean TIERKV_NODE__PORT?\n"
        in shown.stderr
    )


def test_a_table_of_the_other_role_is_checked_and_left_out() -> None:
    assert config("node.port", TIERKV_LIMITS__MAX_BATCH="3").exit_code == 0
    shown = config("node.port", TIERKV_LIMITS__MAX_BACTH="3")
    assert "limits.max_bacth (did you mean limits.max_batch?)" in shown.stderr
