"""Tokenizers of engines: text to tokens and back, whole and as tokens come."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from tierkv.errors import BadRequestError

Messages = Sequence[Mapping[str, str]]
"""The messages of a chat, each with its `role` and its `content`."""


class TextDecoder(Protocol):
    """The text of tokens that come one after another. Joined, the pieces are the whole text."""

    def feed(self, token: int) -> str:
        """Return the text that `token` completes, "" while a character is incomplete."""
        ...

    def rest(self) -> str:
        """Return the text of what is incomplete when no token follows."""
        ...


class Tokenizer(Protocol):
    """Text to tokens and back. Every method may be called from any thread.

    Attributes:
        vocab_size: Number of tokens; a token is in [0, vocab_size).
        stop_tokens: Tokens that end an answer. A decoder gives them no text.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_tokens(self) -> frozenset[int]: ...

    def encode(self, text: str) -> bytes:
        """Return the tokens of `text`, packed as `cache.keys.pack` packs them.

        Raises:
            BadRequestError: The text has no tokens, such as a lone surrogate.
        """
        ...

    def encode_chat(self, messages: Messages) -> bytes:
        """Return the tokens of a chat up to the place where the next answer begins, packed.

        Args:
            messages: The messages, oldest first.

        Raises:
            BadRequestError: The model has no chat template, the template refuses the messages, or
                a text has no tokens.
        """
        ...

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`, without encoding the text."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`.

        Raises:
            BadRequestError: A token is not in [0, vocab_size).
        """
        ...

    def decoder(self, before: bytes) -> TextDecoder:
        """Return a decoder at the beginning of an answer.

        Args:
            before: The packed tokens that the answer follows.
        """
        ...


def answer_text(tokenizer: Tokenizer, prompt: bytes, tokens: Iterable[int]) -> str:
    """Return the text of an answer, equal to its joined pieces.

    Args:
        tokenizer: The tokenizer of the model.
        prompt: The packed tokens that the answer follows.
        tokens: The tokens of the answer.
    """
    decoder = tokenizer.decoder(prompt)
    return "".join([decoder.feed(token) for token in tokens]) + decoder.rest()


class ByteTokenizer:
    """One token per byte of UTF-8; bytes that are not UTF-8 become U+FFFD.

    A chat is one line `role: content` for each message, and `assistant: ` at the end.
    """

    vocab_size = 256
    stop_tokens: frozenset[int] = frozenset()

    def encode(self, text: str) -> bytes:
        """See Tokenizer.encode."""
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise BadRequestError(f"the text is not valid UTF-8: {error}") from error
        return np.frombuffer(raw, np.uint8).astype("<i4").tobytes()

    def encode_chat(self, messages: Messages) -> bytes:
        """See Tokenizer.encode_chat."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join([*lines, "assistant: "]))

    def fewest_tokens(self, text: str) -> int:
        """See Tokenizer.fewest_tokens."""
        return len(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """See Tokenizer.decode."""
        try:
            return bytes(int(token) for token in tokens).decode(errors="replace")
        except ValueError as error:
            raise BadRequestError(
                f"a token is not a byte, as this model's tokens are: {error}"
            ) from error

    def decoder(self, before: bytes) -> TextDecoder:
        """See Tokenizer.decoder."""
        del before  # a byte's text does not depend on the bytes before it
        return _ByteDecoder()


class _ByteDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def rest(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokensOnly:
    """The tokenizer of a model without one: prompts and answers are tokens.

    Args:
        vocab_size: Number of tokens.
        stop_tokens: Tokens that end an answer.
    """

    def __init__(self, vocab_size: int, stop_tokens: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.stop_tokens = stop_tokens

    def encode(self, text: str) -> bytes:
        """Raise BadRequestError: no text has tokens."""
        del text
        raise BadRequestError("this model has no tokenizer: give tokens instead of text")

    def encode_chat(self, messages: Messages) -> bytes:
        """Raise BadRequestError: no chat has tokens."""
        del messages
        return self.encode("")

    def fewest_tokens(self, text: str) -> int:
        """See Tokenizer.fewest_tokens."""
        del text
        return 0

    def decode(self, tokens: Iterable[int]) -> str:
        """Return no text; see Tokenizer.decode."""
        if any(not 0 <= token < self.vocab_size for token in tokens):
            raise BadRequestError(f"a token of this model must be in 0..{self.vocab_size - 1}")
        return ""

    def decoder(self, before: bytes) -> TextDecoder:
        """Return a decoder that gives no text."""
        del before
        return _NoText()


class _NoText:
    def feed(self, token: int) -> str:
        del token
        return ""

    def rest(self) -> str:
        return ""
