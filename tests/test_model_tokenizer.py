"""Tokenizers of models in a directory and in a GGUF file."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers import models as library_models

from tests.models import BOS, EOS, add_tokenizer, close, vocabulary, write_json, write_tokenizer
from tierkv.cache.keys import pack, unpack
from tierkv.errors import BadRequestError, ConfigError
from tierkv.model_tokenizer import ModelTokenizer, read_tokenizer
from tierkv.tokenizers import AnswerDecoder, ByteTokenizer

KINDS = ("directory", "gguf")
BYTES = ByteTokenizer()
CHAT = [{"role": "system", "content": "hello"}, {"role": "user", "content": "€ {{ 1 }}"}]
CHAT_TEXT = f"{BOS}system\nhello{EOS}\n{BOS}user\n€ {{{{ 1 }}}}{EOS}\n{BOS}assistant\n"


@cache
def tokenizer(kind: str, *, template: str | None = "") -> ModelTokenizer:
    with TemporaryDirectory() as folder:
        return read_tokenizer(write(Path(folder), kind, template=template))


def write(folder: Path, kind: str, *, template: str | None = "") -> Path:
    options = {} if template == "" else {"template": template}
    if kind == "directory":
        write_tokenizer(folder / "model", **options)
        return folder / "model"
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, **options)
    close(writer)
    return path


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
@given(text=st.text(min_size=1))
def test_any_text_comes_back_whole_and_in_pieces(kind: str, text: str) -> None:
    model = BYTES if kind == "bytes" else tokenizer(kind)
    tokens = unpack(model.encode(text)).tolist()
    assert model.decode(tokens) == text
    assert model.fewest_tokens(text) <= len(tokens)
    assert AnswerDecoder(model, b"").text(tokens) == text


@given(tokens=st.lists(st.integers(0, len(vocabulary()) - 1), max_size=12))
def test_pieces_of_any_tokens_join_to_the_text_of_all_without_stop_tokens(
    tokens: list[int],
) -> None:
    model = tokenizer("gguf")
    assert AnswerDecoder(model, b"").text(tokens) == model.decode([t for t in tokens if t != 1])


@given(
    tokens=st.lists(st.integers(2, len(vocabulary()) - 1), max_size=12),
    stops=st.lists(st.sampled_from(["hello", "ell", "lo w", "€", "w"]), max_size=3),
    num_answered=st.integers(0, 4),
)
def test_an_answer_ends_before_its_first_stop_text_wherever_a_token_ends(
    tokens: list[int], stops: list[str], num_answered: int
) -> None:
    """An earlier part of the answer has no stop text; "hello" and "ell" lie within a token."""
    model = tokenizer("gguf")
    cut = min(num_answered, len(tokens))
    decoder = AnswerDecoder(model, pack(tokens[:cut]), num_answered=cut, stops=stops)
    plain = AnswerDecoder(model, pack(tokens[:cut]), num_answered=cut).text(tokens[cut:])
    ends = [plain.index(stop) + len(stop) for stop in stops if stop in plain]
    found = max((stop for stop in stops if plain[: min(ends, default=0)].endswith(stop)), key=len,
                default="")  # fmt: skip
    expected = plain[: min(ends) - len(found)] if ends else plain
    assert decoder.text(tokens[cut:]) == expected
    assert decoder.has_stopped == bool(ends)


def test_a_token_has_its_text_whether_it_is_special_begins_with_a_space_or_is_half_a_letter() -> (
    None
):
    model = tokenizer("gguf")
    names = [model.token_text(token) for token in range(len(vocabulary()))]
    assert names[:2] == [BOS, EOS]
    assert {" w", "hello", "\ufffd"} <= set(names)


@given(text=st.text())
def test_a_directory_and_a_gguf_file_give_the_same_tokens(text: str) -> None:
    assert tokenizer("directory").encode(text) == tokenizer("gguf").encode(text)


@pytest.mark.parametrize("kind", ["gguf", "bytes"])
def test_no_piece_has_half_a_character_and_the_rest_says_that_one_is_incomplete(kind: str) -> None:
    model = BYTES if kind == "bytes" else tokenizer(kind)
    *first, last = unpack(model.encode("€")).tolist()
    decoder = model.decoder(b"")
    assert "".join(map(decoder.feed, first)) == ""
    assert [decoder.feed(last), decoder.rest()] == ["€", ""]
    assert [decoder.feed(first[0]), decoder.rest(), decoder.rest()] == ["", "\ufffd", ""]


@given(st.lists(st.integers(0, 255)))
def test_pieces_of_any_bytes_join_to_the_text_of_all(tokens: list[int]) -> None:
    assert AnswerDecoder(BYTES, b"").text(tokens) == BYTES.decode(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_is_the_text_of_the_models_template_and_ends_where_the_answer_begins(
    kind: str,
) -> None:
    model = tokenizer(kind)
    assert model.encode_chat(CHAT) == model.encode(CHAT_TEXT)
    assert unpack(model.encode_chat(CHAT)).tolist().count(0) == 3, "special tokens are tokens"
    assert model.stop_tokens == {1}


@pytest.mark.parametrize(
    ("kind", "template", "words"),
    [
        *((kind, None, "no chat template") for kind in KINDS),
        ("gguf", "{{ raise_exception('no system role') }}", "no system role"),
        ("gguf", "{{ messages.__class__.__mro__ }}", "unsafe"),  # the process is out of its reach
    ],
)
def test_a_chat_is_refused_without_a_template_or_in_the_templates_own_words(
    kind: str, template: str | None, words: str
) -> None:
    with pytest.raises(BadRequestError, match=words):
        tokenizer(kind, template=template).encode_chat(CHAT)


def test_a_bos_token_is_added_to_completions_and_not_to_chats(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer)
    writer.add_add_bos_token(True)
    close(writer)
    model = read_tokenizer(path)
    assert unpack(model.encode("hello")).tolist()[0] == 0
    assert unpack(model.encode_chat(CHAT)).tolist().count(0) == 3


def test_words_of_a_sentencepiece_vocabulary_keep_the_space_before_them(tmp_path: Path) -> None:
    """The first token of a whole text has no space; the first token of an answer has one."""
    pieces = tokenizers.Tokenizer(
        library_models.BPE(
            vocab={"▁a": 0, "▁b": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4},
            merges=[],
            byte_fallback=True,
        )
    )
    pieces.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    write_tokenizer(tmp_path)
    pieces.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "generation_config.json", {"eos_token_id": 9})
    model = read_tokenizer(tmp_path)
    prompt = b"\0\0\0\0"
    decoder = model.decoder(prompt)
    assert [decoder.feed(token) for token in (1, 2, 3, 4, 0)] == [" b", "", "", "€", " a"]


def test_a_vocabulary_has_as_many_tokens_as_the_models_embedding_has_rows(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_json(tmp_path / "config.json", {"vocab_size": 1000})
    model = read_tokenizer(tmp_path)
    assert model.vocab_size == 1000
    assert model.decode([999]) == ""
    with pytest.raises(BadRequestError, match=r"in 0\.\.999"):
        model.decode([1000])


def test_a_text_that_is_no_utf8_and_a_token_that_is_no_byte_are_refused() -> None:
    for model in (tokenizer("gguf"), BYTES):
        with pytest.raises(BadRequestError, match="UTF-8"):
            model.encode("\ud800")
    with pytest.raises(BadRequestError, match="byte"):
        BYTES.decode([256])


def test_a_damaged_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_tokenizer(tmp_path / "none.gguf")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        read_tokenizer(tmp_path)
    whole = write(tmp_path, "gguf").read_bytes()
    short = tmp_path / "short.gguf"
    for size in (0, 3, 4, 20, 100, len(whole) // 2):
        short.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="cannot be read as a GGUF file"):
            read_tokenizer(short)
    write_tokenizer(tmp_path / "model", template="{% if %}")
    with pytest.raises(ConfigError, match="chat template"):
        read_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        read_tokenizer(tmp_path / "model")


def test_a_tokenizer_of_another_kind_is_refused_with_its_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    close(writer)
    with pytest.raises(ConfigError, match=r"tokenizer llama/None .* tokenizer\.json"):
        read_tokenizer(tmp_path / "model.gguf")


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "gguf")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"package {package}: pip install .*\[model\]"):
        read_tokenizer(path)
