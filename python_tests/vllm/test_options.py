"""Refusals, by name, of unsupported options of the plug-in, when an engine is configured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm_engines as engines

CHAIN = {"levels": ["a"]}
KEYS = "any of rule, levels, window, policy"
POLICIES = "policy: expected one of fixed, online, cached-fsm, joint, given"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ([], f"polyspec: expected a mapping with {KEYS}, given list"),
        ({"rules": "block"}, f"polyspec: expected {KEYS}, given 'rules'"),
        ({"rule": "best"}, 'rule: expected "token" or "block", given \'best\''),
        ({"window": [1]}, "window: expected none without levels"),
        ({"policy": "joint"}, "policy: expected none without levels"),
        (
            {**CHAIN, "window": [4]},
            "window: expected at most num_speculative_tokens = 3 at first, given 4",
        ),
        (
            {**CHAIN, "window": [1, 1]},
            "window: expected 1 integers >= 0 for 2 levels, given [1, 1]",
        ),
        ({**CHAIN, "policy": "fast"}, f"{POLICIES} 'fast'"),
        ({**CHAIN, "policy": 4}, f"{POLICIES} 4"),
    ],
    ids=str,
)
def test_wrong_settings_are_named(settings: Any, text: str) -> None:
    speculation = engines.SPECULATION["two levels"] if "levels" in settings else None
    with pytest.raises((TypeError, ValueError)) as caught:
        engines.options(settings, speculation)
    assert str(caught.value) == text


def test_levels_and_policies_need_an_engine_for_them() -> None:
    with pytest.raises(ValueError, match=r"^levels: expected levels if and only if"):
        engines.options({"levels": ["prompt-lookup"]})
    with pytest.raises(ValueError, match=r"^policy: expected none with tensor parallelism of 2"):
        engines.options({**CHAIN, "policy": "joint"}, engines.SPECULATION["two levels"], 2)


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
