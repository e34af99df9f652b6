"""All settings of a gateway, one section for each part that has some."""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec

from tierkv.client.http import client_tls, node_url
from tierkv.config import Fixed, all_above_zero, all_at_least_one, none_negative
from tierkv.errors import ConfigError
from tierkv.http.settings import AuthSection, ListenSection, TlsSection


class GatewaySection(ListenSection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the gateway listens and which nodes are behind it.

    prefill, decode, both: URLs of the nodes, a list or one text with spaces or commas between.
    model: what the one model is called at /v1/models.
    node_token: a bearer token for the nodes; belongs into the environment.
    node_ca: who signed the nodes' certificates (PEM), for https; "" trusts whom the system does.
    node_cert, node_key: the gateway's own, for nodes that ask for one. Read once, at the start.
    forward_authorization: hand the caller's own Authorization header on to the nodes, so that
        these decide who it is and which tenant it works in; node_token is then for probes only.
    allow_insecure_bind: not needed with an auth file, or with forward_authorization, where nodes
        ask.
    """

    port: int = 8000
    drain_grace_s: float = 30.0
    prefill: str | tuple[str, ...] = ()
    decode: str | tuple[str, ...] = ()
    both: str | tuple[str, ...] = ()
    model: str = "tierkv-ref-tiny"
    node_token: str = ""
    node_ca: str = ""
    node_cert: str = ""
    node_key: str = ""
    forward_authorization: bool = False

    def __post_init__(self) -> None:
        self.check("gateway")
        if self.node_key and not self.node_cert:
            raise ConfigError("gateway.node_key is of no use without gateway.node_cert")


class LimitsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the gateway takes at once.

    max_running: prompts at the nodes; max_queued: more that wait here, above which callers get
        429; queue_timeout_s: after waiting for so long they get 503.
    max_batch: prompts of one call. max_attempts: how often a prompt is tried, at any nodes.
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
    """How long things may take, in seconds.

    request_s: a prompt from its first attempt to its last token. connect_s: to reach a node.
    first_token_s: until a node says anything to a prefill, claim or generate.
    stall_s: between two tokens of a stream. lookup_s: the question who holds a prefix; who has
        not answered by then is judged by what the gateway remembers.
    """

    request_s: float = 600.0
    connect_s: Fixed[float] = 2.0
    first_token_s: float = 120.0
    stall_s: float = 20.0
    lookup_s: float = 0.1

    def __post_init__(self) -> None:
        all_above_zero("deadlines", self, *self.__struct_fields__)


class HealthSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a node gets no work, in seconds.

    probe_interval_s, probe_timeout_s: of asking /readyz. eject_s: after a failure a node gets no
        work for so long, doubled with each further one, up to eject_most_s; a good probe ends it.
    gone_after_probes: after so many probes in a row without an answer, streams of the node that
        bring nothing are cut off, and go on elsewhere.
    """

    probe_interval_s: float = 1.0
    probe_timeout_s: Fixed[float] = 2.0
    eject_s: Fixed[float] = 1.0
    eject_most_s: Fixed[float] = 30.0
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
    """The URLs, without a slash at their ends. Raises ConfigError if one is none."""
    several = given.replace(",", " ").split() if isinstance(given, str) else given
    return tuple(node_url(url) for url in several)


def node_tls(section: GatewaySection) -> ssl.SSLContext | None:
    """For https to the nodes; None where the system's authorities will do. Reads files.

    Raises ConfigError if one cannot be used.
    """
    ca, cert, key = (
        Path(name) if name else None
        for name in (section.node_ca, section.node_cert, section.node_key)
    )
    return client_tls(ca=ca, cert=cert, key=key) if ca or cert else None
