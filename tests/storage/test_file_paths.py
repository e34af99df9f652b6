"""Names and paths of values: each has exactly one counterpart, and no path leaves the directory."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tierkv.storage.file_room import name_of, relative_path
from tierkv.storage.protocol import is_name

fields = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)
names = st.lists(fields, min_size=1, max_size=8).map(":".join).filter(is_name)
parts = st.lists(st.text("ab7,+.-\0/é", max_size=5), max_size=6).map(tuple)


@settings(max_examples=40)
@given(names)
@example("a" * 64 + (":" + "b" * 46) * 3 + ":b")
@example("7:e:0")
def test_a_path_leads_back_to_its_name_and_stays_inside(name: str) -> None:
    path = relative_path(name)
    assert name_of(path) == name
    for part in path:
        assert part[0] not in ".-"
        assert "/" not in part
        assert len(part.encode()) <= 255


@settings(max_examples=40)
@given(names, names)
def test_no_path_is_a_directory_of_another(first: str, second: str) -> None:
    one, other = relative_path(first), relative_path(second)
    assert first == second or one != other[: len(one)]


@given(parts)
@example(())
@example(("..", "7", "e", "passwd"))
@example(("a,b", "0", "0", "c"))
def test_a_path_that_no_name_leads_to_has_no_name(path: tuple[str, ...]) -> None:
    name = name_of(path)
    assert name is None or relative_path(name) == path
