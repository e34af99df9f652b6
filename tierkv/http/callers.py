"""Authentication of callers, their access levels, and names that keep the ids of tenants apart.

The auth file (JSON) lists callers by the SHA-256 of a token or by a name in a client certificate;
it contains no secret.

Two tenants may use the same request id or ticket id. The node therefore uses names that combine the
id with the tenant.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import socket
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NewType
from uuid import uuid4

import msgspec
from aiohttp import hdrs, web

from tierkv.errors import BadRequestError, ConfigError, TierKVError
from tierkv.http.process import watching
from tierkv.pd.direct.address import credentials
from tierkv.threads import in_thread


class Access(IntEnum):
    """The access level that a route needs or a caller has. Each level includes the lower ones.

    PUBLIC: probes, without authentication. READ: lookups and statistics. WRITE: requests,
    publishes, claims and pins of the caller's own tenant. ADMIN: tiers, quotas, life cycle, and
    blocks of all tenants.
    """

    PUBLIC = 0  # probes: callers are not authenticated
    READ = 1  # read: lookup, stats, explain
    WRITE = 2  # do work in one's own tenant: requests, publish, claim, pins
    ADMIN = 3  # operate the node: tiers, quotas, blocks of all tenants, life cycle


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller.

    Attributes:
        name: Name of the caller in logs.
        tenant: Tenant of the blocks that the caller's requests use; "" is the node's own tenant. A
            request's body cannot change it, but some routes let an admin name another tenant.
        access: The caller's access level.
    """

    name: str
    tenant: str
    access: Access


# The caller of a node without authentication, which listens on loopback only or is set insecure.
ANYONE = Principal("anyone", "", Access.ADMIN)
# The caller of a public route, which is not authenticated.
NOBODY = Principal("nobody", "", Access.PUBLIC)


class UnauthenticatedError(TierKVError):
    """The caller is not authenticated: send a token or a certificate that the node knows.

    Attributes:
        was_given: True if the request had a token or certificate, but not a valid one.
    """

    def __init__(self, message: str, *, was_given: bool = False) -> None:
        super().__init__(message)
        self.was_given = was_given


class ForbiddenError(TierKVError):
    """The caller's access level does not allow the route: use a token with the needed role."""


_MAX_FILE_BYTES = 16 << 20
_PRINTABLE = re.compile(
    r"[!-~]{0,256}"
)  # for names of tenants and callers, which go to logs and metrics

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
    """One caller in the auth file.

    Attributes:
        name: Name of the caller in logs.
        role: Access level of the caller.
        tenant: Tenant of the blocks that the caller's requests use; "" is the node's own tenant.
    """

    name: str
    role: RoleName
    tenant: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "tenant"):
            if _PRINTABLE.fullmatch(getattr(self, field)) is None:
                raise ConfigError(f"a {field} must have at most 256 visible ASCII characters")
        if not self.name:
            raise ConfigError("a caller in the auth file needs a name")

    def principal(self) -> Principal:
        return Principal(self.name, self.tenant, self.role.access)


class TokenRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A caller in the auth file that authenticates with a token.

    Attributes:
        id: The public part of the token.
        sha256: SHA-256 of the whole token, in hexadecimal.
        created: Time at which the token was made.
        expires: Time after which the token is rejected; None for a token that does not expire.
    """

    id: TokenId
    sha256: Digest
    created: Moment
    expires: Moment | None = None


class CertificateRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A caller in the auth file that authenticates with a client certificate.

    Attributes:
        subject: A name in the certificate: `DNS:name`, `URI:spiffe://...`, `email:...` or
            `CN:name`.
    """

    subject: Annotated[str, msgspec.Meta(pattern="^(DNS|URI|email|CN):.+$")]


class AuthFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of an auth file.

    Attributes:
        version: Version of the format.
        tokens: Callers that authenticate with a token.
        certificates: Callers that authenticate with a client certificate.

    Raises:
        ConfigError: Two rows have the same token id or certificate subject.
    """

    version: Literal[1] = 1
    tokens: tuple[TokenRow, ...] = ()
    certificates: tuple[CertificateRow, ...] = ()

    def __post_init__(self) -> None:
        _distinct("token id", [row.id for row in self.tokens])
        _distinct("certificate subject", [row.subject for row in self.certificates])


def _distinct(what: str, keys: list[str]) -> None:
    twice = min((key for key, count in Counter(keys).items() if count > 1), default=None)
    if twice is not None:
        raise ConfigError(f"the auth file has two rows with the {what} {twice}: remove one")


def read(path: Path) -> AuthFile:
    """Return the content of the auth file at `path`.

    Raises:
        ConfigError: The file cannot be read, is not valid, or can be written by users other than
            its owner. The error names the file.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(
            f"the auth file {path} does not exist: make it with `tierkv token new`"
        ) from error
    except OSError as error:
        raise ConfigError(f"the auth file {path} cannot be read: {error.strerror}") from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"other users can write the auth file {path}: run chmod 600 on it")
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"the auth file {path} is larger than {_MAX_FILE_BYTES >> 20} MiB")
    try:
        return msgspec.json.decode(raw, type=AuthFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError) as error:
        raise ConfigError(f"the auth file {path} is wrong: {error}") from error


