"""Refusals by name of what the plug-in does not serve, when an engine is configured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm_engines as engines


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ([], "polyspec: expected a mapping with any of rule, levels, window, policy, given list"),
        (
            {"rules": "block"},
            "polyspec: expected any of rule, levels, window, policy, given 'rules'",
        ),
        ({"rule": "best"}, 'rule: expected "token" or "block", given \'best\''),
        ({"levels": ["prompt-lookup"]}, "levels: expected levels if and only if"),
        ({"window": [1]}, "window: expected none without levels"),
        ({"policy": "joint"}, "policy: expected none without levels"),
    ],
    ids=str,
)
def test_wrong_settings_are_named(settings: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        engines.options(settings)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("window", "text"),
    [
        ([4], "window: expected at most num_speculative_tokens = 3 at first, given 4"),
        ([1, 1], "window: expected 1 integers >= 0 for 2 levels, given [1, 1]"),
    ],
)
def test_wrong_windows_are_named(window: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=r"window") as caught:
        engines.options({"levels": ["a"], "window": window}, engines.SPECULATION["two levels"])
    assert str(caught.value) == text


def test_wrong_policies_are_named() -> None:
    chain = engines.SPECULATION["two levels"]
    for policy, ranks, text in [
        ("fast", 1, "policy: expected one of fixed, online, cached-fsm, joint, given 'fast'"),
        (4, 1, "policy: expected one of fixed, online, cached-fsm, joint, given 4"),
        ("joint", 2, "policy: expected none with tensor parallelism of 2, given one"),
    ]:
        with pytest.raises((TypeError, ValueError)) as caught:
            engines.options({"levels": ["a"], "policy": policy}, chain, ranks)
        assert str(caught.value) == text


def test_a_policy_stays_below_the_windows() -> None:
    settings = {"levels": ["a", "b"], "window": [3, 2], "policy": "joint"}
    made = engines.options(settings, engines.SPECULATION["two levels"])
    assert made.policy is not None
    assert (made.policy.name, made.policy.max_windows) == ("joint", [3, 2])


def test_windows_leave_room_for_the_level_below() -> None:
    made = engines.options({"levels": ["a", "b"]}, {**engines.SPECULATION["two levels"]})
    assert made.window == (1, 4)


@pytest.mark.parametrize(
    ("settings", "config", "text"),
    [
        ({"rule": "best"}, {}, "rule: expected"),
        ({}, {"logprobs_mode": "processed_logprobs"}, "expected logprobs_mode"),
    ],
)
def test_an_engine_is_not_made(
    models: Path, settings: dict[str, Any], config: dict[str, Any], text: str
) -> None:
    with pytest.raises(RuntimeError) as caught:
        engines.run(len, **engines.configuration(models, "none", **settings), **config)
    assert text in str(caught.value)
