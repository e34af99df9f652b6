"""Parsing of Redis URLs, and the settings of a Redis store."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import SplitResult, unquote

from tierkv.config import Fixed, all_above_zero
from tierkv.errors import ConfigError
from tierkv.storage.redis.wire import Address, port_of

ACCEPTED = (
    "redis://[user:password@]host[:port][/db], the same with rediss:// for TLS, "
    "unix://[user:password@]/path/to/socket[?db=n], "
    "redis+sentinel://[user:password@]host:port,host:port/service[/db] or "
    "redis+cluster://[user:password@]host:port,host:port (rediss+... for TLS), "
    "special characters percent-encoded"
)
_DEFAULT_PORT = 6379
_SENTINEL_PORT = 26379
_DB_CHARS = 9


class Setup(Enum):
    """The kind of Redis installation that a URL names: one server, Sentinels, or a cluster."""

    SERVER = "server"
    SENTINEL = "sentinel"  # the URL names Sentinels, which know the address of the master
    CLUSTER = "cluster"  # the URL names some of the nodes


# From RFC 3986, appendix B: with several hosts the standard library rejects [::1] as malformed.
_URL = re.compile(
    r"([^:/?#]+):(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?",
    re.DOTALL,
)

_SCHEMES = {
    "redis": (Setup.SERVER, False),
    "rediss": (Setup.SERVER, True),
    "unix": (Setup.SERVER, False),
    "redis+sentinel": (Setup.SENTINEL, False),
    "rediss+sentinel": (Setup.SENTINEL, True),
    "redis+cluster": (Setup.CLUSTER, False),
    "rediss+cluster": (Setup.CLUSTER, True),
}
REDIS_SCHEMES = tuple(_SCHEMES)


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A parsed URL of a Redis store.

    Attributes:
        setup: one server, Sentinels, or a cluster.
        addresses: the server, the Sentinels, or some nodes of the cluster.
        is_tls: True if connections use TLS.
        db: number of the database.
        service: the Sentinels' name for the master; "" without Sentinels.
        username: None for the default user.
        password: None for no password.
    """

    setup: Setup
    addresses: tuple[Address, ...]
    is_tls: bool
    db: int
    service: str = ""
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Return the URL without user and password."""
        path = self.addresses[0].socket_path
        if path is not None:
            return f"unix://{path}" + (f"?db={self.db}" if self.db else "")
        scheme = "rediss" if self.is_tls else "redis"
        hosts = ",".join(str(address) for address in self.addresses)
        match self.setup:
            case Setup.SENTINEL:
                return f"{scheme}+sentinel://{hosts}/{self.service}/{self.db}"
            case Setup.CLUSTER:
                return f"{scheme}+cluster://{hosts}"
            case Setup.SERVER:
                return f"{scheme}://{hosts}/{self.db}"


def parse_redis_url(url: str) -> RedisUrl:
    """Parse a URL of a Redis store.

    Raises:
        ConfigError: the URL is not accepted. The message never quotes the URL, which may contain a
            password.
    """
    found = _URL.fullmatch(url.strip())
    if found is None or found[1] not in _SCHEMES:
        raise _wrong("scheme is not a Redis scheme")
    parts = SplitResult(*found.groups(""))
    setup, is_tls = _SCHEMES[parts.scheme]
    is_unix = parts.scheme == "unix"
    if parts.fragment or (parts.query and not is_unix):
        raise _wrong("part after ? or # has no meaning")
    login, _, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    service, db = "", _db(parts, setup)
    if is_unix:
        if hosts or not parts.path:
            raise _wrong("path of a socket is missing")
        addresses: tuple[Address, ...] = (Address(socket_path=unquote(parts.path)),)
    else:
        default_port = _SENTINEL_PORT if setup is Setup.SENTINEL else _DEFAULT_PORT
        addresses = tuple(_address(host, default_port) for host in hosts.split(","))
    if setup is Setup.SENTINEL:
        service = unquote(parts.path.strip("/").partition("/")[0])
        if not service:
            raise _wrong("service is missing (the name in the sentinels' `sentinel monitor` line)")
    if setup is Setup.SERVER and len(addresses) > 1:
        raise _wrong("scheme is for one server, but the URL has several hosts")
    return RedisUrl(
        setup=setup,
        addresses=addresses,
        is_tls=is_tls,
        db=db,
        service=service,
        username=unquote(username) or None,
        password=unquote(password) or None,
    )


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"the storage URL's {what}; accepted: {ACCEPTED}")


def _address(text: str, default_port: int) -> Address:
    host, port_text = text, ""
    if text.startswith("["):
        host, bracket, port_text = text[1:].partition("]")
        if not (bracket and ":" in host) or (port_text and not port_text.startswith(":")):
            raise _wrong("host or port is malformed")
        port_text = port_text[1:]
    elif ":" in text:
        host, _, port_text = text.partition(":")
    port = port_of(port_text) if port_text else default_port
    if not host or port is None:
        raise _wrong("host or port is malformed")
    return Address(host.lower(), port)


def _db(parts: SplitResult, setup: Setup) -> int:
    text = ""
    match setup:
        case Setup.CLUSTER:
            if parts.path.strip("/"):
                raise _wrong("database cannot be set, since a cluster has only database 0")
        case Setup.SENTINEL:
            text = parts.path.strip("/").partition("/")[2]
        case Setup.SERVER if parts.scheme == "unix":
            key, _, text = parts.query.partition("=")
            if parts.query and key != "db":
                raise _wrong("part after ? has no meaning")
        case Setup.SERVER:
            text = parts.path.strip("/")
    if not text:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) <= _DB_CHARS):
        raise _wrong("database is not a number")
    return int(text)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files for TLS.

    Attributes:
        ca: the authorities that may sign the server's certificate; None for the system's list.
        certificate, key: the client certificate and its key, for servers that require one.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files and return the TLS settings for connections. Blocks the thread.

        Raises:
            ConfigError: a file cannot be used.
        """
        if self.key is not None and self.certificate is None:
            raise ConfigError(
                f"the TLS key {self.key} needs its certificate: set storage.redis.tls.certificate"
            )
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise ConfigError(_cannot_use("authorities", self.ca, error)) from error
        if self.certificate is not None:
            files = self.certificate + (f" with {self.key}" if self.key else "")
            try:
                context.load_cert_chain(self.certificate, self.key)
            except OSError as error:
                raise ConfigError(_cannot_use("certificate", files, error)) from error
        return context


