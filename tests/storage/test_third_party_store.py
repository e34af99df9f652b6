"""A store that another package provides is found by the scheme of its URL."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.api.nodes import process
from tests.storage.sqlite_store import SqliteSettings, SqliteStore
from tierkv.api.settings import NodeSettings
from tierkv.clock import SystemClock
from tierkv.config import load
from tierkv.errors import ConfigError
from tierkv.storage.factory import ENTRY_POINTS, StoreSettings, open_store


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install metadata of a package that provides stores; return a directory for values."""
    facts = tmp_path / "site" / "my_package-1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(
        f"[{ENTRY_POINTS}]\nsqlite = tests.storage.sqlite_store:SQLITE\n"
        "gone = tests.storage.sqlite_store:open_nothing\n"
        "old = tests.storage.sqlite_store:SqliteStore\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path


@pytest.mark.promise("The store in the documentation hands prompts over between nodes.")
async def test_nodes_hand_over_through_the_store_that_is_documented(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "own-store.md").read_text()
    found = re.search(r"`folder = \"my_package:FOLDER\"`.+?```python\n(.+?)```", page, re.DOTALL)
    assert found
    site = package / "site"
    (site / "my_package.py").write_text(found[1])
    with (site / "my_package-1.dist-info" / "entry_points.txt").open("a") as names:
        names.write("folder = my_package:FOLDER\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    (package / "node.toml").write_text(
        '[handoff]\ndirect = "off"\n[storage.stores.folder]\nnum_threads = 2\n'
    )
    options = ("--config", package / "node.toml", "--storage", f"folder://{package}/values")
    body = {"prompt": "What a store of one's own keeps. " * 4, "ticket_id": "t"}
    async with (
        process(package, "--role", "prefill", *options) as prefill,
        process(package, "--role", "decode", *options) as decode,
    ):
        published = await prefill.client.post("/v1/prefill", body)
        assert published.status == 200, published.body
        claimed = await decode.client.post("/v1/decode", body)
        assert claimed.body["matched"]["storage"] == len(body["prompt"])
        alone = await decode.client.post("/v1/generate", {"prompt": body["prompt"]})
        assert claimed.body["tokens"] == alone.body["tokens"]


def settings_of(package: Path, table: str, **environ: str) -> StoreSettings:
    (package / "node.toml").write_text(table)
    return load(NodeSettings, package / "node.toml", environ).storage


def test_a_store_that_a_package_brings_has_a_table_of_settings(package: Path) -> None:
    table = '[storage.stores.sqlite]\njournal = "delete"\n'
    settings = settings_of(package, table, TIERKV_STORAGE__STORES__SQLITE__TIMEOUT_S="2.5")
    store = open_store(f"sqlite://{package}/values", settings, SystemClock())
    assert isinstance(store, SqliteStore)
    assert store.settings == SqliteSettings("delete", 2.5)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("[storage.stores.sqlite]\njurnal = 1\n", "no setting jurnal .did you mean journal"),
        ("[storage.stores.sqlite]\ntimeout_s = true\n", "Expected `float`"),
        ('[storage.stores.sqlite]\njournal = "off"\n', "must be wal or delete"),
        ("[storage.stores.s3]\nbucket = 1\n", "no installed package provides a store for s3:"),
    ],
)
def test_a_wrong_table_of_such_a_store_is_refused_at_the_start(
    package: Path, table: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of(package, table)


def test_what_cannot_be_imported_and_what_nobody_brings_is_said(package: Path) -> None:
    with pytest.raises(ConfigError, match=r"SqliteStore, is not a .*StoreKind: upgrade"):
        open_store("old://x", StoreSettings(), SystemClock())
    with pytest.raises(ConfigError, match="open_nothing"):
        open_store("gone://x", StoreSettings(), SystemClock())
    with pytest.raises(ConfigError, match="accepted: memory://"):
        open_store("unknown://x", StoreSettings(), SystemClock())
