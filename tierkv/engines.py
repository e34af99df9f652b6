"""The engines that a node can run, by name, and the tables of settings that they read.

A new engine is a module with an `EngineSpec`, its table of settings in `EngineTables`, and a row in
`_ENGINES`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tierkv.engine import EngineSpec
from tierkv.errors import ConfigError, how_to_install
from tierkv.hf.settings import TransformersSettings
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.engine import EngineSettings, ReferenceSpec
from tierkv.sched.settings import CacheSettings


class EngineTables(msgspec.Struct, frozen=True, kw_only=True):
    """The tables of the config file that engines read."""

    model: ModelConfig = ModelConfig()
    engine: EngineSettings = EngineSettings()
    transformers: TransformersSettings = TransformersSettings()


def _reference(tables: EngineTables, cache: CacheSettings, model: str, _: str) -> EngineSpec:
    return ReferenceSpec(tables.model, tables.engine, cache, model)


def _transformers(
    tables: EngineTables, cache: CacheSettings, model: str, device: str
) -> EngineSpec:
    try:
        from tierkv.hf.engine import TransformersSpec  # noqa: PLC0415 - gigabytes, may be missing
    except ImportError as error:
        raise ConfigError(
            f"the engine transformers cannot be imported ({error}): "
            f"{how_to_install('transformers')}"
        ) from error
    return TransformersSpec(model, tables.transformers, cache, device)


_ENGINES: dict[str, Callable[[EngineTables, CacheSettings, str, str], EngineSpec]] = {
    "reference": _reference,
    "transformers": _transformers,
}
ENGINE_NAMES = tuple(_ENGINES)


def engine_of(
    name: str, tables: EngineTables, cache: CacheSettings, *, model: str, device: str
) -> EngineSpec:
    """Return the description of an engine, from which a node builds its service.

    Args:
        name: name of the engine, one of ENGINE_NAMES.
        tables: the tables of settings of all engines.
        cache: settings of the cache, such as the block size.
        model: path of the model, a directory or a GGUF file; "" for the engine's default.
        device: the device of the node: `cpu`, `cuda` or `cuda:N`.

    Raises:
        ConfigError: there is no engine of this name, its packages are not installed, or the
            settings contradict each other.
    """
    try:
        make = _ENGINES[name]
    except KeyError as error:
        known = ", ".join(ENGINE_NAMES)
        raise ConfigError(
            f"there is no engine {name!r}: set node.engine to one of {known}"
        ) from error
    return make(tables, cache, model, device)
