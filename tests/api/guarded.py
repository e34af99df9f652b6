"""A node that asks who calls, its auth file, and certificates made for one test."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import aiohttp
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec.structs import replace

from tests.api.nodes import Client, settings
from tierkv.api.node import Node
from tierkv.api.server import listening
from tierkv.api.settings import NodeSection
from tierkv.clock import SystemClock
from tierkv.gpu.cpu import CpuDevice
from tierkv.http.callers import (
    AuthFile,
    CertificateRow,
    RoleName,
    Token,
    TokenRow,
    digest_of,
    new_token,
    write,
)
from tierkv.http.server import bind, unix_listener
from tierkv.http.settings import AuthSection, TlsSection
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import Store

RELOAD_S = 0.02


@dataclass
class Callers:
    """Writes an auth file. Each change is written at once."""

    path: Path
    content: AuthFile = field(default_factory=AuthFile)

    async def token(
        self, role: RoleName, tenant: str = "", *, expires_in: timedelta | None = None
    ) -> Token:
        text, token_id = new_token()
        now = datetime.now(UTC)
        row = TokenRow(
            id=token_id,
            name=f"{role.value}@{tenant or 'node'}",
            role=role,
            tenant=tenant,
            sha256=digest_of(text.encode()),
            created=now,
            expires=now + expires_in if expires_in is not None else None,
        )
        await self.save(replace(self.content, tokens=(*self.content.tokens, row)))
        return text

    async def certificate(self, subject: str, role: RoleName) -> None:
        row = CertificateRow(subject=subject, name=subject, role=role)
        await self.save(replace(self.content, certificates=(*self.content.certificates, row)))

    async def save(self, content: AuthFile) -> None:
        self.content = content
        await asyncio.to_thread(write, self.path, content)


def bearer(token: str) -> dict[str, str]:
    """The header of a caller, or none without a token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def callers_in(folder: Path) -> Callers:
    """Of a file that knows nobody yet."""
    callers = Callers(folder / "auth.json")
    write(callers.path, callers.content)
    return callers


@dataclass
class Guarded:
    node: Node
    url: str
    client: Client  # without a token


@asynccontextmanager
async def guarded(
    callers: Callers | None,
    *,
    tls: TlsSection | None = None,
    unix_socket: Path | None = None,
    section: NodeSection | None = None,
    store: Store | None = None,
) -> AsyncIterator[Guarded]:
    """A running node on a port of its own, and on a Unix socket if one is named.

    store: one that outlives the node, or that it shares; by default one of its own.
    """
    chosen = replace(
        settings(),
        auth=AuthSection(file=str(callers.path) if callers else "", reload_s=RELOAD_S),
        tls=tls or TlsSection(),
    )
    policy = FetchPolicy.WAIT_COMPLETE  # however fast this machine is
    chosen = replace(chosen, cache=replace(chosen.cache, fetch_policy=policy))
    if section is not None:
        chosen = replace(chosen, node=section)
    node = Node(
        chosen,
        device=CpuDevice(),
        store=store or MemoryStore(MemorySettings(), SystemClock()),
    )
    async with AsyncExitStack() as stack:
        listeners = [stack.enter_context(bind(chosen.node))]
        if unix_socket is not None:
            opening = unix_listener(unix_socket)
            listeners.append(await asyncio.to_thread(opening.__enter__))
            stack.push_async_callback(asyncio.to_thread, opening.__exit__, None, None, None)
        async with (
            listening(node, *listeners) as url,
            node.running(),
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=200)) as session,
        ):
            yield Guarded(node, url, Client(url, session))


# Certificates


@dataclass
class Authority:
    """Signs certificates for 127.0.0.1, as files in `folder`."""

    folder: Path
    name: str = "tierkv test"

    def __post_init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])
        kinds = ["content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
        others = dict.fromkeys([*kinds, "encipher_only", "decipher_only"], False)
        usage = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **others)
        certificate = (
            _builder(self._subject, self._subject, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = self.folder / f"{self.name.replace(' ', '-')}-ca.pem"
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, common_name: str, *names: x509.GeneralName) -> Path:
        """A file with a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        alternatives = names or (x509.IPAddress(ip_address("127.0.0.1")),)
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(subject, self._subject, key.public_key())
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        path = self.folder / f"{common_name}-{certificate.serial_number:x}.pem"
        path.write_bytes(
            certificate.public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return path

    def trusted_by(self, certificate: Path | None = None) -> ssl.SSLContext:
        """What a client uses that trusts this authority, and brings `certificate`."""
        context = ssl.create_default_context(cafile=self.path)
        if certificate is not None:
            context.load_cert_chain(certificate)
        return context


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )
