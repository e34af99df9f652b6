"""The command `tierkv compile`: makes the compiled form of the hot parts."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from tierkv import compiled
from tierkv.errors import ConfigError

_MOST_S = 600.0
_FORM = re.compile(r"[0-9a-f]{64}\.[^/]+")
_SCRIPT = """
import sys
from mypyc.build import mypycify
from setuptools import setup
modules = mypycify(["--config-file", "", *sys.argv[2:]], opt_level="3")
setup(name="tierkv-compiled", packages=[], ext_modules=modules,
      script_args=["--quiet", "build_ext", "--build-lib", sys.argv[1]])
"""


@click.command()
def compile() -> None:  # noqa: A001 - a command is named after its function
    """Compile the hot parts: finding blocks takes two thirds of its time then.

    Takes a minute or two, once for each version of tierkv and Python. Needs a C compiler, Python's
    headers and `pip install tierkv[compile]`. Nothing changes but the speed: without it Python runs
    the same sources, as it does with TIERKV_COMPILED=off. TIERKV_COMPILED can also name another
    folder to keep it in than that of the installed packages.
    """
    place = compiled.place_of()
    if place.exists():
        click.echo(f"compiled already: {place}")
        return
    check_tools()
    build(compiled.ROOT, place)
    click.echo(f"compiled: {place}")


def check_tools() -> None:
    """Raises ConfigError, with what to do, if something to compile with is missing."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    headers = Path(sysconfig.get_path("include"), "Python.h")
    for name in ("mypyc", "setuptools"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"{name} is not installed; please run: pip install tierkv[compile]")
    if shutil.which(compiler) is None:
        raise ConfigError(f"there is no C compiler {compiler}; please install gcc, or set CC")
    if not headers.exists():
        raise ConfigError(f"{headers} is missing; please install Python's headers (python3-dev)")


def build(root: Path, place: Path, modules: Mapping[str, Sequence[str]] = compiled.MODULES) -> None:
    """Compile modules of the package at `root` into `place`, which comes to be whole or not at all.
    Older forms for this Python beside it go. Raises ConfigError."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="new-", dir=place.parent) as name:
            folder = Path(name)
            sources = shutil.ignore_patterns("__pycache__", "static")
            shutil.copytree(root, folder / "tierkv", ignore=sources)
            paths = [f"tierkv/{room}/{name}.py" for room in modules for name in modules[room]]
            _translate(folder, paths)
            if not place.exists():  # else somebody else was as far before
                (folder / "built").rename(place)
    except OSError as error:
        raise ConfigError(f"nothing can be compiled into {place.parent}: {error}") from error
    for other in place.parent.iterdir():  # which may hold other things than forms
        if other != place and _FORM.fullmatch(other.name) and other.suffix == place.suffix:
            shutil.rmtree(other, ignore_errors=True)


def _translate(folder: Path, paths: Sequence[str]) -> None:
    command = [sys.executable, "-c", _SCRIPT, "built", *paths]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_MOST_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"it did not compile within {_MOST_S:.0f} s") from None
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise ConfigError(f"it does not compile:\n{last}")