def write(path: Path, content: AuthFile) -> None:
    """Replace the auth file at `path` atomically; only its owner can read the new file.

    Args:
        path: The file to replace.
        content: The callers to write.

    Raises:
        ConfigError: The file cannot be written; the old file is unchanged.
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
    """Acquire the lock of an auth file, and release it at the end of the `with` block.

    A program that changes the file must hold the lock, so that only one program changes it at a
    time. The call waits while another program has the lock.

    Args:
        path: The auth file; the lock is on its folder.

    Raises:
        ConfigError: The folder cannot be opened.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"the folder {path.parent} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


Token = NewType("Token", str)

_PREFIX = "tkv"
_ID_BYTES = 8
_SECRET_BYTES = 32
_MAX_TOKEN_BYTES = 512


def new_token() -> tuple[Token, str]:
    """Return a new token, `tkv_{id}_{secret}`, and its id.

    The id is not secret. The secret has 256 random bits.
    """
    token_id = secrets.token_hex(_ID_BYTES)
    return Token(f"{_PREFIX}_{token_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"), token_id


def digest_of(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()


@dataclass(frozen=True, slots=True)
class _Key:
    """A token of the auth file, as its digest, and the caller that it authenticates.

    `expires_at` is in Unix seconds; infinite for a token that does not expire.
    """

    digest: bytes
    principal: Principal
    expires_at: float


# The digest for an unknown id, so that its comparison takes as long as that of a wrong secret.
_NO_KEY = bytes(64)


class Keyring:
    """The callers of one auth file, with lookup by token or by a name in a certificate."""

    def __init__(self, content: AuthFile) -> None:
        self._tokens = {row.id.encode(): _key(row) for row in content.tokens}
        self._certificates = {row.subject: row.principal() for row in content.certificates}

    def by_token(self, token: bytes, *, now: float) -> Principal:
        """Return the caller that owns `token`.

        Args:
            token: The token, as sent by the caller.
            now: The current time, in Unix seconds.

        Raises:
            UnauthenticatedError: The token is unknown or has expired. The error sentence is the
                same in both cases, so that an attacker learns nothing from it.
        """
        _, _, rest = token.partition(b"_")
        key = self._tokens.get(rest[: 2 * _ID_BYTES])
        expected = key.digest if key else _NO_KEY
        is_right = hmac.compare_digest(digest_of(token[:_MAX_TOKEN_BYTES]).encode(), expected)
        is_right = is_right and len(token) <= _MAX_TOKEN_BYTES
        if key is None or not is_right or key.expires_at <= now:
            raise UnauthenticatedError(
                "the token is unknown here or has expired: make one with `tierkv token new`",
                was_given=True,
            )
        return key.principal

    def by_certificate(self, names: Iterable[str]) -> Principal | None:
        """Return the caller that the auth file lists under one of `names`; None if there is none.

        Args:
            names: Names in a client certificate, such as `DNS:prefill-1`, the preferred name first.
        """
        return next((found for name in names if (found := self._certificates.get(name))), None)


def _key(row: TokenRow) -> _Key:
    expires_at = row.expires.timestamp() if row.expires else math.inf
    return _Key(row.sha256.encode(), row.principal(), expires_at)


_TICKET = re.compile("[0-9a-f]{32}:")
_REQUEST = re.compile("[0-9a-f]{16}/")
_IN_WORDS = re.compile(f"'(?:{_TICKET.pattern}|{_REQUEST.pattern})")


def request_name(space: str, request_id: str) -> str:
    """Return the scheduler's name for a request, made of the tenant's space and the caller's id.

    Args:
        space: Name of the tenant's space; "" for the node's own.
        request_id: The id that the caller gave.

    Raises:
        BadRequestError: The id looks like the name of another tenant's request.
    """
    if space:
        return f"{space}/{request_id}"
    if _REQUEST.match(request_id):
        raise BadRequestError("a request id must not begin with a tenant's prefix")
    return request_id


def ticket_name(ticket_id: str, tenant: str) -> str:
    """Return the name under which a ticket is stored, made of the tenant and the caller's id.

    Args:
        ticket_id: The id that the caller gave.
        tenant: The tenant; "" for the node's own.

    Raises:
        BadRequestError: The id looks like the name of another tenant's ticket.
    """
    if tenant:
        return f"{hashlib.sha256(tenant.encode()).hexdigest()[:32]}:{ticket_id}"
    if _TICKET.match(ticket_id):
        raise BadRequestError("a ticket id must not begin with a tenant's prefix")
    return ticket_id


def as_given(sentence: str) -> str:
    """Return an error message without internal prefixes of request ids and ticket ids.

    Users see each id in the form in which they gave it, and no name of a tenant's space.

    Args:
        sentence: the message.
    """
    return _IN_WORDS.sub("'", sentence)


log = logging.getLogger(__name__)

PRINCIPAL = web.RequestKey("principal", Principal)

_BEARER = re.compile(rb"bearer +([!-~]+) *", re.IGNORECASE)
_COMMON_NAME = "commonName"


class Guard:
    """The authenticator of callers. Enter `running()` first; before it, all callers are rejected.

    Args:
        file: The auth file; None to accept every caller as an admin, even without `running()`.
        reload_s: Seconds between two checks for a change of the file.
    """

    def __init__(self, file: Path | None, *, reload_s: float = 1.0) -> None:
        self._file = file
        self._reload_s = reload_s
        self._keyring: Keyring | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the auth file now, and after each change until the `async with` block ends.

        If a changed file is not valid, the error is logged, and the tokens and certificates of the
        earlier version stay valid.

        Raises:
            ConfigError: The file is not valid at the start.
        """
        if self._file is None:
            yield
            return
        file = self._file

        async def reload() -> None:
            self._keyring = Keyring(await in_thread(read, file))
            log.info("the auth file %s was read and is in force", file)

        async with watching([file], reload, every_s=self._reload_s):
            yield

    def principal_of(self, request: web.BaseRequest) -> Principal:
        """Return the caller of `request`.

        A request with a token comes from the token's owner. Without a token, the client certificate
        of the connection names the caller. On a Unix socket, a caller without a token is an admin
        if it runs as the node's user.

        Raises:
            UnauthenticatedError: The caller is unknown.
        """
        if self._file is None:
            return ANYONE
        keyring = self._keyring
        if keyring is None:
            raise UnauthenticatedError("this node has not read its auth file yet: try again later")
        given = request.headers.getall(hdrs.AUTHORIZATION, [])
        if given:
            return keyring.by_token(_token_of(given), now=time.time())
        return _by_connection(request, keyring)

    def principal_of_token(self, token: str) -> Principal:
        """Return the caller that owns `token`, for a token that was not sent in an HTTP request.

        Raises:
            UnauthenticatedError: The token is missing, unknown or expired.
        """
        if self._file is None:
            return ANYONE
        if self._keyring is None or not token:
            raise UnauthenticatedError(
                "this node needs a token: send the header Authorization: Bearer tkv_..."
            )
        return self._keyring.by_token(token.encode(), now=time.time())

    def authorize(self, request: web.BaseRequest, needed: Access) -> None:
        """Check the caller's access level, and set `request[PRINCIPAL]` to the caller.

        A public route accepts every caller without authentication.

        Args:
            request: The request.
            needed: The access level that the route needs.

        Raises:
            UnauthenticatedError: The caller is unknown.
            ForbiddenError: The caller's access level is lower than `needed`.
        """
        is_unasked = needed is Access.PUBLIC and self._file is not None
        caller = NOBODY if is_unasked else self.principal_of(request)
        if caller.access < needed:
            has = caller.access.name.lower()
            log.info("%s (%s) may not %s %s", caller.name, has, request.method, request.path[:200])
            raise ForbiddenError(
                f"{caller.name} may {has}, but this route needs the role {needed.name.lower()}"
            )
        request[PRINCIPAL] = caller


def _token_of(given: list[str]) -> bytes:
    if len(given) > 1:
        raise UnauthenticatedError(
            "the request has several Authorization headers: send one", was_given=True
        )
    found = _BEARER.fullmatch(given[0].encode("utf-8", "surrogateescape"))
    if found is None:
        raise UnauthenticatedError(
            "the Authorization header has no bearer token: send Authorization: Bearer tkv_...",
            was_given=True,
        )
    return found[1]


def _by_connection(request: web.BaseRequest, keyring: Keyring) -> Principal:
    transport = request.transport
    if transport is None:
        raise UnauthenticatedError("the caller disconnected")
    certificate: Mapping[str, Any] | None = transport.get_extra_info("peercert")
    if certificate:
        names = list(_names(certificate))
        if found := keyring.by_certificate(names):
            return found
        raise UnauthenticatedError(
            f"the client certificate of {', '.join(names)[:200]} is not in the auth file",
            was_given=True,
        )
    peer: socket.socket | None = transport.get_extra_info("socket")
    if peer is not None and peer.family == socket.AF_UNIX:
        return _by_user(peer)
    raise UnauthenticatedError(
        "this node needs a token: send the header Authorization: Bearer tkv_..."
    )


def _names(certificate: Mapping[str, Any]) -> Iterator[str]:
    for kind, name in certificate.get("subjectAltName", ()):
        yield f"{kind}:{name}"
    for parts in certificate.get("subject", ()):
        for key, value in parts:
            if key == _COMMON_NAME:
                yield f"CN:{value}"


def _by_user(peer: socket.socket) -> Principal:
    _, uid, _ = credentials(peer)
    if uid == os.geteuid():
        return Principal(f"uid:{uid}", "", Access.ADMIN)
    raise UnauthenticatedError(
        f"the user with uid {uid} is not the node's: send the header Authorization: Bearer tkv_..."
    )
