"""Turns a credential into a principal: tokens by digest, certificates by name, users by uid."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NewType

from tierkv.api.access import Principal, UnauthenticatedError
from tierkv.api.auth_file import AuthFile, TokenRow

Token = NewType("Token", str)

_PREFIX = "tkv"
_ID_BYTES = 8
_SECRET_BYTES = 32
_MAX_TOKEN_BYTES = 512
_UNKNOWN = "the token is not known here, or has expired"


def new_token() -> tuple[Token, str]:
    """A token and its id: `tkv_{id}_{secret}`. The id is public, the secret has 256 random bits."""
    token_id = secrets.token_hex(_ID_BYTES)
    return Token(f"{_PREFIX}_{token_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"), token_id


def digest_of(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes
    principal: Principal
    expires_at: float | None


# Compared with where no token of that id is known, so that this takes as long as a wrong secret.
_NO_KEY = bytes(64)


class Keyring:
    """What one auth file says, ready to be asked. It never changes: a new file is a new keyring."""

    def __init__(self, content: AuthFile) -> None:
        self._tokens = {row.id.encode(): _key(row) for row in content.tokens}
        self._certificates = {row.subject: row.principal() for row in content.certificates}
        self._users = {row.uid: row.principal() for row in content.users}

    def by_token(self, token: bytes, *, now: float) -> Principal:
        """now: Unix seconds. Raises UnauthenticatedError; why is not said, which helps nobody
        who has a good token."""
        _, _, rest = token.partition(b"_")
        key = self._tokens.get(rest[: 2 * _ID_BYTES])
        expected = key.digest if key else _NO_KEY
        is_right = hmac.compare_digest(digest_of(token[:_MAX_TOKEN_BYTES]).encode(), expected)
        if key is None or not is_right or len(token) > _MAX_TOKEN_BYTES:
            raise UnauthenticatedError(_UNKNOWN, was_given=True)
        if key.expires_at is not None and key.expires_at <= now:
            raise UnauthenticatedError(_UNKNOWN, was_given=True)
        return key.principal

    def by_certificate(self, names: Iterable[str]) -> Principal | None:
        """Of the first name that is known, such as `DNS:prefill-1`."""
        return next((found for name in names if (found := self._certificates.get(name))), None)

    def by_uid(self, uid: int) -> Principal | None:
        return self._users.get(uid)


def _key(row: TokenRow) -> _Key:
    expires_at = row.expires.timestamp() if row.expires else None
    return _Key(row.sha256.encode(), row.principal(), expires_at)
