"""Whatever makes bytes unusable elsewhere changes the root of all keys, and can be named."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts import LAYOUTS
from tierkv.cache.keys import Fingerprint, differences
from tierkv.cache.layout import layered
from tierkv.errors import ConfigError

OURS = Fingerprint("llama", LAYOUTS["gqa"])
OTHERS: dict[str, object] = {
    "model": "llama2", "revision": "main", "weight_dtype": "bfloat16", "layout": LAYOUTS["mla"],
    "adapter": "lora@1", "tenant": "acme", "key_format": OURS.key_format + 1,
    "engine": "vllm 0.32", "attention_backend": "FLASH_ATTN", "cache_dtype": "fp8",
    "kv_layout": "NHD", "groups": "full, window", "group": "1",
}  # fmt: skip


def test_every_field_of_a_fingerprint_is_tried_here() -> None:
    assert set(OTHERS) == {field.name for field in dataclasses.fields(Fingerprint)}


@pytest.mark.parametrize("field", OTHERS)
def test_every_field_changes_the_root_and_is_named_as_the_difference(field: str) -> None:
    theirs = dataclasses.replace(OURS, **{field: OTHERS[field]})  # type: ignore[arg-type]
    assert theirs.root() != OURS.root()
    assert theirs.short != OURS.short
    [difference] = differences(OURS.readable(), theirs.readable())
    assert difference.startswith(f"{field} (here ")


def test_the_block_size_is_named_too() -> None:
    ours, theirs = (
        Fingerprint("llama", layered(size, [("latent", "bfloat16", 36)], num_layers=2)).readable()
        for size in (4, 8)
    )
    assert [text.split()[0] for text in differences(ours, theirs)] == ["block_size", "layout"]


def test_a_field_that_only_one_side_knows_is_a_difference() -> None:
    theirs = OURS.readable() | {"rope": "yarn"}
    assert differences(OURS.readable(), theirs) == ("rope (here 'absent', there 'yarn')",)


@given(st.text(st.characters(codec="utf-8")))
def test_the_tenant_salt_can_never_be_read(text: str) -> None:
    salt = f"a secret {text}"
    readable = dataclasses.replace(OURS, tenant=salt).readable()
    assert not any("a secret" in value for value in readable.values())
    assert readable["tenant"] != OURS.readable()["tenant"]


texts = st.text(st.characters(codec="utf-8"), max_size=5)


@given(st.tuples(texts, texts, texts), st.tuples(texts, texts, texts))
def test_neighbouring_fields_cannot_run_into_each_other(
    left: tuple[str, str, str], right: tuple[str, str, str]
) -> None:
    one, other = (
        dataclasses.replace(OURS, revision=revision, adapter=adapter, tenant=tenant)
        for revision, adapter, tenant in (left, right)
    )
    assert (one.root() == other.root()) == (left == right)


def test_a_model_must_be_named() -> None:
    with pytest.raises(ConfigError, match="model"):
        Fingerprint("", LAYOUTS["gqa"])


def test_what_an_engine_does_not_say_leaves_the_names_of_others_as_they_were() -> None:
    named = {"engine", "attention_backend", "cache_dtype", "kv_layout", "groups", "group"}
    assert not named & OURS.readable().keys()  # test_keys.py pins the root
