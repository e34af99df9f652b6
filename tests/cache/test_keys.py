"""Keys are equal exactly when bytes may be shared, on every machine, in every process."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.stored import stored_keys
from tierkv.cache.keys import (
    Fingerprint,
    KeyRun,
    MediaItem,
    Names,
    Prompt,
    StoredKey,
    chain,
    extra_keys,
    pack,
    prompt_extra,
)
from tierkv.cache.layout import attention_layout
from tierkv.errors import BadRequestError
from tierkv.storage.protocol import check_name

SIZE = 4
ROOT = bytes(range(32))
CAT, DOG = b"c" * 32, b"d" * 32
tokens = st.lists(st.integers(0, 5), max_size=20)


def golden() -> tuple[Fingerprint, Prompt]:
    layout = attention_layout(
        num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16", item_bytes=2, block_size=SIZE
    )
    fingerprint = Fingerprint(
        "llama-3-8b",
        layout,
        revision="main",
        weight_dtype="bfloat16",
        adapter="lora@2",
        tenant="acme",
    )
    return fingerprint, Prompt.of(range(100, 110), SIZE, [MediaItem(3, 3, b"\x07" * 32)])


# If one of these changes, every stored block in the world is lost: KEY_FORMAT has to change, too.
GOLDEN_LAYOUT = "4e94ad8f905c914b34930b805464a835741f05ca442459f247323801039f12af"
GOLDEN_ROOT = "a2ec8c757509933888e1c1b9fb0c664dd396b98297a12f5aecd42c58d2120aef"
GOLDEN_KEYS = [
    ("ab116a24f2d20b4547be346063288ed3cdfb50e2cc318d64156467f3db21a5ab", 4, False),
    ("bf1491760bedf19a4595f0bfcfacacf36441d9a43c229d1e5a2b2b6bf0c45961", 4, False),
    ("90298e6abf5a5900426923d448c326ebaa28e93056e60ee852d65d7fca56438f", 2, True),
]


@pytest.mark.promise("Keys are the same in every process, on every machine and in every release.")
def test_golden_vectors_stay() -> None:  # fault 10
    fingerprint, prompt = golden()
    assert fingerprint.layout.digest.hex() == GOLDEN_LAYOUT
    assert fingerprint.root().hex() == GOLDEN_ROOT
    keys = stored_keys(fingerprint.root(), prompt)
    assert [(key.digest.hex(), key.num_tokens, key.is_tail) for key in keys] == GOLDEN_KEYS


@pytest.mark.promise("Keys follow the documented format.")
def test_golden_vectors_follow_from_the_written_format() -> None:
    """The same numbers, built here by hand from what the docstrings promise."""

    def number(value: int, width: int) -> bytes:
        return value.to_bytes(width, "little", signed=True)

    def message(first: int, stop: int) -> bytes:
        return b"".join(number(token, 4) for token in range(first, stop))

    def picture(offset: int) -> bytes:
        return number(32, 4) + b"\x07" * 32 + number(offset, 8) + number(3, 8)

    parent = bytes.fromhex(GOLDEN_ROOT)
    first = hashlib.sha256(parent + message(100, 104) + picture(3)).digest()
    second = hashlib.sha256(first + message(104, 108) + picture(-1)).digest()
    tag = b"tierkv tail v1".ljust(32, b"\0")
    tail = hashlib.sha256(tag + second + number(2, 4) + message(108, 110)).digest()
    assert [digest.hex() for digest in (first, second, tail)] == [key[0] for key in GOLDEN_KEYS]


@given(tokens, tokens)
def test_two_prompts_share_exactly_the_keys_of_their_common_blocks(
    left: list[int], right: list[int]
) -> None:
    ours, theirs = (stored_keys(ROOT, Prompt.of(ids, SIZE)) for ids in (left, right))
    for at in range(max(len(ours), len(theirs))):
        stop = (at + 1) * SIZE
        is_same = left[:stop] == right[:stop] and at < min(len(ours), len(theirs))
        pair = [keys[at] if at < len(keys) else None for keys in (ours, theirs)]
        assert (pair[0] == pair[1]) == is_same
    digests = {key.digest for key in ours}
    assert len(digests) == len(ours)


# Media


def digests(prompt: Prompt) -> list[bytes]:
    return [key.digest for key in stored_keys(ROOT, prompt)]


def prompt_with(*media: MediaItem) -> Prompt:
    return Prompt.of([7] * 12, SIZE, media)


def keys_with(*media: MediaItem) -> list[bytes]:
    return digests(prompt_with(*media))


@pytest.mark.promise("Media change exactly the keys of the blocks they overlap.")
@pytest.mark.parametrize("start", range(12))
def test_media_change_exactly_the_blocks_they_overlap(start: int) -> None:
    plain = keys_with()
    for stop in range(start + 1, 13):
        first, last = start // SIZE, (stop - 1) // SIZE
        prompt = prompt_with(MediaItem(start, stop - start, CAT))
        assert [bool(prompt.extra(at)) for at in range(3)] == [first <= n <= last for n in range(3)]
        ours = digests(prompt)
        assert ours[:first] == plain[:first]
        assert all(a != b for a, b in zip(ours[first:], plain[first:], strict=True))


def test_several_images_in_a_block_count_in_order_however_they_are_listed() -> None:
    cat, dog = MediaItem(0, 1, CAT), MediaItem(2, 1, DOG)
    assert keys_with(cat, dog) == keys_with(dog, cat)
    swapped = keys_with(MediaItem(0, 1, DOG), MediaItem(2, 1, CAT))
    assert swapped[0] != keys_with(cat, dog)[0]
    assert keys_with(cat)[0] != keys_with(cat, dog)[0]


def test_media_change_the_tails_key_and_survive_generated_tokens() -> None:
    prompt = Prompt.of([7] * 6, SIZE, [MediaItem(4, 2, CAT)])
    assert stored_keys(ROOT, prompt)[1] != stored_keys(ROOT, Prompt.of([7] * 6, SIZE))[1]
    grown = Prompt(prompt.tokens + pack([7] * 6), prompt.block_size, prompt.extras)
    assert grown == prompt_with(MediaItem(4, 2, CAT))


@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 4), st.sampled_from([CAT, DOG]))),
    st.integers(0, 2),
)
def test_extra_keys_of_a_block_are_those_of_the_media_that_overlap_it(
    spans: list[tuple[int, int, bytes]], block: int
) -> None:
    media = [MediaItem(start, min(num, 12 - start), what) for start, num, what in spans]
    prompt = prompt_with(*media)
    inside = [
        item
        for item in media
        if set(range(item.start, item.start + item.num_tokens))
        & set(range(block * SIZE, block * SIZE + SIZE))
    ]
    assert prompt.extra(block) == extra_keys(inside, block * SIZE, block * SIZE + SIZE)
    assert bool(prompt.extra(block)) == bool(inside)


@pytest.mark.promise("Everything a prompt's KV depends on is in its keys.")
@given(st.binary(max_size=8), st.binary(max_size=8), st.integers(1, 12))
def test_what_a_prompt_s_kv_depends_on_beside_its_tokens_is_in_all_of_its_keys(
    left: bytes, right: bytes, length: int
) -> None:
    """A salt, or which adapter computed it; beside media, which are not confused with it."""
    image = [MediaItem(0, 1, left.ljust(16, b"\0"))]
    made = [
        digests(Prompt.of(range(length), SIZE, media, extra=extra))
        for media in ([], image)
        for extra in (b"", prompt_extra(salt=left), prompt_extra(adapter=left))
    ]
    made.append(digests(Prompt.of(range(length), SIZE, extra=prompt_extra(salt=left + b"x"))))
    assume(left)
    for keys in zip(*made, strict=True):
        assert len(set(keys)) == len(keys)
    both = prompt_extra(salt=left, adapter=right)
    assert both == prompt_extra(adapter=right, salt=left)
    assert both == prompt_extra(salt=left) or right


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 30), st.integers(1, 9))
def test_a_prompt_cut_into_other_blocks_shares_keys_exactly_where_it_did(
    length: int, size: int, start: int, width: int
) -> None:
    """Its media too: no block that one of two images overlaps has a key of the other's."""
    assume(start + width <= length)
    cat, dog, plain = (
        Prompt.of(range(length), SIZE, [MediaItem(start, width, what)] if what else [])
        for what in (CAT, DOG, b"")
    )
    ours, theirs, none = (digests(one.cut_into(size)) for one in (cat, dog, plain))
    assert digests(cat.cut_into(SIZE)) == digests(cat)
    assert none == digests(Prompt.of(range(length), size))
    shared = (start // SIZE * SIZE) // size  # blocks before all that the image's blocks overlap
    for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (one == other) == (at < shared)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MediaItem(-1, 2, CAT),
        lambda: MediaItem(0, 0, CAT),
        lambda: MediaItem(0, 1, b"short"),
        lambda: MediaItem(0, 1, b"x" * 65),
        lambda: Prompt.of([7] * 4, SIZE, [MediaItem(3, 2, CAT)]),
        lambda: Prompt.of([], SIZE, [MediaItem(0, 1, CAT)]),
    ],
)
def test_media_that_cannot_be_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(BadRequestError):
        make()


