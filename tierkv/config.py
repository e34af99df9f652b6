"""Reader of settings: a TOML file, then environment variables, then options.

Each part of tierkv has a class for its own settings, and its values are converted into that. An
unknown key is an error.
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
"""A field of a settings type that no file, variable or option can set.

Only code can set another value than the default."""
_NEW_NAMES: dict[object, dict[str, str]] = {}  # by type of settings


def renamed(**new_names: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator for a settings class: files may still use old names, with a warning.

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
    other_kind: type | None = None,
) -> T:
    """Load settings from a file, environment variables and options; the later source wins.

    Args:
        kind: class of the settings: a msgspec struct with a field for each table.
        path: a TOML file; None for none.
        environ: environment variables, of which those named TIERKV_SECTION__KEY are read
            (TIERKV_STORAGE__REDIS__TIMEOUT_S is a nested one).
        options: command-line options, each a table, a key and a value.
        other_kind: settings class of another program that reads the same file or environment.
            Tables that only that class has are skipped, after a check of their keys.

    Returns:
        The settings.

    Raises:
        ConfigError: a file cannot be read, a key is unknown, or a value is not of its type; the
            message names the file and the key.
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
    """Load settings as `load` does, and return the source of each that is not a default.

    Args:
        kind: class of the settings, with a field for each table.
        path: a TOML file; None for none.
        environ: environment variables; those with the prefix TIERKV_ win over the file.
        options: table, key and value of command-line options, which win over the environment.
        other_kind: settings class of another program that reads the same file; see `load`.

    Returns:
        The settings, and for each "table.key" its source: a file, a variable, or "option".

    Raises:
        ConfigError: a file cannot be read, or a setting is unknown or wrong.
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
    """Convert a table to settings.

    Args:
        kind: a dataclass or struct of settings.
        given: values by name of the setting.
        where: the table's place, for messages.
        converts_text: True to convert text to numbers, as environment variables need it.

    Returns:
        The settings.

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
    """Return the values of nested tables by their full names.

    Args:
        table: nested tables.
        at: prefix of all names, such as "table.".

    Returns:
        The values by "table.key".
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{at}{key}.") if isinstance(value, Mapping) else {f"{at}{key}": value}
    return found


def all_above_zero(table: str, settings: object, *names: str) -> None:
    """Check that settings are finite numbers above 0; TOML also has nan and inf.

    Args:
        table: name of the settings' table, for the error.
        settings: object with the settings as attributes.
        *names: names of the settings to check.

    Raises:
        ConfigError: a setting is not such a number.
    """
    _check_all(table, settings, names, "a number above 0", lambda number: number > 0)


def none_negative(table: str, settings: object, *names: str) -> None:
    """Check that settings are finite numbers of 0 or more.

    Args:
        table: name of the settings' table, for the error.
        settings: object with the settings as attributes.
        *names: names of the settings to check.

    Raises:
        ConfigError: a setting is not such a number.
    """
    _check_all(table, settings, names, "a number not below 0", lambda number: number >= 0)


def all_at_least_one(table: str, settings: object, *names: str) -> None:
    """Check that settings are finite numbers of 1 or more.

    Args:
        table: name of the settings' table, for the error.
        settings: object with the settings as attributes.
        *names: names of the settings to check.

    Raises:
        ConfigError: a setting is not such a number.
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
    """Return the settings of a class by name, each with its type.

    Fields of type `Fixed`, which no file or variable can set, are left out.
    """
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: hint
        for name, hint in hints.items()
        if get_origin(hint) is not Annotated or _FIXED not in hint.__metadata__
    }


def names_in(kind: object, at: str = "") -> list[str]:
    """Return the names of all settings of a class, nested ones included.

    Args:
        kind: class of the settings.
        at: prefix of all names, such as "table.".

    Returns:
        The names as "table.key".
    """
    names = []
    for name, inner in settings_in(kind).items():
        names.append(f"{at}{name}")
        if _is_table(inner):
            names += names_in(inner, f"{at}{name}.")
    return names


def suggestion(unknown: str, known: Sequence[str]) -> str:
    """Suggest a name for an unknown setting.

    Args:
        unknown: the unknown name. A known setting with the same key in another table is preferred.
        known: names of all settings, as "table.key".

    Returns:
        The end of a sentence with the most similar name; "" if none is similar.
    """
    key = unknown.rpartition(".")[2]
    elsewhere = [name for name in known if name.rpartition(".")[2] == key]
    close = elsewhere or difflib.get_close_matches(unknown, known, n=1, cutoff=_CLOSE)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _use_new_names(
    kind: object, table: dict[str, Any], where: str, at: str = ""
) -> list[tuple[str, str]]:
    """Replace old names of settings in `table`, and return each replaced name with its new one."""
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
    def check(kind: object, table: Mapping[str, Any], at: str) -> None:
        hints = settings_in(kind)
        for key, value in table.items():
            if key not in hints:
                meant = suggestion(f"{at}{key}", names_in(root))
                known = meant or f"; this table has {', '.join(sorted(hints))}"
                raise ConfigError(f"{where}: there is no setting {at}{key}{known}")
            if isinstance(value, dict) and _is_table(hints[key]):
                check(hints[key], value, f"{at}{key}.")

    check(root, table, "")
