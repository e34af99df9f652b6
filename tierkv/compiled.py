"""The cache room in C: its own sources, as mypyc translates them, two thirds of the time a request.

A compiled form is used if one was made of exactly the sources that are here, for exactly this
Python; else Python runs the sources, as it does where nothing was ever compiled. So who edits the
room runs what they wrote, until they compile again. `tierkv compile` makes one, beside the packages
of the environment that tierkv runs in, or in the folder that TIERKV_COMPILED names; with
TIERKV_COMPILED=off none is used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

ROOM = Path(__file__).with_name("cache")
# What runs seldom; and values that callers copy and pickle, which those of compiled classes refuse.
LEFT_OUT = ("fingerprint", "history", "invariants", "layout", "shards")
_VARIABLE = "TIERKV_COMPILED"


def place_of(room: Path) -> Path:
    """Where the compiled form of these sources, for this Python, is or would be."""
    digest = hashlib.sha256()
    for source in sorted(room.glob("*.py")):
        text = source.read_bytes()
        digest.update(f"{source.name} {len(text)}\n".encode() + text)
    abi = sysconfig.get_config_var("SOABI")
    named = os.environ.get(_VARIABLE, "").removeprefix("off")
    forms = Path(named) if named else Path(sysconfig.get_path("platlib"), "tierkv_compiled")
    return forms / f"{digest.hexdigest()}.{abi}"


def find(room: Path = ROOM) -> list[str]:
    """Where Python looks for the room's modules before it looks at the sources: nowhere, or in the
    place of a compiled form, which is loaded now."""
    if os.environ.get(_VARIABLE) == "off":
        return []
    place = place_of(room)
    for library in place.glob("*__mypyc.*"):  # all modules; what is named after one asks it
        name = library.name.partition(".")[0]
        spec = importlib.util.spec_from_file_location(name, library)
        assert spec is not None, "a library's suffix is known"
        assert spec.loader is not None, "a library's suffix is known"
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return [str(place / "tierkv" / room.name)]
    return []


def is_used() -> bool:
    """Whether this process runs a compiled form."""
    room = sys.modules.get("tierkv.cache")
    return room is not None and room.__path__[0] != str(ROOM)
