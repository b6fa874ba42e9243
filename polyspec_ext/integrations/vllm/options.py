"""The settings of an engine, ``additional_config["polyspec"]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ... import arguments
from ...policies import Adaptive, named

PROPOSER = "polyspec_ext.integrations.vllm.chain.ChainProposer"
VERSIONS = ((0, 32), (0, 33))

_NAMES = ("rule", "levels", "window", "policy")
_LOGPROBS = ("raw_logprobs", "raw_logits")


@dataclass(frozen=True)
class Options:
    """Configure the plug-in.

    Args:
        rule: "token" or "block", by which drafts are verified.
        levels: models below vLLM's, the largest first, as the command line names them.
        window: draft tokens that each level hands up, the first at most `num_speculative_tokens`.
            By default 4 at the bottom, doubled at every level above, but at the first as many as
            leave room for the next level's window.
        policy: "joint", "online", "cached-fsm" or "fixed", which chooses each request's windows up
            to `window` by measured times, down to 0. None: they stay.
    """

    rule: str = "token"
    levels: tuple[str, ...] = ()
    window: tuple[int, ...] = ()
    policy: Adaptive | None = None

    @staticmethod
    def of(vllm_config: Any) -> Options | None:
        """Return the settings of an engine; None: it does not ask for the plug-in.

        Raises:
            TypeError, ValueError: settings that are unknown or wrong.
        """
        additional = vllm_config.additional_config
        if not isinstance(additional, Mapping) or "polyspec" not in additional:
            return None
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return _parse(additional["polyspec"], vllm_config.speculative_config, ranks)


def _parse(settings: Any, speculative: Any, ranks: int) -> Options:
    if not isinstance(settings, Mapping):
        raise TypeError(
            "polyspec: expected a mapping with any of "
            f"{', '.join(_NAMES)}, given {arguments.shown(settings)}"
        )
    for name in settings:
        if name not in _NAMES:
            raise ValueError(f"polyspec: expected any of {', '.join(_NAMES)}, given {name!r}")
    rule = settings.get("rule", "token")
    if rule not in ("token", "block"):
        raise ValueError(f'rule: expected "token" or "block", given {arguments.shown(rule)}')
    levels = tuple(arguments.strings("levels", settings.get("levels")))
    chain = speculative is not None and (speculative.method, speculative.model) == (
        "custom_class",
        PROPOSER,
    )
    if chain != bool(levels):
        raise ValueError(
            f"levels: expected levels if and only if the speculative configuration has method "
            f"'custom_class' and model {PROPOSER!r}, given {list(levels)}"
        )
    if not levels:
        for name in ("window", "policy"):
            if name in settings:
                raise ValueError(f"{name}: expected none without levels")
        return Options(rule)
    most = speculative.num_speculative_tokens
    inner = [4 * 2**i for i in reversed(range(len(levels) - 1))]
    window = [max(most - sum(inner[:1]), 1), *inner]
    if "window" in settings:
        window = arguments.sizes("window", settings["window"], len(levels), len(levels) + 1)
    if window[0] > most:
        raise ValueError(
            f"window: expected at most num_speculative_tokens = {most} at first, given {window[0]}"
        )
    policy = settings.get("policy")
    if policy is not None:
        policy = replace(named(policy), max_windows=window)
        if ranks > 1:  # each would choose by times of its own
            raise ValueError(f"policy: expected none with tensor parallelism of {ranks}, given one")
    return Options(rule, levels, tuple(window), policy)


def refuse(vllm_config: Any) -> None:
    """Refuse what the plug-in does not serve.

    Raises:
        ValueError: names it.
    """
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    method = "standard" if speculative is None else speculative.rejection_sample_method
    if method != "standard":
        raise ValueError(
            f"polyspec: expected rejection_sample_method 'standard', which keeps the target's "
            f"distribution, given {method!r}"
        )
    if model.logprobs_mode not in _LOGPROBS:
        raise ValueError(
            f"polyspec: expected logprobs_mode {' or '.join(_LOGPROBS)}, given "
            f"{model.logprobs_mode!r}"
        )
