"""Reader of settings: a TOML file, then environment variables, then options.

Values go into the types of the parts that own them. An unknown key is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import msgspec

from tierkv.errors import ConfigError

T = TypeVar("T")
log = logging.getLogger(__name__)
_ENV_PREFIX = "TIERKV_"
_CLOSE = 0.7  # share of common letters from which a name is suggested for another
_FIXED = "no setting"
Fixed = Annotated[T, _FIXED]
"""A field of a settings type that no file, variable or option can set.

Its default says where the value comes from; only the code that makes the part gives another one."""
_NEW_NAMES: dict[object, dict[str, str]] = {}  # by type of settings


def renamed(**new_names: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator of a type of settings: files may still use old names, with a warning.

    Args:
        new_names: the present name of a setting, by its old name.
    """

    def decorate(kind: type[T]) -> type[T]:
        _NEW_NAMES[kind] = new_names
        return kind

    return decorate


def load(
    kind: type[T],
    path: Path | None,
    environ: Mapping[str, str],
    options: Iterable[tuple[str, str, object]] = (),
    *,
    beside: type | None = None,
) -> T:
    """Return settings of type `kind`: from a file, then variables, then options, which win.

    Args:
        kind: a msgspec struct of sections.
        path: a TOML file; None for none.
        environ: variables, of which those named TIERKV_SECTION__KEY are read
            (TIERKV_STORAGE__REDIS__TIMEOUT_S is a nested one).
        options: each a section, a key and a value.
        beside: settings of another role, so that one environment or file serves both roles: a table
            that only the other role has is left out, once its keys are known to exist there.

    Raises:
        ConfigError: a file cannot be read, a key is unknown, or a value is not of its type; the
            message names the file and the key.
    """
    return load_traced(kind, path, environ, options, beside=beside)[0]


def load_traced(
    kind: type[T],
    path: Path | None,
    environ: Mapping[str, str],
    options: Iterable[tuple[str, str, object]] = (),
    *,
    beside: type | None = None,
) -> tuple[T, dict[str, str]]:
    """Load settings as `load` does, and return the origin of each setting that is no default.

    Origins are given by "table.key": a file, a variable, or "option".

    Args:
        kind: Class of the settings, with a field per table.
        path: A TOML file; None for no file.
        environ: Environment variables; those with the prefix TIERKV_ win over the file.
        options: Table, key and value of command-line options, which win over the environment.
        beside: Class with tables that are skipped, of another program with the same file.

    Raises:
        ConfigError: The file cannot be read, or a setting is unknown or wrong.
    """
    table: dict[str, Any] = _read(path) if path is not None else {}
    origins = dict.fromkeys(flat(table), str(path))
    where = str(path) if path is not None else "the settings"
    for variable, text in environ.items():
        if variable.startswith(_ENV_PREFIX) and "__" in variable:
            *sections, key = variable.removeprefix(_ENV_PREFIX).lower().split("__")
            _section(table, sections, where)[key] = text
            origins[".".join((*sections, key))] = variable
            where = f"{where} with {variable}"
    for section, key, value in options:
        _section(table, [section], where)[key] = value
        origins[f"{section}.{key}"] = "option"
    others = {} if beside is None else get_type_hints(beside)
    for old, new in [*_use_new_names(kind, table, where), *_use_new_names(beside, table, where)]:
        origins[new] = origins.pop(old)
    theirs = {name for name in table if name in others and name not in get_type_hints(kind)}
    if beside is not None:
        _refuse_unknown(beside, {name: table.pop(name) for name in theirs}, where)
    _refuse_unknown(kind, table, where)
    try:
        return msgspec.convert(table, kind, strict=False), origins
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from error


def from_mapping(
    kind: type[T], given: Mapping[str, Any], where: str, *, converts_text: bool = False
) -> T:
    """Return settings of type `kind` from a table.

    Args:
        kind: a dataclass or struct of settings.
        given: values by the settings' names.
        where: the table's place, for messages.
        converts_text: read a number from a text, as environment variables have them.

    Raises:
        ConfigError: a name is unknown, or a value is not of its type.
    """
    table = dict(given)
    _use_new_names(kind, table, where)
    _refuse_unknown(kind, table, where)
    try:
        return msgspec.convert(table, kind, strict=not converts_text)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from error


