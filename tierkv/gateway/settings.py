"""All settings of a gateway, one section per table of the config file."""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec

from tierkv.client.http import client_tls, node_url
from tierkv.config import Fixed, all_above_zero, all_at_least_one, none_negative
from tierkv.errors import ConfigError
from tierkv.http.settings import AuthSection, ListenSection, TlsSection


class GatewaySection(ListenSection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateway's address and the nodes behind it.

    Attributes:
        prefill: URLs of the nodes that compute prompts: a list, or one text with spaces or commas
            between the URLs.
        decode: URLs of the nodes that generate answers to prompts which prefill nodes have
            computed, in the form of prefill.
        both: URLs of the nodes that do both, in the form of prefill.
        model: name of the one model that GET /v1/models lists; "" for the name that the nodes
            report.
        node_token: bearer token for the nodes; set it in the environment.
        node_ca: file of the authority (PEM) that signed the certificates of https nodes; "" trusts
            the system's authorities.
        node_cert: file of the gateway's own certificate (PEM), for nodes that require client
            certificates; read once, at the start.
        node_key: file of the certificate's key (PEM), if the key is not in the file of the
            certificate.
        forward_authorization: send each caller's Authorization header to the nodes, which then
            authenticate the caller and choose its tenant; node_token is then only for probes.
        allow_insecure_bind: listen on addresses that other machines can reach although callers are
            not authenticated. It is not needed with an auth file, or with forward_authorization to
            nodes that authenticate.
    """

    port: int = 8000
    drain_grace_s: float = 30.0
    prefill: str | tuple[str, ...] = ()
    decode: str | tuple[str, ...] = ()
    both: str | tuple[str, ...] = ()
    model: str = ""
    node_token: str = ""
    node_ca: str = ""
    node_cert: str = ""
    node_key: str = ""
    forward_authorization: bool = False

    def __post_init__(self) -> None:
        self.check("gateway")
        if self.node_key and not self.node_cert:
            raise ConfigError(
                "gateway.node_key needs gateway.node_cert: set it, or remove gateway.node_key"
            )


class LimitsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the prompts that the gateway accepts.

    Attributes:
        max_running: largest number of prompts that run at the nodes at the same time.
        max_queued: largest number of prompts that wait in the gateway; further ones are rejected
            with 429.
        queue_timeout_s: seconds after which a waiting prompt is rejected with 503.
        max_batch: largest number of answers of one request.
        max_attempts: largest number of attempts to answer a prompt, over all nodes.
    """

    max_running: int = 64
    max_queued: int = 256
    queue_timeout_s: float = 15.0
    max_batch: int = 32
    max_attempts: Fixed[int] = 8

    def __post_init__(self) -> None:
        all_at_least_one("limits", self, "max_running", "max_batch", "max_attempts")
        none_negative("limits", self, "max_queued")
        all_above_zero("limits", self, "queue_timeout_s")


class DeadlineSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadlines, in seconds.

    Attributes:
        request_s: time for a prompt, from its first attempt to its last token.
        connect_s: time to connect to a node.
        first_token_s: time until a node sends the first event of its answer to a prefill, decode or
            generate call.
        stall_s: time between two tokens of a stream.
        lookup_s: time in which nodes must report the number of a prompt's tokens that they have
            cached. If a node does not, the gateway estimates the number from earlier prompts.
    """

    request_s: float = 600.0
    connect_s: Fixed[float] = 2.0
    first_token_s: float = 120.0
    stall_s: float = 20.0
    lookup_s: float = 0.1

    def __post_init__(self) -> None:
        all_above_zero("deadlines", self, *self.__struct_fields__)


class HealthSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules by which a failed node receives no requests for a while.

    Attributes:
        probe_interval_s: seconds between two probes of a node's /readyz.
        probe_timeout_s: seconds in which a node must answer a probe.
        eject_s: seconds for which a node receives no requests after a failure. Each further failure
            doubles the time. A probe that finds the node ready ends the time at once.
        max_eject_s: largest value of the doubled time, in seconds.
        gone_after_probes: number of unanswered probes in a row after which other nodes continue the
            unfinished answers of the node.
    """

    probe_interval_s: float = 1.0
    probe_timeout_s: Fixed[float] = 2.0
    eject_s: Fixed[float] = 1.0
    max_eject_s: Fixed[float] = 30.0
    gone_after_probes: Fixed[int] = 3

    def __post_init__(self) -> None:
        all_above_zero("health", self, *self.__struct_fields__)


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The config file of `tierkv gateway`: each field is a table in it."""

    gateway: GatewaySection = GatewaySection()
    auth: AuthSection = AuthSection()
    tls: TlsSection = TlsSection()
    limits: LimitsSection = LimitsSection()
    deadlines: DeadlineSection = DeadlineSection()
    health: HealthSection = HealthSection()


def urls_of(given: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the URLs in `given`, each without a slash at its end.

    Args:
        given: A list of URLs, or one text with spaces or commas between them.

    Raises:
        ConfigError: One of the URLs cannot be the URL of a node.
    """
    several = given.replace(",", " ").split() if isinstance(given, str) else given
    return tuple(node_url(url) for url in several)


def node_tls(section: GatewaySection) -> ssl.SSLContext | None:
    """Return the TLS context for https to the nodes; None to use the system's default authorities.

    Raises:
        ConfigError: A file that `section` names cannot be used.
    """
    ca, cert, key = (
        Path(name) if name else None
        for name in (section.node_ca, section.node_cert, section.node_key)
    )
    return client_tls(ca=ca, cert=cert, key=key) if ca or cert else None