# Names


@given(st.binary(min_size=32, max_size=32), st.integers(1, 4096), st.booleans())
def test_stored_names_are_accepted_by_stores_and_tell_tails_apart(
    digest: bytes, num_tokens: int, is_tail: bool
) -> None:
    name = Names("tierkv", golden()[0].short).name(StoredKey(digest, num_tokens, is_tail=is_tail))
    assert check_name(name) == name
    assert digest.hex() in name
    assert name.endswith(f":partial:{num_tokens}") == is_tail
    assert ("partial" in name) == is_tail


@given(st.text(st.characters(codec="utf-8")))
def test_any_ticket_id_gives_an_acceptable_name_that_does_not_show_it(ticket_id: str) -> None:
    name = Names("tierkv", "00").ticket(ticket_id)
    assert check_name(name) == name
    assert name != Names("tierkv", "00").ticket(ticket_id + "x")


def test_blocks_of_two_fingerprints_or_shards_never_share_a_name() -> None:
    key = StoredKey(ROOT, 4, is_tail=False)
    names = {
        Names("tierkv", "00").name(key),
        Names("tierkv", "11").name(key),
        Names("tierkv", "00", "0of2").name(key),
        Names("other", "00").name(key),
    }
    assert len(names) == 4


def test_many_names_are_those_of_each_key_whatever_the_mix_of_spaces_and_tails() -> None:
    names = Names("tierkv", "00aa", "1of2")
    keys = [
        StoredKey(bytes([at]) * 32, 3 if at % 3 == 0 else SIZE, is_tail=at % 3 == 0, space=space)
        for at, space in enumerate(["", "", "11bb", "11bb", "", "22cc", "22cc"])
    ]
    assert names.all([]) == []
    for first in range(len(keys)):
        assert names.all(keys[first:]) == [names.name(key) for key in keys[first:]]


