"""Which node of a Redis cluster has a name: the slot table, and what redirections say."""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.errors import StoreUnavailableError
from tierkv.storage.redis_socket import Address, is_port, port_of
from tierkv.storage.resp import Refused

NUM_SLOTS = 16_384
_REDIRECTION_WORDS = 3
# What a node says that is to name hosts (cluster-preferred-endpoint-type) and was told none.
_UNNAMED = "?"


def slot_of(name: str) -> int:
    """Names have no braces, so there is no hash tag to look for. 0.23 µs; a loop in Python: 37."""
    return binascii.crc_hqx(name.encode(), 0) % NUM_SLOTS


@dataclass(frozen=True, slots=True)
class Redirection:
    """slot has moved to `address`, or (is_ask) is on its way there: ask there this once."""

    slot: int
    address: Address
    is_ask: bool


def redirection(refusal: Refused, answered_by: Address) -> Redirection | None:
    """What "MOVED 3999 127.0.0.1:6381" says; None if it is another refusal, or names no host: the
    table has one. Of a slot on its way no table tells; that is asked for at the same host."""
    words = refusal.message.split()
    if len(words) != _REDIRECTION_WORDS or words[0] not in {"MOVED", "ASK"}:
        return None
    host, _, port_text = words[2].rpartition(":")
    slot, port = _slot(words[1]), port_of(port_text)
    is_ask = words[0] == "ASK"
    if slot is None or port is None or (host == _UNNAMED and not is_ask):
        return None
    host = "" if host == _UNNAMED else host
    return Redirection(slot, Address(host or answered_by.host, port), is_ask=is_ask)


def _slot(text: str) -> int | None:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(NUM_SLOTS))
    return int(text) if is_number and int(text) < NUM_SLOTS else None


def parse_slots(reply: object, answered_by: Address) -> list[Address | None]:
    """The master of each slot, from the reply to CLUSTER SLOTS. Raises StoreUnavailableError."""
    table: list[Address | None] = [None] * NUM_SLOTS
    if not isinstance(reply, list):
        raise StoreUnavailableError(f"the node at {answered_by} is not part of a cluster")
    for entry in reply:
        match entry:
            case [int(first), int(last), [host, int(port), *more], *_] if is_port(port):
                address = Address(_host(host, more) or answered_by.host, port)
                if not 0 <= first <= last < NUM_SLOTS:
                    raise StoreUnavailableError(f"the node at {answered_by} has slots beyond all")
                table[first : last + 1] = [address] * (last - first + 1)
            case _:
                raise StoreUnavailableError(f"the node at {answered_by} answers {entry!r:.80}")
    if not any(table):
        # It was taken out of its cluster, or no cluster was made: others may know better.
        raise StoreUnavailableError(f"the node at {answered_by} knows of nobody who has slots")
    return table


def _host(told: object, more: Sequence[object]) -> str:
    """more: the node's id, and since Redis 7 its other addresses, such as [b"ip", b"10.0.0.7"]."""
    name = told.decode("utf-8", "replace") if isinstance(told, bytes) else ""
    match more:
        case [_, [*_, b"ip", bytes(ip)], *_] if name == _UNNAMED:
            return ip.decode("utf-8", "replace")
    return "" if name == _UNNAMED else name


def masters(table: Sequence[Address | None]) -> list[Address]:
    """Each address in the table once, in a fixed order."""
    found = {address for address in table if address is not None}
    return sorted(found, key=lambda address: (address.host, address.port))
