"""The hot parts in C: their own sources, as mypyc translates them.

What finds blocks then takes two thirds of its time a request, and short values come from Redis half
as fast again. A compiled form is used if one was made of exactly the sources that are here, for
exactly this Python; else Python runs the sources, as it does where nothing was ever compiled. So
who edits one runs what they wrote, until they compile again. `tierkv compile` makes a form, beside
the packages of the environment that tierkv runs in, or in the folder that TIERKV_COMPILED names;
with TIERKV_COMPILED=off none is used.

What the compiled modules keep to for its sake: constants are Final (which are read without a
look-up), tuples are never told apart by identity, an enum's member is never asked for its truth,
and types are true: they are checked wherever they are stated. Values that callers copy or pickle,
and settings, stay outside.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent
MODULES = {
    "cache": (
        *("copies", "eviction", "index", "keys", "leases", "match", "node", "policies", "pool"),
        *("s3fifo", "space", "spaces", "states", "tokens", "tree", "write_policy"),
    ),
    "storage": (
        *("buffers", "codec", "redis_bulk", "redis_exchange", "redis_ranges", "redis_requests"),
        *("redis_socket", "redis_wire", "resp"),
    ),
}
_VARIABLE = "TIERKV_COMPILED"


def place_of(root: Path = ROOT) -> Path:
    """Where the compiled form of these sources, for this Python, is or would be."""
    digest = hashlib.sha256(repr(MODULES).encode())
    for room in MODULES:  # all of a room, as a module may be compiled with what another one says
        for source in sorted((root / room).glob("*.py")):
            text = source.read_bytes()
            digest.update(f"{room} {source.name} {len(text)}\n".encode() + text)
    abi = sysconfig.get_config_var("SOABI")
    named = os.environ.get(_VARIABLE, "off")
    own = Path(sysconfig.get_path("platlib"), "tierkv_compiled")
    forms = own if named in {"", "off"} else Path(named).absolute()
    return forms / f"{digest.hexdigest()}.{abi}"


def find(room: str) -> list[str]:
    """Where Python looks for the room's modules before it looks at the sources, if anywhere."""
    place = _load()
    return [] if place is None else [str(place / "tierkv" / room)]


def is_used() -> bool:
    """Whether this process runs a compiled form."""
    return _load() is not None


@functools.cache
def _load() -> Path | None:
    """Load the compiled form, if there is one: the library that the modules are found in."""
    if os.environ.get(_VARIABLE) == "off":
        return None
    place = place_of()
    for library in place.glob("*__mypyc.*"):
        name = library.name.partition(".")[0]
        spec = importlib.util.spec_from_file_location(name, library)
        assert spec is not None, "a library's suffix is known"
        assert spec.loader is not None, "a library's suffix is known"
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return place
    return None
