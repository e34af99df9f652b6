"""The file that says who may call: digests of tokens, names in certificates, users of the machine.

It is JSON, holds no secret, and is replaced as a whole, so a reader sees the old or the new one.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal
from uuid import uuid4

import msgspec

from tierkv.api.access import Access, Principal
from tierkv.errors import ConfigError

_MAX_FILE_BYTES = 16 << 20
_PRINTABLE = re.compile(r"[!-~]{0,256}")  # a tenant's and a caller's name go to logs and metrics

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
TokenId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class RoleName(Enum):
    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    @property
    def access(self) -> Access:
        return Access[self.name]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One caller. name: in logs. tenant: whose blocks it works with; "" is the node's own."""

    name: str
    role: RoleName
    tenant: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "tenant"):
            if _PRINTABLE.fullmatch(getattr(self, field)) is None:
                raise ConfigError(f"a {field} must have at most 256 visible ASCII characters")
        if not self.name:
            raise ConfigError("a caller needs a name")

    def principal(self) -> Principal:
        return Principal(self.name, self.tenant, self.role.access)


class TokenRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """id: the public part of the token. sha256: of the whole token, in hexadecimal digits."""

    id: TokenId
    sha256: Digest
    created: Moment
    expires: Moment | None = None


class CertificateRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """subject: `DNS:name`, `URI:spiffe://...`, `email:...` or `CN:name`, as in the certificate."""

    subject: Annotated[str, msgspec.Meta(pattern="^(DNS|URI|email|CN):.+$")]


class UserRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """uid: of a process that calls over the Unix socket."""

    uid: Annotated[int, msgspec.Meta(ge=0)]


class AuthFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises ConfigError if two rows claim the same credential."""

    version: Literal[1] = 1
    tokens: tuple[TokenRow, ...] = ()
    certificates: tuple[CertificateRow, ...] = ()
    users: tuple[UserRow, ...] = ()

    def __post_init__(self) -> None:
        _distinct("token id", [row.id for row in self.tokens])
        _distinct("certificate subject", [row.subject for row in self.certificates])
        _distinct("uid", [str(row.uid) for row in self.users])


def _distinct(what: str, keys: list[str]) -> None:
    twice = (
        sorted({key for key in keys if keys.count(key) > 1}) if len(set(keys)) < len(keys) else ()
    )
    if twice:
        raise ConfigError(f"there are two rows of {what} {twice[0]}")


def read(path: Path) -> AuthFile:
    """Raises ConfigError, naming the file, if it cannot be read, can be written by others than its
    owner, or is not what it should be."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(
            f"the auth file {path} does not exist: `tierkv token new` makes one"
        ) from error
    except OSError as error:
        raise ConfigError(f"the auth file {path} cannot be read: {error.strerror}") from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"others than its owner can write the auth file {path}: chmod 600 it")
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"the auth file {path} is larger than {_MAX_FILE_BYTES >> 20} MiB")
    try:
        return msgspec.json.decode(raw, type=AuthFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError) as error:
        raise ConfigError(f"the auth file {path} is wrong: {error}") from error


def write(path: Path, content: AuthFile) -> None:
    """Put `content` in place of the file, at once and readable by its owner only.

    Raises ConfigError if that is not possible; the old file is then unchanged.
    """
    scratch = path.with_name(f".{path.name}.{uuid4().hex}")
    body = msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
    try:
        try:
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        finally:
            with suppress(FileNotFoundError):
                scratch.unlink()
    except OSError as error:
        raise ConfigError(f"the auth file {path} cannot be written: {error.strerror}") from error


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Alone with the file: another `tierkv token` waits until the body has ended."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"the folder {path.parent} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
