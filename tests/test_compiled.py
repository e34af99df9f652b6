"""The compiled form: made of the sources that are here, and otherwise not used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tierkv import cli_compile, compiled
from tierkv.cli import main
from tierkv.errors import ConfigError

_WHICH = "from tierkv.cache import adding; print(adding.__file__, adding.add(1, 2))"


def has_compiler() -> bool:
    try:
        cli_compile.check_tools()
    except ConfigError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no compiler here")


_MODULES = {"cache": ("adding", "counting")}


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """The cache room of a package tierkv that has little else."""
    package = tmp_path / "src" / "tierkv"
    room = package / "cache"
    room.mkdir(parents=True)
    for name in ("__init__.py", "compiled.py", "cache/__init__.py"):
        shutil.copy(compiled.ROOT / name, package / name)
    (room / "counting.py").write_text("def count() -> int:\n    return 1\n")
    text = "def add(left: int, right: int) -> int:\n    return left + right\n"
    (room / "adding.py").write_text("from tierkv.cache.counting import count\n\n" + text)
    return room


def run(code: str, room: Path, forms: Path | str) -> str:
    """What a new Python prints that finds `room`, and forms in `forms`."""
    env = {**os.environ, "PYTHONPATH": str(room.parent.parent), "TIERKV_COMPILED": str(forms)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@needs_compiler
def test_a_form_is_used_for_the_sources_it_was_made_of_and_for_no_others(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = tmp_path / "forms"
    monkeypatch.setenv("TIERKV_COMPILED", str(forms))
    place = compiled.place_of(room.parent)
    assert place.parent == forms
    old = place.with_name("0" * 64 + place.suffix)
    not_ours = [forms / "of somebody", forms / ("0" * 64 + ".another-python")]
    for folder in (old, *not_ours):
        folder.mkdir(parents=True)
    cli_compile.build(room.parent, place, _MODULES)
    assert sorted(forms.iterdir()) == sorted([place, *not_ours])  # the older one is gone

    assert run(_WHICH, room, forms).startswith(str(place / "tierkv" / "cache" / "adding"))
    assert run(_WHICH, room, "off").split() == [str(room / "adding.py"), "3"]
    assert "int object expected" in run(_WHICH.replace("2", "'2'"), room, forms)

    (room / "adding.py").write_text("def add(left: int, right: int) -> int:\n    return 40\n")
    assert run(_WHICH, room, forms).split() == [str(room / "adding.py"), "40"]
    cli_compile.build(room.parent, compiled.place_of(room.parent), _MODULES)
    assert run(_WHICH, room, forms).endswith(" 40\n")
    assert str(forms) in run(_WHICH, room, forms)


def test_every_byte_and_every_name_of_a_source_tells_forms_apart(room: Path) -> None:
    places = {compiled.place_of(room.parent)}
    (room / "adding.py").write_text("x = 1\n")
    places.add(compiled.place_of(room.parent))
    (room / "adding.py").rename(room / "adding2.py")
    places.add(compiled.place_of(room.parent))
    (room / "empty.py").touch()
    places.add(compiled.place_of(room.parent))
    assert len(places) == 4


@needs_compiler
def test_what_does_not_compile_says_so_and_leaves_nothing(room: Path, tmp_path: Path) -> None:
    (room / "adding.py").write_text("def add(left: int) -> str:\n    return left\n")
    place = tmp_path / "forms" / "new"
    with pytest.raises(ConfigError, match="Incompatible return value"):
        cli_compile.build(room.parent, place, _MODULES)
    assert list(place.parent.iterdir()) == []


def test_a_place_that_cannot_be_written_to_is_named(room: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="nothing can be compiled into"):
        cli_compile.build(room.parent, tmp_path / "file" / "form")


@needs_compiler
def test_what_is_missing_to_compile_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_COMPILED", str(tmp_path))
    monkeypatch.setenv("CC", "/nowhere/cc -pthread")
    result = CliRunner().invoke(main, ["compile"])
    assert result.exit_code == 1
    assert "no C compiler /nowhere/cc; please install gcc" in result.output
    monkeypatch.delenv("CC")
    monkeypatch.setitem(sys.modules, "mypyc", None)
    result = CliRunner().invoke(main, ["compile"])
    assert result.exit_code == 1
    assert "pip install tierkv[compile]" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_form_that_is_there_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_COMPILED", str(tmp_path))
    compiled.place_of().mkdir()
    monkeypatch.setattr(cli_compile, "build", None)
    result = CliRunner().invoke(main, ["compile"])
    assert (result.exit_code, result.output.split(":")[0]) == (0, "compiled already")
