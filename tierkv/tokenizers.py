"""Tokenizers: text to tokens, and tokens to text, all at once or one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from tierkv.cache.keys import TOKEN_BYTES, unpack
from tierkv.errors import BadRequestError

Messages = Sequence[Mapping[str, str]]
"""The messages of a chat, each with its `role` and its `content`."""


class TextDecoder(Protocol):
    """A decoder of tokens that arrive one at a time. It returns the text in pieces."""

    def feed(self, token: int) -> str:
        """Return the text that `token` completes; "" while a character is incomplete."""

    def rest(self) -> str:
        """Return the text that `feed` has not returned yet. Call it after the last token.

        Bytes of an incomplete character become U+FFFD.
        """


class Tokenizer(Protocol):
    """Conversion of text to tokens and back. Every method may be called from any thread.

    Attributes:
        vocab_size: number of tokens; a token is in [0, vocab_size).
        stop_tokens: tokens that end an answer. A decoder returns no text for them.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_tokens(self) -> frozenset[int]: ...

    def encode(self, text: str) -> bytes:
        """Return the tokens of `text`, as little-endian int32 bytes (packed tokens).

        Raises:
            BadRequestError: the text cannot be encoded, such as a lone surrogate.
        """

    def encode_chat(self, messages: Messages) -> bytes:
        """Return the tokens of a chat, up to the place where the next answer begins.

        Args:
            messages: the messages, oldest first.

        Returns:
            The tokens, as little-endian int32 bytes (packed tokens).

        Raises:
            BadRequestError: the model has no chat template, the template rejects the messages, or a
                text cannot be encoded.
        """

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`, without encoding the text."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`.

        Raises:
            BadRequestError: a token is not in [0, vocab_size).
        """

    def token_text(self, token: int) -> str:
        """Return the text of `token` in the middle of a text; for a special token, its name.

        Bytes that are no whole character become U+FFFD.
        """

    def decoder(self, before: bytes) -> TextDecoder:
        """Return a decoder for the answer to a prompt.

        Args:
            before: the prompt's tokens, as little-endian int32 bytes. The text of the answer's
                first tokens may depend on them.
        """


class StopFinder:
    """A search for stop texts in a text that arrives in pieces.

    The result does not depend on where the text is cut into pieces.

    Args:
        stops: texts that end the answer and are not part of it; none may be empty.

    Attributes:
        has_stopped: True once a stop text is complete.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "checked where they came in"
        self._stops = tuple(stops)
        self._held = ""
        self.has_stopped = False

    def feed(self, text: str) -> str:
        """Add a piece of text, and return the text that is now certain to be part of the answer.

        Text that may be the beginning of a stop text is returned later. The first complete stop
        text and all text after it are dropped.
        """
        if self.has_stopped:
            return ""
        if not self._stops:
            return text
        shown = []
        for character in text:
            self._held += character
            found = max(
                (stop for stop in self._stops if self._held.endswith(stop)), key=len, default=""
            )
            if found:
                self.has_stopped = True
                shown.append(self._held.removesuffix(found))
                self._held = ""
                break
            keep = self._longest_start()
            shown.append(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
        return "".join(shown)

    def rest(self) -> str:
        """Return the text that `feed` has not returned yet. Call it after the last piece."""
        held, self._held = self._held, ""
        return held

    def _longest_start(self) -> int:
        """Return the length of the longest suffix of `_held` with which a stop text begins."""
        return max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:length])
            ),
            default=0,
        )


