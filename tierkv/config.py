"""Settings, read from a TOML file, environment variables and command-line options.

Each part of tierkv defines a class for its table of settings, and values are converted to the types
of that class. An unknown key is an error.
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
_CLOSE = 0.7  # similarity, 0 to 1, from which a known name is suggested for an unknown one
_FIXED = "no setting"
Fixed = Annotated[T, _FIXED]
"""The type of a settings field that only code can set, not a file, variable or option."""
_NEW_NAMES: dict[object, dict[str, str]] = {}  # new name by old name, for each settings class


def renamed(**new_names: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that lets old names of settings be read, with a warning.

    Args:
        **new_names: the present name of each setting, by its old name: `old_name="new_name"`.
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
    other_kind: type | None = None,
) -> T:
    """Load settings from a file, environment variables and options.

    Options override environment variables, which override the file.

    Args:
        kind: class of the settings: a msgspec struct with one field per table.
        path: a TOML file; None for no file.
        environ: environment variables. A variable TIERKV_TABLE__KEY sets `key` of `table`;
            TIERKV_STORAGE__REDIS__TIMEOUT_S sets `timeout_s` of the table `storage.redis`. All
            other variables are ignored.
        options: command-line options, each as (table, key, value).
        other_kind: class of the settings of another program that reads the same file and
            environment. Tables that only this class has are checked for unknown keys, and otherwise
            ignored. None if there is no other program.

    Returns:
        The settings.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value has a wrong type. The
            message names the source and the key.
    """
    return load_traced(kind, path, environ, options, other_kind=other_kind)[0]


def load_traced(
    kind: type[T],
    path: Path | None,
    environ: Mapping[str, str],
    options: Iterable[tuple[str, str, object]] = (),
    *,
    other_kind: type | None = None,
) -> tuple[T, dict[str, str]]:
    """Load settings from a file, environment variables and options; return also the source of each.

    Options override environment variables, which override the file.

    Args:
        kind: class of the settings: a msgspec struct with one field per table.
        path: a TOML file; None for no file.
        environ: environment variables; a variable TIERKV_TABLE__KEY sets `key` of `table`.
        options: command-line options, each as (table, key, value).
        other_kind: class of the settings of another program that reads the same file and
            environment. Tables that only this class has are checked for unknown keys, and otherwise
            ignored. None if there is no other program.

    Returns:
        The settings, and the sources by name "table.key": the path of the file, the name of the
            variable, or "option". Settings that keep their default have no source.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value has a wrong type.
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
    others = {} if other_kind is None else get_type_hints(other_kind)
    for old, new in [
        *_use_new_names(kind, table, where),
        *_use_new_names(other_kind, table, where),
    ]:
        origins[new] = origins.pop(old)
    theirs = {name for name in table if name in others and name not in get_type_hints(kind)}
    if other_kind is not None:
        _refuse_unknown(other_kind, {name: table.pop(name) for name in theirs}, where)
    _refuse_unknown(kind, table, where)
    try:
        return msgspec.convert(table, kind, strict=False), origins
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from error


