"""The choice of the next token from the logits, with transformers' own processors.

A choice depends only on logits, sampling parameters, earlier tokens and position. The random number
is computed from the seed and the position (with Philox, Salmon et al. 2011). Another node with the
same seed therefore continues an answer with the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tierkv.engine import Sampling


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """A token to be chosen: the next one of a request.

    Attributes:
        sampling: The sampling parameters of the request.
        prompt: int32 [n], the tokens of the prompt.
        answer: The tokens of the answer so far.
        excluded: Tokens that may not be chosen, such as end tokens while the answer is too short.
    """

    sampling: Sampling
    prompt: npt.NDArray[np.int32]
    answer: Sequence[int]
    excluded: frozenset[int] = frozenset()

    @property
    def position(self) -> int:
        """Position of the chosen token, counted from the start of the prompt."""
        return len(self.prompt) + len(self.answer)

    @property
    def is_plain(self) -> bool:
        """True if the token with the largest logit is chosen, without a change of the logits."""
        return self.sampling.is_greedy and not (self.has_penalty or self.excluded)

    @property
    def has_penalty(self) -> bool:
        """True if the sampling changes the logits of tokens that occurred before."""
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        return bool(self.sampling.unusual(names))


def choose(logits: torch.Tensor, choices: Sequence[TokenChoice]) -> list[int]:
    """Return the next token of each request; with equal largest logits, the lowest token id.

    Args:
        logits: [number of choices, vocab_size].
        choices: The sampling and the earlier tokens of each request, in the order of the rows.
    """
    found: list[int] = logits.argmax(dim=-1).tolist()
    for number, choice in enumerate(choices):
        if not choice.is_plain:
            found[number] = _choose_one(logits[number], choice)
    return found


def _choose_one(logits: torch.Tensor, choice: TokenChoice) -> int:
    scores = logits.float()[None]
    if choice.has_penalty:
        scores = _penalized(scores, choice)
    if choice.excluded:
        scores = scores.clone()
        scores[:, sorted(choice.excluded)] = -torch.inf
    sampling = choice.sampling
    if sampling.is_greedy:
        return int(scores.argmax())
    # Warpers do not read the earlier tokens.
    ids = torch.zeros((1, 0), dtype=torch.long, device=scores.device)
    weights = _warpers(sampling)(ids, scores)[0].double().softmax(dim=-1)
    sums = weights.cumsum(dim=-1)
    word = int(np.random.Philox(key=sampling.seed, counter=choice.position).random_raw())
    point = (word >> 11) * 2.0**-53 * sums[-1]
    chosen = int(torch.searchsorted(sums, point, right=True))
    last = int(weights.nonzero()[-1])  # the random point may have been rounded up to the whole sum
    return min(chosen, last)


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(float(sampling.top_p)))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(float(sampling.min_p)))
    return warpers


def _penalized(scores: torch.Tensor, choice: TokenChoice) -> torch.Tensor:
    sampling = choice.sampling
    answer = torch.tensor(list(choice.answer), dtype=torch.long, device=scores.device)
    if sampling.repetition_penalty != 1:
        prompt = torch.from_numpy(choice.prompt.astype(np.int64)).to(scores.device)
        ids = torch.cat([prompt, answer])[None]
        scores = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))(ids, scores)
    counts = torch.bincount(answer, minlength=scores.shape[-1])
    scores = scores - sampling.presence_penalty * (counts > 0)
    penalized: torch.Tensor = scores - sampling.frequency_penalty * counts
    return penalized
