"""The files that a connection over TLS needs."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from tierkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files. ca: who may sign the server's certificate (None: the system's list).

    certificate, key: ours, where the server wants to see one.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def context(self) -> ssl.SSLContext:
        """Reads the files, blocking. Raises ConfigError if that cannot be done."""
        if self.key is not None and self.certificate is None:
            raise ConfigError(f"the TLS key {self.key} is of use with its certificate only")
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
    """ssl.SSLError is an OSError, with a reason in capitals in the place of a number."""
    why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return (
        f"the TLS {what} {path} cannot be used ({str(why or error).replace('_', ' ').lower()}): "
        "it must be a readable PEM file, a certificate with its key"
    )