class AnswerDecoder:
    """A `TextDecoder` of an answer that ends at a stop text.

    Attributes:
        has_stopped: True once a stop text is complete.

    Args:
        tokenizer: the tokenizer of the model.
        before: the tokens before those to decode (the prompt, and the answer so far), as
            little-endian int32 bytes.
        num_answered: number of tokens at the end of `before` that belong to the answer. Their text
            is not returned again, except an incomplete character.
        stops: texts that end the answer and are not part of it; none may be empty.
        min_tokens: number of tokens at the start of the answer that are not searched for stop
            texts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        before: bytes,
        *,
        num_answered: int = 0,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        start = max(len(before) - num_answered * TOKEN_BYTES, 0)
        self._decoder = tokenizer.decoder(before[:start])
        for token in unpack(before[start:]).tolist():
            self._decoder.feed(token)
        self._finder = StopFinder(stops)
        self._num_unstoppable = min_tokens - num_answered

    @property
    def has_stopped(self) -> bool:
        return self._finder.has_stopped

    def feed(self, token: int) -> str:
        """Return the text that `token` completes, except text that may begin a stop text."""
        text = self._decoder.feed(token)
        self._num_unstoppable -= 1
        return text if self._num_unstoppable >= 0 else self._finder.feed(text)

    def rest(self) -> str:
        """Return the text that `feed` has not returned yet. Call it after the last token."""
        return self._finder.feed(self._decoder.rest()) + self._finder.rest()

    def text(self, tokens: Iterable[int]) -> str:
        """Feed `tokens`, the last ones of the answer, and return all text not returned yet."""
        return "".join([self.feed(token) for token in tokens]) + self.rest()


class ByteTokenizer:
    """A tokenizer with one token per byte of UTF-8; bytes that are not UTF-8 become U+FFFD.

    A chat becomes one line `role: content` per message, and `assistant: ` at the end.
    """

    vocab_size = 256
    stop_tokens: frozenset[int] = frozenset()

    def encode(self, text: str) -> bytes:
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise BadRequestError(f"the text is not valid UTF-8: {error}") from error
        return np.frombuffer(raw, np.uint8).astype("<i4").tobytes()

    def encode_chat(self, messages: Messages) -> bytes:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join([*lines, "assistant: "]))

    def fewest_tokens(self, text: str) -> int:
        return len(text)

    def decode(self, tokens: Iterable[int]) -> str:
        try:
            return bytes(int(token) for token in tokens).decode(errors="replace")
        except ValueError as error:
            raise BadRequestError(
                f"a token is not a byte, as this model's tokens are: {error}"
            ) from error

    def token_text(self, token: int) -> str:
        return self.decode([token])

    def decoder(self, before: bytes) -> TextDecoder:
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
    """The `Tokenizer` of a model with an unknown vocabulary: all prompts and answers are tokens.

    Args:
        vocab_size: number of tokens.
        stop_tokens: tokens that end an answer.
    """

    def __init__(self, vocab_size: int, stop_tokens: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.stop_tokens = stop_tokens

    def encode(self, text: str) -> bytes:
        """Refuse the text, since the vocabulary is unknown.

        Raises:
            BadRequestError: always.
        """
        del text
        raise BadRequestError("this model has no tokenizer: give tokens instead of text")

    def encode_chat(self, messages: Messages) -> bytes:
        """Refuse the chat, since the vocabulary is unknown.

        Raises:
            BadRequestError: always.
        """
        del messages
        return self.encode("")

    def fewest_tokens(self, text: str) -> int:
        """Return 0 as the lower bound of the number of tokens, since the model has no text."""
        del text
        return 0

    def decode(self, tokens: Iterable[int]) -> str:
        """Check that the model has these tokens, and return "", since they have no text.

        Raises:
            BadRequestError: a token is not in [0, vocab_size).
        """
        if any(not 0 <= token < self.vocab_size for token in tokens):
            raise BadRequestError(f"a token of this model must be in 0..{self.vocab_size - 1}")
        return ""

    def token_text(self, token: int) -> str:
        """Return the number of the token as text."""
        return str(token)

    def decoder(self, before: bytes) -> TextDecoder:
        """Return a decoder that returns "" for every token."""
        del before
        return _NoText()


class _NoText:
    def feed(self, token: int) -> str:
        del token
        return ""

    def rest(self) -> str:
        return ""