def test_a_run_of_keys_and_its_names_are_those_of_its_blocks_however_it_is_cut() -> None:
    names = Names("tierkv", "0123456789abcdef")
    for num_tokens in (0, 3, 8, 11):
        prompt = Prompt.of(range(num_tokens), 4, space="other")
        digests = chain(ROOT, prompt)
        keys = KeyRun.of(prompt, ROOT)
        assert len(keys) == -(-num_tokens // 4)
        assert [key.digest for key in keys][: len(digests)] == digests
        assert [names.name(key) for key in keys] == list(names.of_run(keys))
        for start, stop in ((0, 1), (1, 3), (2, 9)):
            part = keys[start:stop]
            assert list(part) == list(keys)[start:stop]
            assert list(names.of_run(part)) == list(names.of_run(keys)[start:stop])
            if part:
                assert part.parent_of(0) == (digests[start - 1] if start else ROOT)


@pytest.mark.promise("Logged prompt ids do not reveal the prompt.")
def test_what_is_logged_of_a_prompt_is_not_what_it_says() -> None:
    assert "1735549292" not in repr(Prompt(pack([1735549292] * 40), 16))
    assert "lrug" not in repr(Prompt(b"lrug" * 40, 16))


def test_keys_are_hashed_in_portions_until_all_are() -> None:
    keys = KeyRun.of(Prompt.of(range(4 * SIZE + 1), SIZE), ROOT)
    assert [keys.hash_more(2) for _ in range(3)] == [False, True, True]
    assert KeyRun.of(Prompt.of(range(3), SIZE), ROOT).hash_more(1), "a tail alone has no block"