def from_mapping(
    kind: type[T], given: Mapping[str, Any], where: str, *, converts_text: bool = False
) -> T:
    """Convert a mapping to a settings object.

    Args:
        kind: class of the settings, a dataclass or a msgspec struct.
        given: the values, by name of the setting.
        where: the origin of the values, such as the name of a file, for error messages.
        converts_text: True to convert text to numbers, as values of environment variables require.

    Returns:
        The settings.

    Raises:
        ConfigError: a name is unknown, or a value has a wrong type.
    """
    table = dict(given)
    _use_new_names(kind, table, where)
    _refuse_unknown(kind, table, where)
    try:
        return msgspec.convert(table, kind, strict=not converts_text)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from error


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables in one dict, by their names "table.key".

    Args:
        table: the nested tables.
        prefix: text before each name, such as "table."; "" for none.
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= (
            flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return found


def all_above_zero(table: str, settings: object, *names: str) -> None:
    """Check that settings are finite numbers above 0.

    Args:
        table: name of the settings' table for the error message; "" for the top level.
        settings: object that has the settings as attributes.
        *names: names of the settings to check.

    Raises:
        ConfigError: a setting is 0, negative, infinite or NaN.
    """
    _check_all(table, settings, names, "a number above 0", lambda number: number > 0)


def none_negative(table: str, settings: object, *names: str) -> None:
    """Check that settings are finite numbers of 0 or more.

    Args:
        table: name of the settings' table for the error message; "" for the top level.
        settings: object that has the settings as attributes.
        *names: names of the settings to check.

    Raises:
        ConfigError: a setting is negative, infinite or NaN.
    """
    _check_all(table, settings, names, "a number not below 0", lambda number: number >= 0)


def all_at_least_one(table: str, settings: object, *names: str) -> None:
    """Check that settings are finite numbers of 1 or more.

    Args:
        table: name of the settings' table for the error message; "" for the top level.
        settings: object that has the settings as attributes.
        *names: names of the settings to check.

    Raises:
        ConfigError: a setting is below 1, infinite or NaN.
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


_MAX_BYTES = 1 << 20


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise ConfigError(
                f"the config file {path} has more than {_MAX_BYTES} bytes, the maximum: "
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
    """Return the type of each setting of a settings class, by name.

    Fields marked `Fixed`, which only code can set, are left out.
    """
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: hint
        for name, hint in hints.items()
        if get_origin(hint) is not Annotated or _FIXED not in hint.__metadata__
    }


def names_in(kind: object, prefix: str = "") -> list[str]:
    """Return the names of all settings and nested tables of a settings class.

    Args:
        kind: class of the settings.
        prefix: text before each name, such as "table."; "" for none.

    Returns:
        The names; a setting of a nested table is named "table.key".
    """
    names = []
    for name, inner in settings_in(kind).items():
        names.append(f"{prefix}{name}")
        if _is_table(inner):
            names += names_in(inner, f"{prefix}{name}.")
    return names


def suggestion(unknown: str, known: Sequence[str]) -> str:
    """Return the end of an error sentence that suggests a known name for an unknown one.

    A known name with the same key in another table is suggested rather than a similar name.

    Args:
        unknown: the unknown name, as "table.key".
        known: the names of all settings, as "table.key".

    Returns:
        Text such as " (did you mean table.key?)"; "" if no name is similar.
    """
    key = unknown.rpartition(".")[2]
    elsewhere = [name for name in known if name.rpartition(".")[2] == key]
    close = elsewhere or difflib.get_close_matches(unknown, known, n=1, cutoff=_CLOSE)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _use_new_names(
    kind: object, table: dict[str, Any], where: str, prefix: str = ""
) -> list[tuple[str, str]]:
    found = []
    for old, new in _NEW_NAMES.get(kind, {}).items():
        if old in table:
            if new in table:
                raise ConfigError(
                    f"{where}: {prefix}{old} is an old name of {prefix}{new}: remove {prefix}{old}"
                )
            log.warning("%s: %s%s is now called %s%s: rename it", where, prefix, old, prefix, new)
            table[new] = table.pop(old)
            found.append((f"{prefix}{old}", f"{prefix}{new}"))
    for name, inner in settings_in(kind).items() if _is_table(kind) else ():
        if _is_table(inner) and isinstance(table.get(name), dict):
            found += _use_new_names(inner, table[name], where, f"{prefix}{name}.")
    return found


def _is_table(kind: object) -> bool:
    return dataclasses.is_dataclass(kind) or isinstance(kind, type(msgspec.Struct))


def _refuse_unknown(root: object, table: Mapping[str, Any], where: str) -> None:
    def check(kind: object, table: Mapping[str, Any], prefix: str) -> None:
        hints = settings_in(kind)
        for key, value in table.items():
            if key not in hints:
                meant = suggestion(f"{prefix}{key}", names_in(root))
                known = meant or f"; this table has {', '.join(sorted(hints))}"
                raise ConfigError(f"{where}: there is no setting {prefix}{key}{known}")
            if isinstance(value, dict) and _is_table(hints[key]):
                check(hints[key], value, f"{prefix}{key}.")

    check(root, table, "")
