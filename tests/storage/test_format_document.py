"""A reader and a writer made from docs/storage-format.md alone exchange values with tierkv."""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import msgpack
import numpy as np
import pytest
import xxhash
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests.stored import stored_keys
from tierkv.cache.keys import Fingerprint, MediaItem, Names, Prompt, StoredKey
from tierkv.cache.layout import Layout, Plane
from tierkv.cache.shards import Shard, ShardScheme
from tierkv.clock import SystemClock
from tierkv.gpu.cpu import CpuHostSlots
from tierkv.storage.codec import PAYLOAD_CODECS, PayloadCodecs, TenantCodecs, Trust
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import GetStatus, PutItem
from tierkv.transfer.storage_io import Slice, Slices, StorageIO

KEY = bytes(range(7, 39))
HEADS, HEAD_BYTES, BLOCK = 4, 6, 4
# layer, role, dtype, bytes of a token in the whole block
PLANES = [
    (0, "key", "float16", HEADS * HEAD_BYTES),
    (0, "latent", "bfloat16", 10),
    (1, "key", "float16", HEADS * HEAD_BYTES),
    (1, "latent", "bfloat16", 10),
]
TOKENS = [5, 0, 2**31 - 1, 7, 1, 2, 3, 4, 9, 9, 9]  # two blocks and a tail of 3
FIELDS = {"adapter": "lora@3", "model": "org/mödel", "revision": "", "tenant": "salt"}
FIELDS |= {"key_format": "1", "block_size": str(BLOCK), "weight_dtype": "bfloat16"}
FLAGS = {Trust.TRUSTED: 0, Trust.SIGNED: 1, Trust.SEALED: 2}
MEDIA = MediaItem(1, 8, bytes(range(20)))


# From the document


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def text(value: str) -> bytes:
    return u64(len(value.encode())) + value.encode()


def layout_digest(rank: int, size: int) -> bytes:
    """Return the digest of the whole layout, or of a rank's slice if `size` is above 1."""
    planes = []
    for layer, role, dtype, token_bytes in PLANES:
        own = token_bytes if role == "latent" else len(heads_of(rank, size)) * HEAD_BYTES
        planes.append(u64(layer) + u64(own * BLOCK) + u64(own) + text(role) + text(dtype))
    digest = sha(b"tierkv layout v1", u64(BLOCK), *planes)
    return digest if size == 1 else sha(b"tierkv slice v1", digest, b"%dof%d" % (rank, size))


