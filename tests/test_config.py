"""Settings come from a file and the environment, and nothing unknown is ignored."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from tierkv.api.settings import NodeSettings
from tierkv.config import from_mapping, load, load_traced, names_in, renamed
from tierkv.errors import ConfigError
from tierkv.gateway.settings import GatewaySettings


def file(folder: Path, text: str) -> Path:
    path = folder / "node.toml"
    path.write_text(text)
    return path


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    path = file(tmp_path, "[node]\nport = 1\n[cache]\nblock_size = 32\n")
    settings = load(
        NodeSettings,
        path,
        {
            "TIERKV_NODE__PORT": "2",
            "TIERKV_VENV": "ignored",
            "TIERKV_STORAGE__REDIS__TIMEOUT_S": "0.5",
        },
    )
    assert (settings.node.port, settings.cache.block_size) == (2, 32)
    assert settings.storage.redis.timeout_s == 0.5
    assert settings.handoff == NodeSettings().handoff


def test_options_win_over_both_and_need_only_fit_together_with_them(tmp_path: Path) -> None:
    path = file(tmp_path, "[node]\nlistens_tcp = false\nport = 1\n[tls]\nkey = 'key.pem'\n")
    options = [("node", "unix_socket", "here"), ("tls", "cert", "cert.pem"), ("node", "port", 0)]
    settings = load(NodeSettings, path, {"TIERKV_NODE__PORT": "2"}, options)
    assert (settings.node.unix_socket, settings.node.port) == ("here", 0)
    assert (settings.tls.cert, settings.tls.key) == ("cert.pem", "key.pem")


@pytest.mark.parametrize(
    ("text", "environ", "words"),
    [
        ("[caches]\nx = 1", {}, "caches"),
        ("[storage.redis]\nspeed = 1", {}, "storage.redis.speed"),
        ("[cache]\nblock_size = 'x'", {}, "block_size"),
        ("cache = 1", {"TIERKV_CACHE__BLOCK_SIZE": "1"}, "must be a table"),
        ("", {"TIERKV_NODE__PORT": "x"}, "port"),
        ("[model]\nnum_heads = 3", {}, "multiple"),
        ("[handoff]\nprefix = 'a:b'", {}, "handoff.prefix"),
        ("[handoff]\nblock_ttl_s = 1.0", {}, "block_ttl_s"),
        ("[handoff]\nproducer_lease_s = 5.0", {}, "no setting handoff.producer_lease_s"),
        ("", {"TIERKV_STORAGE__RESILIENCE__MAX_READS": "5"}, "no setting storage.resilience.max"),
    ],
)
def test_what_is_wrong_is_named(
    text: str, environ: dict[str, str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        load(NodeSettings, file(tmp_path, text), environ)


def test_one_environment_and_one_file_serve_nodes_and_gateways(tmp_path: Path) -> None:
    path = file(tmp_path, "[cache]\nblock_size = 32\n[limits]\nmax_batch = 3\n")
    environ = {"TIERKV_HANDOFF__DIRECT": "off", "TIERKV_GATEWAY__MODEL": "m"}
    node = load(NodeSettings, path, environ, other_kind=GatewaySettings)
    front = load(GatewaySettings, path, environ, other_kind=NodeSettings)
    assert (node.cache.block_size, node.handoff.direct.value) == (32, "off")
    assert (front.limits.max_batch, front.gateway.model) == (3, "m")


def test_what_can_be_set_is_what_somebody_asks_for_by_name() -> None:
    names = {*names_in(NodeSettings), *names_in(GatewaySettings)}
    tables = {name.rpartition(".")[0] for name in names}
    both_listen = {name for name in names if name.replace("gateway.", "node.") in names - {name}}
    assert len(names - tables - both_listen) <= 118, "a value that nobody asks for by name is Fixed"


@renamed(rows="num_rows")
@dataclasses.dataclass(frozen=True)
class Table:
    num_rows: int = 1


class Tables(msgspec.Struct, frozen=True):
    first: Table = Table()


@pytest.mark.promise("A renamed setting can be read under its old name, with a warning.")
def test_a_renamed_setting_is_read_under_its_old_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = file(tmp_path, "[first]\nrows = 2\n")
    settings, origins = load_traced(Tables, path, {})
    assert (settings.first.num_rows, origins) == (2, {"first.num_rows": str(path)})
    assert "first.rows is now called first.num_rows: rename it" in caplog.text
    settings, origins = load_traced(Tables, None, {"TIERKV_FIRST__ROWS": "3"})
    assert (settings.first.num_rows, origins) == (3, {"first.num_rows": "TIERKV_FIRST__ROWS"})
    given = {"rows": 4}
    assert from_mapping(Table, given, "here") == Table(4)
    assert given == {"rows": 4}


def test_a_setting_under_both_of_its_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="rows is an old name of num_rows: remove rows"):
        from_mapping(Table, {"rows": 1, "num_rows": 2}, "here")
    with pytest.raises(ConfigError, match=r"no setting first\.row "):
        load(Tables, None, {"TIERKV_FIRST__ROW": "3"})
