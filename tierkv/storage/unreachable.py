"""Why a server cannot be reached, and what to do about it, in one sentence."""

from __future__ import annotations

import errno
import os
import socket
import ssl

_NOBODY_THERE = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)


def why_unreachable(error: BaseException) -> str:
    """What follows "URL cannot be reached ". error: of the system, or raised for one."""
    while not isinstance(error, OSError) and (cause := error.__cause__ or error.__context__):
        error = cause
    why, what_to_do = str(error), ""
    match error:
        case ssl.SSLCertVerificationError():
            why = f"its certificate is refused: {error.verify_message}"
            what_to_do = (
                "name who signed it with storage.redis.tls.ca or --tls-ca, and use the host that "
                "it was made for"
            )
        case ssl.SSLError():
            why = "TLS: " + (error.reason or why).replace("_", " ").lower()
            what_to_do = (
                "if it wants a certificate of ours, name one with storage.redis.tls.certificate "
                "or --tls-certificate; if it speaks no TLS on this port, use redis://"
            )
        case socket.gaierror():
            why, what_to_do = error.strerror or why, "correct the host's name"
        case FileNotFoundError():
            why, what_to_do = "there is no such socket", "start the server, or correct the path"
        case PermissionError():
            why, what_to_do = "permission denied", f"let user {os.geteuid()} connect to it"
        case OSError() if error.errno in _NOBODY_THERE:
            why, what_to_do = os.strerror(error.errno), "start the server, or correct the address"
        case OSError() if error.errno:
            why = os.strerror(error.errno)
    return f"({why}): {what_to_do}" if what_to_do else f"({why})"
