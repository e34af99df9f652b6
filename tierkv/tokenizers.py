"""Tokenizers of engines: text to tokens, and tokens to text, whole or token by token."""

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
    """Decoder of tokens that come one after another. Joined, the pieces are the whole text."""

    def feed(self, token: int) -> str:
        """Return the text that `token` completes; "" while a character is incomplete."""
        ...

    def rest(self) -> str:
        """Return the text of an incomplete character, when no token follows."""
        ...


class Tokenizer(Protocol):
    """Conversion of text to tokens and back. Every method may be called from any thread.

    Attributes:
        vocab_size: number of tokens; a token is in [0, vocab_size).
        stop_tokens: tokens that end an answer. A decoder gives them no text.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_tokens(self) -> frozenset[int]: ...

    def encode(self, text: str) -> bytes:
        """Return the tokens of `text`, packed as `cache.keys.pack` packs them.

        Raises:
            BadRequestError: the text has no tokens, such as a lone surrogate.
        """
        ...

    def encode_chat(self, messages: Messages) -> bytes:
        """Return the tokens of a chat up to the place where the next answer begins, packed.

        Args:
            messages: the messages, oldest first.

        Raises:
            BadRequestError: the model has no chat template, the template refuses the messages, or a
                text has no tokens.
        """
        ...

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`, without encoding the text."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`.

        Raises:
            BadRequestError: a token is not in [0, vocab_size).
        """
        ...

    def token_text(self, token: int) -> str:
        """Return the text of a token in the middle of a text; for a special token, its name.

        Bytes that are not a whole character become U+FFFD.
        """
        ...

    def decoder(self, before: bytes) -> TextDecoder:
        """Return a decoder for an answer, before its first token.

        Args:
            before: the packed tokens that the answer follows.
        """
        ...


class StopFinder:
    """A search for stop texts in a text that comes in pieces.

    The result does not depend on the places where the text is cut.

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
        """Add a piece, and return the text that is certain to be part of the answer.

        Text after the first complete stop text is dropped. An end of the text that may begin a stop
        text is held back.
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
        """Return the text that was held back, when no text follows."""
        held, self._held = self._held, ""
        return held

    def _longest_start(self) -> int:
        """Return the length of the longest end of the held text that begins a stop text."""
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
        before: the packed tokens that the answer follows.
        num_answered: number of tokens at the end of `before` that are an earlier part of the
            answer. Their text has been returned before, except an incomplete character.
        stops: texts that end the answer and are not part of it; none may be empty.
        min_tokens: number of tokens of the answer before which no stop text begins.
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
        """See `TextDecoder.feed`; text that may begin a stop text is held back."""
        text = self._decoder.feed(token)
        self._num_unstoppable -= 1
        return text if self._num_unstoppable >= 0 else self._finder.feed(text)

    def rest(self) -> str:
        """See `TextDecoder.rest`."""
        return self._finder.feed(self._decoder.rest()) + self._finder.rest()

    def text(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`, the last ones of the answer."""
        return "".join([self.feed(token) for token in tokens]) + self.rest()


class ByteTokenizer:
    """One token per byte of UTF-8; bytes that are not UTF-8 become U+FFFD.

    A chat is one line `role: content` for each message, and `assistant: ` at the end.
    """

    vocab_size = 256
    stop_tokens: frozenset[int] = frozenset()

    def encode(self, text: str) -> bytes:
        """See `Tokenizer.encode`."""
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise BadRequestError(f"the text is not valid UTF-8: {error}") from error
        return np.frombuffer(raw, np.uint8).astype("<i4").tobytes()

    def encode_chat(self, messages: Messages) -> bytes:
        """See `Tokenizer.encode_chat`."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join([*lines, "assistant: "]))

    def fewest_tokens(self, text: str) -> int:
        """See `Tokenizer.fewest_tokens`."""
        return len(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        try:
            return bytes(int(token) for token in tokens).decode(errors="replace")
        except ValueError as error:
            raise BadRequestError(
                f"a token is not a byte, as this model's tokens are: {error}"
            ) from error

    def token_text(self, token: int) -> str:
        """See `Tokenizer.token_text`."""
        return self.decode([token])

    def decoder(self, before: bytes) -> TextDecoder:
        """See `Tokenizer.decoder`."""
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
    """The `Tokenizer` of a model without one: prompts and answers are tokens, not text.

    Args:
        vocab_size: number of tokens.
        stop_tokens: tokens that end an answer.
    """

    def __init__(self, vocab_size: int, stop_tokens: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.stop_tokens = stop_tokens

    def encode(self, text: str) -> bytes:
        """Refuse the text. See `Tokenizer.encode`.

        Raises:
            BadRequestError: always.
        """
        del text
        raise BadRequestError("this model has no tokenizer: give tokens instead of text")

    def encode_chat(self, messages: Messages) -> bytes:
        """Refuse the chat. See `Tokenizer.encode_chat`.

        Raises:
            BadRequestError: always.
        """
        del messages
        return self.encode("")

    def fewest_tokens(self, text: str) -> int:
        """See `Tokenizer.fewest_tokens`."""
        del text
        return 0

    def decode(self, tokens: Iterable[int]) -> str:
        """Return "". See `Tokenizer.decode`."""
        if any(not 0 <= token < self.vocab_size for token in tokens):
            raise BadRequestError(f"a token of this model must be in 0..{self.vocab_size - 1}")
        return ""

    def token_text(self, token: int) -> str:
        """Return the number of the token, its only name."""
        return str(token)

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
