"""What reads bytes that others wrote. Each target takes any bytes, and raises only at a bug: the
errors that a reader promises are what it expects.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import xxhash

from tierkv.api import types
from tierkv.api.settings import NodeSettings
from tierkv.api.types import PromptBody, job_of
from tierkv.cache.keys import Prompt
from tierkv.client.errors import read_problem
from tierkv.errors import BadRequestError, ConfigError, StoreCorruptError, TierKVError
from tierkv.gateway.failures import InvalidRequestError
from tierkv.gateway.openai import CompletionBody
from tierkv.gateway.prompts import packed_bytes
from tierkv.http.bodies import JSON, MSGPACK, decode
from tierkv.http.callers import AuthFile
from tierkv.pd.tickets import Acknowledgement, OpenTicket, Ticket
from tierkv.ranks import link
from tierkv.storage.codec import (
    HEADER_BYTES,
    PlainCodec,
    SealedCodec,
    SignedCodec,
    SmallCodec,
    Trust,
    ValueIdentity,
    read_identity,
)
from tierkv.storage.redis.resp import NotRedisError, Replies, Reply, TooLong, ValueLanded
from tierkv.storage.redis.url import parse_redis_url

Target = Callable[[bytes], None]

BODIES: tuple[type[msgspec.Struct], ...] = (
    types.GenerateBody,
    types.PrefillBody,
    types.DecodeBody,
    types.LookupBody,
    types.PrefetchBody,
    types.PinBody,
    types.QuotaBody,
    types.ResizeBody,
)
_SPEC = NodeSettings().engine_spec()
_KEY = bytes(range(32))
_IDENTITY = ValueIdentity(bytes(16), bytes(32), 16)
_MOST_PROMPTS = 32
_MOST_LANDED = 1 << 16


def framed(magic: bytes, version: int, body: bytes) -> bytes:
    """`body` as `tierkv.storage.codec` seals it: what is behind the checksum is reached, too."""
    checksum = xxhash.xxh3_128(magic + version.to_bytes(2, "little") + body).digest()
    return struct.pack("<4sH16s", magic, version, checksum) + body


def _record(magic: bytes, read: Callable[[bytes], object], data: bytes) -> None:
    for value in (data, framed(magic, 1, data)):
        with suppress(StoreCorruptError):
            read(value)


def _ticket(data: bytes) -> None:
    for kind, magic in ((Ticket, b"TKVT"), (OpenTicket, b"TKVO")):
        for value in (data, framed(magic, 1, data)):
            with suppress(StoreCorruptError):
                ticket = kind.decode(value)
                assert len(ticket.keys()) == len(ticket.digests)
                assert kind.decode(ticket.encode()) == ticket


def _body(content_type: str, data: bytes) -> None:
    """The first byte says of which route it is the body."""
    kind = BODIES[data[0] % len(BODIES)] if data else BODIES[0]
    raw = data[1:]
    with suppress(BadRequestError):
        body = decode(raw, kind, content_type=content_type)
        if isinstance(body, PromptBody):
            packed = body.packed(_SPEC.tokenizer)
            if isinstance(body, types.GenerateBody | types.PrefillBody | types.DecodeBody):
                job_of(body, _SPEC, "id", Prompt(packed, 16))


def _pieces(data: bytes) -> Iterator[bytes]:
    """All but the first bytes, cut where those say."""
    cuts, rest = data[:4], data[4:]
    for cut in cuts:
        yield rest[:cut]
        rest = rest[cut:]
    yield rest


def _replies(wanted: Sequence[int | None], pieces: Iterator[bytes]) -> list[Reply | bytes] | None:
    """What is made of the bytes, values that landed included; None if they are no replies."""
    replies, buffers = Replies(), [bytearray(size or 0) for size in wanted]
    for size, buffer in zip(wanted, buffers, strict=True):
        replies.expect(*(() if size is None else [(memoryview(buffer),)]))
    found: list[Reply | bytes] = []
    try:
        for piece in pieces:
            left = memoryview(piece)
            while left:
                taken = 0
                for view in replies.targets(_MOST_LANDED):
                    part = left[taken : taken + len(view)]
                    view[: len(part)] = part
                    taken += len(part)
                left = left[taken:]
                found += replies.received(taken)
    except NotRedisError:
        return None
    return [
        *found,
        *(bytes(buffers[i]) for i, reply in enumerate(found) if isinstance(reply, ValueLanded)),
    ]


def _resp(data: bytes) -> None:
    """However a stream of replies is cut, it means the same."""
    wanted = [None if byte > 100 else byte for byte in data[:6]]
    whole = _replies(wanted, iter([data[10:]]))
    assert _replies(wanted, _pieces(data[6:])) == whole
    assert not any(reply.num_bytes < 0 for reply in whole or () if isinstance(reply, TooLong))


def _value(data: bytes) -> None:
    """A value that others wrote is either the right one, or damaged."""
    for codec in (PlainCodec(), SignedCodec(_KEY), SealedCodec(_KEY)):
        size = codec.header_bytes
        with suppress(StoreCorruptError):
            codec.decode(data[:size], memoryview(bytearray(data[size:])), _IDENTITY)
    with suppress(StoreCorruptError):
        read_identity(data[:HEADER_BYTES])


def _small(data: bytes) -> None:
    for trust in (Trust.SIGNED, Trust.SEALED):
        codec = SmallCodec(trust, _KEY)
        with suppress(StoreCorruptError):
            codec.unseal_small("name", data)
        assert codec.unseal_small("name", codec.seal_small("name", data)) == data


def _completion(data: bytes) -> None:
    with suppress(BadRequestError, InvalidRequestError):
        body = decode(data, CompletionBody, content_type=JSON)
        body.stops()
        for prompt in body.prompts(max_prompts=_MOST_PROMPTS, max_tokens=1000):
            assert packed_bytes(prompt) > 0


def _url(data: bytes) -> None:
    with suppress(ConfigError):
        parse_redis_url(data.decode("latin-1"))


def _problem(data: bytes) -> None:
    read_problem("application/problem+json", data)


def _auth_file(data: bytes) -> None:
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError, TierKVError):
        msgspec.json.decode(data, type=AuthFile)


TARGETS: dict[str, Target] = {
    "ticket": _ticket,
    "acknowledgement": partial(_record, b"TKVA", Acknowledgement.decode),
    "worker_record": partial(_record, link.MAGIC, link.read),
    "json_body": partial(_body, JSON),
    "msgpack_body": partial(_body, MSGPACK),
    "resp": _resp,
    "value": _value,
    "small_value": _small,
    "completion": _completion,
    "redis_url": _url,
    "problem": _problem,
    "auth_file": _auth_file,
}
