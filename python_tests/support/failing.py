"""Small models, and methods that fail when a test wants it."""

from collections.abc import Callable
from typing import Any

import torch
from small_models import llama

V = 48

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12], [5, 5]]

SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 5, "eos_token_id": []}


def model(seed: int, layers: int) -> Any:
    made = llama(seed, layers, V, max_position_embeddings=256)
    with torch.no_grad():
        made.lm_head.weight *= 6  # sharper distributions, of which some drafts are rejected
    return made


class Failing:
    """A method that fails on its call number `at`, and calls the original otherwise."""

    def __init__(self, call: Callable[..., Any], at: int, error: BaseException) -> None:
        self.call, self.left, self.error = call, at, error

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.call(*args, **options)