def _cannot_use(what: str, path: str | None, error: OSError) -> str:
    why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return (
        f"the TLS {what} {path} cannot be used ({str(why or error).replace('_', ' ').lower()}): "
        "it must be a readable PEM file, a certificate with its key"
    )


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """The settings of a Redis store.

    Attributes:
        num_connections: number of connections to each server that read values. One more connection
            asks whether values exist, so that these questions do not wait behind reads.
        write_connections: number of connections to each server that write values.
        timeout_s: seconds that a request may take, plus the time that its bytes take at
            `slowest_bytes_per_s`.
        connect_timeout_s: seconds that connecting may take.
        slowest_bytes_per_s: lowest accepted transfer rate, in bytes per second.
        tls: files for rediss://, for a private authority or a client certificate.
        sentinel_username, sentinel_password: the login at the Sentinels, if they require one.
    """

    num_connections: int = 2
    write_connections: Fixed[int] = 2
    timeout_s: float = 2.5
    connect_timeout_s: Fixed[float] = 2.5
    slowest_bytes_per_s: Fixed[float] = 200e6
    tls: TlsFiles = field(default_factory=TlsFiles)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_connections", "write_connections"):
            count: int = getattr(self, name)
            if not 1 <= count <= 256:  # noqa: PLR2004
                raise ConfigError(f"storage.redis.{name} must be 1 to 256, not {count}")
        all_above_zero("", self, "timeout_s", "connect_timeout_s", "slowest_bytes_per_s")

    def deadline_s(self, num_bytes: int) -> float:
        """Return the time limit in seconds of a request and its reply.

        Args:
            num_bytes: number of bytes that are transferred.
        """
        return self.timeout_s + num_bytes / self.slowest_bytes_per_s
