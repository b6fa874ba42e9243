"""The settings of an engine, ``additional_config["polyspec"]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ... import arguments
from ...policies.adaptive import Adaptive, named

if TYPE_CHECKING:
    from ..draft_chain import DraftChain

PROPOSER = "polyspec_ext.integrations.vllm.chain.ChainProposer"
VERSIONS = ("0.32", "0.33")


@dataclass(frozen=True)
class Options:
    """Settings of the plug-in. The first window is at most `num_speculative_tokens`. By default
    windows are 4 for the drafter and double at every level above, but the first is
    `num_speculative_tokens` minus the second, at least 1.

    Args:
        rule: "token" or "block", the verification rule of sampled drafts.
        levels: models below the engine's, the largest first, named as on the command line.
            Empty: the engine drafts.
        window: per level, maximum number of draft tokens for the next level up.
        policy: "joint", "online", "cached-fsm" or "fixed", which chooses each request's windows, 0
            to `window`, by measured times. None: constant windows.
    """

    rule: str = "token"
    levels: tuple[str, ...] = ()
    window: tuple[int, ...] = ()
    policy: Adaptive | None = None

    @staticmethod
    def of(vllm_config: Any) -> Options | None:
        """Return the settings of an engine; None: an engine without the plug-in.

        Raises:
            TypeError, ValueError: a setting is unknown or wrong.
        """
        additional = vllm_config.additional_config
        if not isinstance(additional, Mapping) or "polyspec" not in additional:
            return None
        settings, speculative = additional["polyspec"], vllm_config.speculative_config
        rule, levels, window = _read(settings)
        chain = getattr(speculative, "method", None) == "custom_class"
        chain = chain and speculative.model == PROPOSER
        if chain != bool(levels):
            raise ValueError(
                f"levels: expected levels if and only if the speculative configuration has method "
                f"'custom_class' and model {PROPOSER!r}, given {list(levels)}"
            )
        if not levels:
            return Options(rule)
        most = speculative.num_speculative_tokens
        inner = [4 * 2**i for i in reversed(range(len(levels) - 1))]
        window = window or (max(most - sum(inner[:1]), 1), *inner)
        if window[0] > most:
            raise ValueError(
                f"window: expected at most num_speculative_tokens = {most} at first, given "
                f"{window[0]}"
            )
        policy = settings.get("policy")
        if policy is not None:
            policy = replace(named(policy), max_windows=list(window))
            ranks = vllm_config.parallel_config.tensor_parallel_size
            if ranks > 1:  # ranks would choose by different times
                raise ValueError(
                    f"policy: expected none with tensor parallelism of {ranks}, given one"
                )
        return Options(rule, levels, window, policy)

    def load(self, device: Any, **options: Any) -> DraftChain:
        """Load the levels below an engine's target. `options`: arguments of `DraftChain`.

        Raises:
            TypeError, ValueError: a level cannot be loaded, or does not fit the target.
        """
        from ...chain import Chain
        from ..draft_chain import DraftChain

        chain = Chain(list(self.levels), list(self.window[1:]), rule=self.rule, device=device)
        return DraftChain(chain, **options)


def _read(settings: Any) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    """Check an engine's settings; return rule, levels and windows. No windows: the default."""
    names = ["rule", "levels", "window", "policy"]
    shown = ", ".join(names)
    if not isinstance(settings, Mapping):
        raise TypeError(
            f"polyspec: expected a mapping with any of {shown}, given {arguments.shown(settings)}"
        )
    for key in settings:
        if key not in names:
            raise ValueError(f"polyspec: expected any of {shown}, given {key!r}")
    rule = settings.get("rule", "token")
    if rule not in ("token", "block"):
        raise ValueError(f'rule: expected "token" or "block", given {arguments.shown(rule)}')
    levels = tuple(arguments.strings("levels", settings.get("levels")))
    for key in names[2:]:
        if key in settings and not levels:
            raise ValueError(f"{key}: expected none without levels")
    window: Sequence[int] = ()
    if "window" in settings:
        window = arguments.sizes("window", settings["window"], len(levels), len(levels) + 1)
    return rule, levels, tuple(window)


def refuse(vllm_config: Any) -> None:
    """Refuse options that the plug-in does not serve.

    Raises:
        ValueError: the message names the option.
    """
    speculative, mode = vllm_config.speculative_config, vllm_config.model_config.logprobs_mode
    method = "standard" if speculative is None else speculative.rejection_sample_method
    if method != "standard":
        raise ValueError(
            f"polyspec: expected rejection_sample_method 'standard', which keeps the target's "
            f"distribution, given {method!r}"
        )
    if mode not in ("raw_logprobs", "raw_logits"):
        raise ValueError(
            f"polyspec: expected logprobs_mode raw_logprobs or raw_logits, given {mode!r}"
        )
