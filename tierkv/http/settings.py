"""Settings that nodes and gateways share: address, limits, TLS, and callers."""

from __future__ import annotations

import msgspec

from tierkv.config import Fixed, all_above_zero, all_at_least_one, none_negative
from tierkv.errors import ConfigError

_MAX_PORT = 65_535


class ListenSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address to listen on, and limits of requests and connections.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 chooses a free one.
        allow_insecure_bind: True to permit an address that other machines can reach even if clients
            are not authenticated. Set it only in a private network.
        drain_grace_s: seconds for which running requests may continue after SIGTERM.
        max_body_bytes: largest size of a request body in bytes, after decompression; a larger one
            is rejected.
        max_prompt_tokens: largest number of tokens of one prompt; a longer one is rejected.
        max_work_bytes: largest total size of the bodies of all running requests, in bytes; a
            request that would exceed it is rejected with status 503.
        max_connections: largest number of connections; further ones are closed at once.
        idle_timeout_s: seconds after which a connection without a request is closed. The default is
            above the 60 s of common load balancers, so that the balancer closes an idle connection
            first.
        head_timeout_s: seconds in which the headers of a request must arrive, and in which a TLS
            handshake must end.
        body_timeout_s: seconds in which a request's body must arrive.
        send_timeout_s: seconds after which a client that reads nothing of its answer is
            disconnected.
    """

    host: str = "127.0.0.1"
    port: int
    drain_grace_s: float
    allow_insecure_bind: bool = False
    max_body_bytes: int = 16 << 20
    max_prompt_tokens: int = 1 << 20
    max_work_bytes: int = 256 << 20
    max_connections: int = 16_384
    idle_timeout_s: float = 75.0
    head_timeout_s: Fixed[float] = 10.0
    body_timeout_s: Fixed[float] = 30.0
    send_timeout_s: Fixed[float] = 60.0

    def check(self, table: str) -> None:
        """Check that all values are in range.

        Args:
            table: Name of the section in the config file, for errors.

        Raises:
            ConfigError: A value is out of range; the error names the setting.
        """
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(f"{table}.port must be in 0..{_MAX_PORT}, not {self.port}")
        if not self.host:
            raise ConfigError(f"{table}.host is empty: set it to an address, such as 127.0.0.1")
        none_negative(table, self, "drain_grace_s")
        all_at_least_one(table, self, "max_body_bytes", "max_prompt_tokens")
        all_at_least_one(table, self, "max_work_bytes", "max_connections")
        all_above_zero(table, self, "idle_timeout_s", "head_timeout_s")
        all_above_zero(table, self, "body_timeout_s", "send_timeout_s")


class AuthSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Authentication of callers.

    Attributes:
        file: path of the auth file, as `tierkv token` writes it; "" to authenticate no caller.
        reload_s: seconds between two checks for a change of the file.
    """

    file: str = ""
    reload_s: Fixed[float] = 1.0

    def __post_init__(self) -> None:
        all_above_zero("auth", self, "reload_s")


class TlsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paths of PEM files. The Unix socket never uses TLS.

    Attributes:
        cert: file of the node's own certificate, with its chain; "" to serve without TLS.
        key: file of the certificate's key, if the key is not in `cert`.
        client_ca: file of the authorities that sign client certificates; every client must then
            have such a certificate. "" to accept clients without a certificate.
        reload_s: seconds between two checks for a change of the files.
    """

    cert: str = ""
    key: str = ""
    client_ca: str = ""
    reload_s: Fixed[float] = 1.0

    def __post_init__(self) -> None:
        all_above_zero("tls", self, "reload_s")
        if (self.key or self.client_ca) and not self.cert:
            raise ConfigError("tls.key and tls.client_ca need tls.cert: set it, or remove them")
