"""The TLS side of a listener: its certificate, and which clients' certificates it asks for."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tierkv.api.settings import TlsSection
from tierkv.api.watch import watching
from tierkv.errors import ConfigError

log = logging.getLogger("tierkv.tls")


@asynccontextmanager
async def server_tls(settings: TlsSection) -> AsyncIterator[ssl.SSLContext | None]:
    """A context for a server, None without a certificate. While the body runs, new files are read
    and used for new connections; wrong ones are logged, and the old ones stay.

    Raises ConfigError if a file cannot be used at the start.
    """
    if not settings.cert:
        yield None
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if settings.client_ca:
        context.verify_mode = ssl.CERT_REQUIRED

    async def reload() -> None:
        await asyncio.to_thread(_load, context, settings)
        log.info("the certificate of %s is in use", settings.cert)

    files = [Path(name) for name in (settings.cert, settings.key, settings.client_ca) if name]
    async with watching(files, reload, every_s=settings.reload_s):
        yield context


def _load(context: ssl.SSLContext, settings: TlsSection) -> None:
    # First into a context of its own: a key that does not fit would break the live one.
    for target in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
        try:
            # An encrypted key is refused; without a password, OpenSSL would ask on the terminal.
            target.load_cert_chain(settings.cert, settings.key or None, password="")
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise ConfigError(
                f"the certificate {settings.cert} or its key cannot be used: {error}"
            ) from error
        if settings.client_ca:
            try:
                target.load_verify_locations(settings.client_ca)
            except OSError as error:
                raise ConfigError(
                    f"tls.client_ca {settings.client_ca} cannot be used: {error}"
                ) from error