def heads_of(rank: int, size: int) -> list[int]:
    if size > HEADS:
        return [rank * HEADS // size]
    return list(range(rank * HEADS // size, (rank + 1) * HEADS // size))


def root() -> bytes:
    fields = FIELDS | {"layout": layout_digest(0, 1).hex()}
    pairs = [text(name) + text(fields[name]) for name in sorted(fields)]
    return sha(b"tierkv root v1".ljust(32, b"\0"), *pairs)


def digests(*, with_media: bool = False) -> list[bytes]:
    """Return the digests of the two blocks and the tail."""
    packed = struct.pack(f"<{len(TOKENS)}i", *TOKENS)
    extra = [b"", b"", b""]
    if with_media:
        content = MEDIA.content_hash
        extra = [
            struct.pack("<I", 20) + content + struct.pack("<qQ", 1 - at, 8) for at in (0, 4, 8)
        ]
    first = sha(root(), packed[:16], extra[0])
    second = sha(first, packed[16:32], extra[1])
    tag = b"tierkv tail v1".ljust(32, b"\0")
    return [first, second, sha(tag, second, struct.pack("<I", 3), packed[32:], extra[2])]


def value(trust: Trust, digest: bytes, layout: bytes, tokens: int, payload: bytes) -> bytes:
    fields = b"TKVB" + struct.pack("<HH", 1, FLAGS[trust]) + layout[:16] + digest
    fields += struct.pack("<IIQ", tokens, 0, len(payload))
    tenant = mac(KEY, b"tierkv tenant v1", root().hex()[:16].encode())
    if trust is Trust.SIGNED:
        key = mac(tenant, b"tierkv signed value v1")
        return fields + blake3(fields + payload, key=key).digest(16) + payload
    if trust is Trust.SEALED:
        nonce, key = os.urandom(12), mac(tenant, b"tierkv sealed value v1", digest)
        sealed = AESGCM(key).encrypt(nonce, payload, fields)
        return fields + nonce + bytes(4) + sealed[-16:] + sealed[:-16]
    checksum = xxhash.xxh3_128(fields + payload).intdigest().to_bytes(16, "big")
    return fields + checksum + payload


def opened(trust: Trust, digest: bytes, content: bytes) -> bytes:
    """Return the payload of a stored value, decrypted if it is sealed."""
    if trust is not Trust.SEALED:
        return content[88:]
    tenant = mac(KEY, b"tierkv tenant v1", root().hex()[:16].encode())
    key = mac(tenant, b"tierkv sealed value v1", digest)
    return AESGCM(key).decrypt(content[72:84], content[104:] + content[88:104], content[:72])


def payload(block: Mapping[int, np.ndarray], num_tokens: int, rank: int, size: int) -> bytes:
    """Return the bytes of a rank's share of a block.

    Args:
        block: for each plane an array [tokens, bytes of a token].
        num_tokens: number of tokens in the block.
        rank: tensor-parallel rank.
        size: number of ranks.
    """
    parts = []
    for at, (_, role, _, _) in enumerate(PLANES):
        for token in range(num_tokens):
            if role == "latent":
                parts.append(block[at][token].tobytes())
            else:
                by_head = block[at][token].reshape(HEADS, HEAD_BYTES)
                parts += [by_head[head].tobytes() for head in heads_of(rank, size)]
    return b"".join(parts)


def name(digest: bytes, rank: int, size: int, num_tokens: int) -> str:
    end = f":partial:{num_tokens}" if num_tokens < BLOCK else ""
    return f"tierkv:{root().hex()[:16]}:{digest.hex()}:{rank}of{size}{end}"


# A node


@dataclass
class Node:
    store: MemoryStore
    size: int
    trust: Trust
    payloads: PayloadCodecs = PAYLOAD_CODECS
    layout: Layout = field(init=False)
    fingerprint: Fingerprint = field(init=False)

    def __post_init__(self) -> None:
        planes = [Plane(n, role, kind, width * BLOCK, width) for n, role, kind, width in PLANES]
        self.layout = Layout(BLOCK, tuple(planes))
        self.fingerprint = Fingerprint(
            "org/mödel",
            self.layout,
            weight_dtype="bfloat16",
            adapter="lora@3",
            tenant="salt",
        )
        scheme = ShardScheme(self.layout, {"key": HEADS})
        self.parts = [
            Slice(shard, layout, CpuHostSlots(layout, 8))
            for shard in (Shard(rank, self.size) for rank in range(self.size))
            for layout in [scheme.layout(shard)]
        ]
        names = Names("tierkv", self.fingerprint.short)
        self.io = StorageIO(
            self.store,
            names,
            self.layout,
            self.parts[0].host,
            block_ttl_s=None,
            codecs=TenantCodecs(self.trust, KEY, self.payloads),
            slices=Slices(names, self.parts, scheme, [1, 2, 4, 8]),
        )

    def stored_keys(self) -> Sequence[StoredKey]:
        return stored_keys(self.fingerprint.root(), Prompt.of(TOKENS, BLOCK))

    async def check_fetch(self) -> None:
        """Fetch the two blocks and the tail, and check every byte of the slots."""
        outcomes = await self.io.fetch(self.stored_keys(), SLOTS)
        assert [outcome.status for outcome in outcomes] == [GetStatus.HIT] * 3
        for part in self.parts:
            for slot, (block, tokens) in enumerate(zip(blocks(), NUM_TOKENS, strict=True)):
                for plane in block.values():
                    plane[tokens:] = 0
                expected = payload(block, BLOCK, part.shard.rank, self.size)
                assert part.host.array[slot].tobytes() == expected

    def fill_slots(self) -> None:
        for part in self.parts:
            for slot, block in enumerate(blocks()):
                content = payload(block, BLOCK, part.shard.rank, self.size)
                part.host.array[slot] = np.frombuffer(content, np.uint8)


@asynccontextmanager
async def node(
    size: int, trust: Trust, payloads: PayloadCodecs = PAYLOAD_CODECS
) -> AsyncIterator[Node]:
    one = Node(MemoryStore(MemorySettings(), SystemClock()), size, trust, payloads)
    async with one.store.running(), one.io.running():
        yield one


def blocks() -> list[dict[int, np.ndarray]]:
    rng = np.random.default_rng(9)
    return [
        {
            at: rng.integers(0, 256, (BLOCK, width), np.uint8)
            for at, (*_, width) in enumerate(PLANES)
        }
        for _ in range(3)
    ]


NUM_TOKENS = (4, 4, 3)
SLOTS = np.arange(3, dtype=np.int32)


def test_digests_are_as_documented() -> None:
    one = Node(MemoryStore(MemorySettings(), SystemClock()), 1, Trust.TRUSTED)
    assert one.fingerprint.root() == root()
    assert [key.digest for key in one.stored_keys()] == digests()
    seen = Prompt.of(TOKENS, BLOCK, [MEDIA])
    keys = stored_keys(one.fingerprint.root(), seen)
    assert [key.digest for key in keys] == digests(with_media=True)


@pytest.mark.parametrize("trust", Trust)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
async def test_what_a_node_writes_is_as_documented(size: int, trust: Trust) -> None:
    async with node(size, trust) as one:
        one.fill_slots()
        await one.io.flush(one.stored_keys(), SLOTS)
        for digest, block, tokens in zip(digests(), blocks(), NUM_TOKENS, strict=True):
            for rank in range(size):
                content = await one.store.get(name(digest, rank, size, tokens), max_bytes=9999)
                assert content
                expected = payload(block, tokens, rank, size)
                assert opened(trust, digest, content) == expected
                if trust is not Trust.SEALED:
                    layout = layout_digest(rank, size)
                    assert content == value(trust, digest, layout, tokens, expected)
        parent = digests()[1]
        listed = await one.store.get(
            f"tierkv:{root().hex()[:16]}:{parent.hex()}:tails", max_bytes=9999
        )
        assert listed is not None
        tokens_of_tail = struct.pack("<3i", *TOKENS[8:])
        assert msgpack.unpackb(opened(trust, parent, listed)) == [[tokens_of_tail, b""]]


@pytest.mark.parametrize(
    ("writer", "reader", "trust"),
    [
        *((*sizes, Trust.TRUSTED) for sizes in product((1, 2, 4, 8), repeat=2)),
        *((2, 4, trust) for trust in (Trust.SIGNED, Trust.SEALED)),
    ],
)
async def test_what_is_written_as_documented_is_read_by_a_node(
    writer: int, reader: int, trust: Trust
) -> None:
    async with node(reader, trust) as one:
        for digest, block, tokens in zip(digests(), blocks(), NUM_TOKENS, strict=True):
            for rank in range(writer):
                content = payload(block, tokens, rank, writer)
                whole = value(trust, digest, layout_digest(rank, writer), tokens, content)
                await one.store.put([PutItem(name(digest, rank, writer, tokens), (whole,))])
        await one.check_fetch()


async def test_a_list_of_tails_written_as_documented_is_used() -> None:
    async with node(1, Trust.SEALED) as one:
        parent, tail = digests()[1:]
        tokens = struct.pack("<3i", *TOKENS[8:])
        body = msgpack.packb([[tokens, b""]])
        await one.store.put(
            [
                PutItem(
                    f"tierkv:{root().hex()[:16]}:{parent.hex()}:tails",
                    (value(Trust.SEALED, parent, bytes(16), 0, body),),
                )
            ]
        )
        found = await one.io.tails.best(parent, tokens[:8], b"", "")
        assert found is not None
        assert (found.key.digest, found.num_shared) == (tail, 2)


def test_the_documents_vectors_of_digests() -> None:
    document = (Path(__file__).parents[2] / "docs" / "storage-format.md").read_text()
    planes = tuple(Plane(0, role, "float16", 16, 4) for role in ("key", "value"))
    who = Fingerprint("m", Layout(4, planes))
    block, tail = stored_keys(who.root(), Prompt.of(range(1, 7), 4))
    for title, digest in (
        ("layout", who.layout.digest),
        ("root  ", who.root()),
        ("block ", block.digest),
        ("tail  ", tail.digest),
    ):
        assert f"\n{title} {digest.hex()}\n" in document
