"""The tokenizer of a model in a GGUF file, or in a directory with `tokenizer.json`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tierkv.cache.keys import unpack
from tierkv.errors import BadRequestError, ConfigError
from tierkv.gguf_file import GGUFFile, optional
from tierkv.tokenizers import Messages, TextDecoder


class _Encoded(Protocol):
    ids: list[int]


class _Vocabulary(Protocol):
    """The methods of `tokenizers.Tokenizer` that this module calls."""

    def encode(self, sequence: str, *, add_special_tokens: bool) -> _Encoded: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def get_vocab(self, *, with_added_tokens: bool) -> dict[str, int]: ...


class _Template(Protocol):
    def render(self, **names: object) -> str: ...


_SPECIAL_TYPES = (3, 4)  # token types of GGUF: control tokens, and user-defined tokens
_GPT2_WORDS = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_LATER_WORDS = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS|"""
    r""" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
# The pattern of a word, by llama.cpp's name of the pre-tokenizer. In "smollm" each digit is a word.
_WORDS = {
    "gpt-2": _GPT2_WORDS,
    "llama-bpe": _LATER_WORDS.replace("DIGITS", r"\p{N}{1,3}"),
    "qwen2": _LATER_WORDS.replace("DIGITS", r"\p{N}"),
    "smollm": _GPT2_WORDS,
}
_CONTEXT_TOKENS = 6  # prompt tokens decoded with the answer: its first word may begin there
_MAX_HELD_TOKENS = 16  # tokens that may wait for a whole character, which has up to 4 bytes


def read_tokenizer(path: Path) -> ModelTokenizer:
    """Read the tokenizer, the chat template and the stop tokens of a model.

    Args:
        path: a GGUF file, or a directory with `tokenizer.json`.

    Returns:
        The tokenizer.

    Raises:
        ConfigError: a file is missing, damaged or not supported, or a package is not installed.
    """
    if not path.is_dir():
        gguf = GGUFFile(path)
        return _of_gguf(path, gguf.fields, gguf.tensors.get("token_embd.weight", (0,))[0])
    library = optional("tokenizers", path)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{path} has no tokenizer.json: give the directory of a whole model")
    try:
        vocabulary = library.Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    config, about = read_json(path / "config.json"), read_json(path / "tokenizer_config.json")
    config = {**config, **config.get("text_config", {})}
    generation = read_json(path / "generation_config.json")
    stops = generation.get("eos_token_id", config.get("eos_token_id"))
    apart = path / "chat_template.jinja"
    template = apart.read_text(encoding="utf-8") if apart.is_file() else about.get("chat_template")
    if isinstance(template, list):  # several templates by name
        template = next((one["template"] for one in template if one["name"] == "default"), None)
    special = {
        name: token if isinstance(token, str) else token["content"]
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (token := about.get(name))
    }
    return ModelTokenizer(
        path,
        vocabulary,
        stop_tokens=frozenset([stops] if isinstance(stops, int) else stops or ()),
        template=template,
        special=special,
        vocab_size=int(config.get("vocab_size", 0)),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains one object.

    Returns:
        The object; {} if the file does not exist.

    Raises:
        ConfigError: the file cannot be read, or contains something else.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a JSON object: download the model's file again")
    return found


def _of_gguf(path: Path, fields: Mapping[str, Any], vocab_size: int) -> ModelTokenizer:
    library = optional("tokenizers", path)
    kind, words = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or words not in _WORDS:
        raise ConfigError(
            f"the tokenizer {kind}/{words} of {path} is not supported in a GGUF file (only gpt2/"
            f"{', gpt2/'.join(_WORDS)}): give the model's directory with tokenizer.json"
        )
    texts = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = library.Tokenizer(
        library.models.BPE(
            vocab={text: index for index, text in enumerate(texts)},
            merges=merges,
            ignore_merges=words == "llama-bpe",
        )
    )
    split = library.pre_tokenizers
    steps = [split.Digits(individual_digits=True)] if words == "smollm" else []
    steps.append(split.Split(library.Regex(_WORDS[words]), behavior="isolated"))
    vocabulary.pre_tokenizer = split.Sequence(
        [*steps, split.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    vocabulary.decoder = library.decoders.ByteLevel()
    types = fields.get("tokenizer.ggml.token_type", ())
    vocabulary.add_special_tokens(
        [
            library.AddedToken(text, special=True, normalized=False)
            for text, type_ in zip(texts, types, strict=False)
            if type_ in _SPECIAL_TYPES
        ]
    )
    ids = {
        name: int(fields[f"tokenizer.ggml.{name}_id"])
        for name in ("bos_token", "eos_token", "eot_token", "eom_token")
        if f"tokenizer.ggml.{name}_id" in fields
    }
    special = {name: texts[token] for name, token in ids.items()}
    if "bos_token" in ids and fields.get("tokenizer.ggml.add_bos_token", words == "llama-bpe"):
        bos = special["bos_token"]
        vocabulary.post_processor = library.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, ids["bos_token"])]
        )
    return ModelTokenizer(
        path,
        vocabulary,
        stop_tokens=frozenset(token for name, token in ids.items() if name != "bos_token"),
        template=fields.get("tokenizer.chat_template"),
        special=special,
        vocab_size=vocab_size,
    )


class ModelTokenizer:
    """The `Tokenizer` of one model.

    Args:
        path: path of the model, for error messages.
        vocabulary: a `Tokenizer` of the package `tokenizers`.
        stop_tokens: tokens that end an answer.
        template: Jinja template that turns a chat into text; None if the model has none.
        special: texts of special tokens, by the name that the template uses, such as `bos_token`.
        vocab_size: number of rows of the model's embedding; the size of the vocabulary is used
            instead if it is larger.

    Raises:
        ConfigError: the template cannot be read, or the package `jinja2` is not installed.
    """

    def __init__(
        self,
        path: Path,
        vocabulary: _Vocabulary,
        *,
        stop_tokens: frozenset[int],
        template: str | None,
        special: Mapping[str, str],
        vocab_size: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        texts = vocabulary.get_vocab(with_added_tokens=True)
        self._max_characters = max(map(len, texts), default=1)
        self.vocab_size = max(vocab_size, 1 + max(texts.values(), default=0))
        self.stop_tokens = stop_tokens
        self._special = special
        self._letter = vocabulary.encode("a", add_special_tokens=False).ids
        self._template = None if template is None else _template(path, template)

    def encode(self, text: str) -> bytes:
        """Return the tokens of `text`, as little-endian int32 bytes (packed tokens).

        The text of a special token, such as "<s>", becomes that token.

        Raises:
            BadRequestError: the text cannot be encoded as UTF-8.
        """
        return self._encode(text, adds_special=True)

    def encode_chat(self, messages: Messages) -> bytes:
        if self._template is None:
            raise BadRequestError("the model has no chat template: send a completion instead")
        template_error = importlib.import_module("jinja2").TemplateError
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except (template_error, TypeError, ValueError) as error:
            raise BadRequestError(f"the chat template refuses the messages: {error}") from error
        return self._encode(text, adds_special=False)

    def _encode(self, text: str, *, adds_special: bool) -> bytes:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequestError(f"the text is not valid UTF-8: {error}") from error
        ids = self._vocabulary.encode(text, add_special_tokens=adds_special).ids
        return np.array(ids, "<i4").tobytes()

    def fewest_tokens(self, text: str) -> int:
        return len(text) // self._max_characters

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`, without special tokens.

        Raises:
            BadRequestError: a token is not in [0, vocab_size).
        """
        ids = [int(token) for token in tokens]
        if not all(0 <= token < self.vocab_size for token in ids):
            raise BadRequestError(f"a token of this model must be in 0..{self.vocab_size - 1}")
        return str(self._vocabulary.decode(ids, skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        # Some vocabularies drop a space at the beginning of a text, and another token precedes it.
        before = self._vocabulary.decode(self._letter, skip_special_tokens=False)
        both = self._vocabulary.decode([*self._letter, token], skip_special_tokens=False)
        return both[len(before) :]

    def decoder(self, before: bytes) -> TextDecoder:
        known = unpack(before[-4 * _CONTEXT_TOKENS :]).tolist()
        return _WindowDecoder(self, known, len(known))


@dataclass(slots=True)
class _WindowDecoder:
    """A `TextDecoder` that decodes each token together with the tokens before it.

    Attributes:
        tokenizer: the tokenizer.
        ids: the last tokens: first `num_read` tokens whose text was returned, then new ones.
        num_read: number of tokens at the start of `ids` whose text was returned.
        stops: tokens that end an answer, and have no text.
    """

    tokenizer: ModelTokenizer
    ids: list[int]
    num_read: int

    def feed(self, token: int) -> str:
        if token in self.tokenizer.stop_tokens:
            return ""
        self.ids.append(token)
        text = self._new_text()
        is_held = text.endswith("\ufffd") and len(self.ids) - self.num_read < _MAX_HELD_TOKENS
        if is_held or not text:
            return ""
        self.ids = self.ids[self.num_read :]
        self.num_read = len(self.ids)
        return text

    def rest(self) -> str:
        text = self._new_text()
        self.ids, self.num_read = self.ids[self.num_read :], len(self.ids) - self.num_read
        return text

    def _new_text(self) -> str:
        read = self.tokenizer.decode(self.ids[: self.num_read])
        return self.tokenizer.decode(self.ids)[len(read) :]


def _template(path: Path, text: str) -> _Template:
    jinja2 = optional("jinja2", path)
    sandbox = importlib.import_module("jinja2.sandbox").ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(why: str) -> None:
        raise jinja2.TemplateError(why)

    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    sandbox.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **{"indent": None, **options}
    )
    try:
        compiled: _Template = sandbox.from_string(text)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template of {path} cannot be read: {error}") from error
    return compiled
