"""Which Redis server a URL names, and what it is called in logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from tierkv.errors import ConfigError

REDIS_SCHEMES = ("redis", "rediss", "unix")
ACCEPTED = (
    "redis://[user:password@]host[:port][/db], the same with rediss:// for TLS, "
    "or unix://[user:password@]/path/to/socket[?db=n], special characters percent-encoded"
)
_DEFAULT_PORT = 6379


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """Where a server listens. socket_path: of a Unix socket, or None for host and port."""

    host: str
    port: int
    socket_path: str | None
    is_tls: bool
    db: int
    username: str | None
    password: str | None = field(repr=False)

    def __str__(self) -> str:
        """The URL without user and password."""
        if self.socket_path is not None:
            return f"unix://{self.socket_path}" + (f"?db={self.db}" if self.db else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.is_tls else 'redis'}://{host}:{self.port}/{self.db}"


def parse_redis_url(url: str) -> RedisUrl:
    """Raises ConfigError, which never quotes the URL: it may hold a password."""
    try:
        parts = urlsplit(url)
        port = _DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        # The cause is not chained: it quotes what it took for the port.
        raise ConfigError(
            f"the storage URL's host or port is malformed; accepted: {ACCEPTED}"
        ) from None
    if parts.scheme not in REDIS_SCHEMES:
        raise ConfigError(f"the storage URL is not one of a Redis server; accepted: {ACCEPTED}")
    is_unix = parts.scheme == "unix"
    if parts.fragment or (parts.query and not is_unix):
        raise ConfigError(f"the storage URL has parts that mean nothing; accepted: {ACCEPTED}")
    if is_unix and (parts.hostname or not parts.path):
        raise ConfigError(f"the storage URL names no socket's path; accepted: {ACCEPTED}")
    if not is_unix and not (parts.hostname and port):
        raise ConfigError(f"the storage URL names no host or port 0; accepted: {ACCEPTED}")
    return RedisUrl(
        host=parts.hostname or "",
        port=port,
        socket_path=unquote(parts.path) if is_unix else None,
        is_tls=parts.scheme == "rediss",
        db=_db(parts, is_unix=is_unix),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
    )


def _db(parts: SplitResult, *, is_unix: bool) -> int:
    text = parts.query.removeprefix("db=") if is_unix else parts.path.strip("/")
    if not text:
        return 0
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"the storage URL's database is not a number; accepted: {ACCEPTED}")
    return int(text)