def flat(table: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return the values of nested tables, by "table.key".

    Args:
        table: Nested tables.
        at: Prefix of all names, such as "table.".
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{at}{key}.") if isinstance(value, Mapping) else {f"{at}{key}": value}
    return found


def all_above_zero(table: str, settings: object, *names: str) -> None:
    """Check that settings are numbers above 0. TOML has nan and inf, too.

    Args:
        table: Name of the settings' table, for the error.
        settings: Object with the settings as attributes.
        *names: Names of the settings to check.

    Raises:
        ConfigError: A setting is no number above 0.
    """
    _check_all(table, settings, names, "a number above 0", lambda number: number > 0)


def none_negative(table: str, settings: object, *names: str) -> None:
    """Check that settings are numbers of 0 or more.

    Args:
        table: Name of the settings' table, for the error.
        settings: Object with the settings as attributes.
        *names: Names of the settings to check.

    Raises:
        ConfigError: A setting is no number, or below 0.
    """
    _check_all(table, settings, names, "a number not below 0", lambda number: number >= 0)


def all_at_least_one(table: str, settings: object, *names: str) -> None:
    """Check that settings are counts of 1 or more.

    Args:
        table: Name of the settings' table, for the error.
        settings: Object with the settings as attributes.
        *names: Names of the settings to check.

    Raises:
        ConfigError: A setting is below 1.
    """
    _check_all(table, settings, names, "at least 1", lambda number: number >= 1)


def _check_all(
    table: str, settings: object, names: Sequence[str], what: str, is_right: Callable[[float], bool]
) -> None:
    for name in names:
        number: float = getattr(settings, name)
        if not (math.isfinite(number) and is_right(number)):
            key = f"{table}.{name}" if table else name
            raise ConfigError(f"{key} must be {what}, not {number}")


_MOST_BYTES = 1 << 20


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise ConfigError(
                f"the config file {path} has more than {_MOST_BYTES} bytes, the maximum: "
                "check that it is a config file"
            )
        return tomllib.loads(raw.decode())
    except FileNotFoundError as error:
        raise ConfigError(f"the config file {path} does not exist: correct the path") from error
    except OSError as error:
        raise ConfigError(f"the config file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} is not valid TOML: {error}") from error


def _section(table: dict[str, Any], names: Sequence[str], where: str) -> dict[str, Any]:
    for name in names:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {name} must be a table")
    return table


def settings_in(kind: object) -> dict[str, Any]:
    """Return the type of each setting in `kind`, a type of settings, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: hint
        for name, hint in hints.items()
        if get_origin(hint) is not Annotated or _FIXED not in hint.__metadata__
    }


def names_in(kind: object, at: str = "") -> list[str]:
    """Return the names of all settings of a class, as "table.key".

    Args:
        kind: Class of the settings.
        at: Prefix of all names, such as "table.".
    """
    names = []
    for name, inner in settings_in(kind).items():
        names.append(f"{at}{name}")
        if _is_table(inner):
            names += names_in(inner, f"{at}{name}.")
    return names


def suggestion(unknown: str, known: Sequence[str]) -> str:
    """Return the probable name of an unknown setting, as the end of a sentence.

    "" if none is close.

    Args:
        unknown: The unknown name. A known setting with the same key in another table is preferred.
        known: Names of all settings, as "table.key".
    """
    key = unknown.rpartition(".")[2]
    elsewhere = [name for name in known if name.rpartition(".")[2] == key]
    close = elsewhere or difflib.get_close_matches(unknown, known, n=1, cutoff=_CLOSE)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _use_new_names(
    kind: object, table: dict[str, Any], where: str, at: str = ""
) -> list[tuple[str, str]]:
    """Replace old names of settings in `table`; return each old name with its new one.

    Raises:
        ConfigError: a setting has a value under both names.
    """
    found = []
    for old, new in _NEW_NAMES.get(kind, {}).items():
        if old in table:
            if new in table:
                raise ConfigError(
                    f"{where}: {at}{old} is an old name of {at}{new}: remove {at}{old}"
                )
            log.warning("%s: %s%s is now called %s%s: rename it", where, at, old, at, new)
            table[new] = table.pop(old)
            found.append((f"{at}{old}", f"{at}{new}"))
    for name, inner in settings_in(kind).items() if _is_table(kind) else ():
        if _is_table(inner) and isinstance(table.get(name), dict):
            found += _use_new_names(inner, table[name], where, f"{at}{name}.")
    return found


def _is_table(kind: object) -> bool:
    return dataclasses.is_dataclass(kind) or isinstance(kind, type(msgspec.Struct))


def _refuse_unknown(root: object, table: Mapping[str, Any], where: str) -> None:
    def look(kind: object, table: Mapping[str, Any], at: str) -> None:
        hints = settings_in(kind)
        for key, value in table.items():
            if key not in hints:
                meant = suggestion(f"{at}{key}", names_in(root))
                known = meant or f"; this table has {', '.join(sorted(hints))}"
                raise ConfigError(f"{where}: there is no setting {at}{key}{known}")
            if isinstance(value, dict) and _is_table(hints[key]):
                look(hints[key], value, f"{at}{key}.")

    look(root, table, "")
