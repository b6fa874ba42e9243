"""vLLM's plug-in: this package's rules verify drafts inside vLLM, and its chains draft.

vLLM calls `register` in each of its processes. Sampling is replaced only after an engine with
``additional_config={"polyspec": {...}}`` (`Options`) is configured. vLLM hides the errors of a
plug-in, so checks run when the engine is configured, and when its workers are created.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any

from ... import arguments
from ...policies.adaptive import Adaptive, named

__all__ = ["Options", "register"]

PROPOSER = "polyspec_ext.integrations.vllm.chain.ChainProposer"
VERSIONS = ("0.32", "0.33")
_WORKERS = "vllm.v1.worker.worker_base"
_MARK = "polyspec"  # attribute of replacements, and of configurations with the plug-in


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
            policy = changed(named(policy), max_windows=list(window))
            ranks = vllm_config.parallel_config.tensor_parallel_size
            if ranks > 1:  # ranks would choose by different times
                raise ValueError(
                    f"policy: expected none with tensor parallelism of {ranks}, given one"
                )
        return Options(rule, levels, window, policy)


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


# ---- hooks in vLLM -------------------------------------------------------------------------------


def register() -> None:
    """Hook vLLM's configuration, which activates the plug-in on request. Idempotent."""
    from vllm.config import VllmConfig

    replace(VllmConfig, "__post_init__", _configure)
    if _WORKERS in sys.modules:  # a worker's process does not check the configuration
        _watch_workers()


def replace(owner: Any, name: str, function: Any) -> None:
    """Replace a function of a class or module once, by a call of `function(original, ...)`.

    Raises:
        RuntimeError: the name is missing.
    """
    original = getattr(owner, name, None)
    if original is None:
        raise RuntimeError(
            f"polyspec: expected {name} in {owner}, which this version of vLLM does not have; "
            f"supported are {', '.join(VERSIONS)}"
        )
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def replaced(*args: Any, **options: Any) -> Any:
        return function(original, *args, **options)

    setattr(replaced, _MARK, True)
    setattr(owner, name, replaced)


def _watch_workers() -> None:
    replace(importlib.import_module(_WORKERS).WorkerBase, "__init__", _make_worker)


def _configure(original: Any, config: Any) -> None:
    """Check an engine's configuration when it is created."""
    from vllm.version import __version__

    is_async = config.scheduler_config.async_scheduling
    options = Options.of(config)
    if options is None:
        original(config)
        return
    replace(type(config), "_get_v2_model_runner_unsupported_features", _unsupported)
    original(config)
    if ".".join(__version__.split(".")[:2]) not in VERSIONS:
        raise RuntimeError(f"polyspec: expected vLLM {', '.join(VERSIONS)}, given {__version__}")
    speculative, mode = config.speculative_config, config.model_config.logprobs_mode
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
    _watch_workers()
    _serve_parameters(config)
    scheduler = config.scheduler_config
    if scheduler.async_scheduling and not config.use_v2_model_runner:
        if is_async:
            raise ValueError(
                "async_scheduling: expected it off for polyspec on the V1 model runner, which "
                "needs accepted tokens on the host; pass --no-async-scheduling"
            )
        scheduler.async_scheduling = False
    below = " <- ".join(options.levels) or "vLLM's own"
    # vLLM's handlers show loggers below its own.
    logging.getLogger("vllm.polyspec").info(
        "polyspec: active, rule %s, drafts: %s", options.rule, below
    )


def _unsupported(original: Any, config: Any) -> list[str]:
    from vllm import envs

    names: list[str] = original(config)
    options = Options.of(config)
    chain = envs.VLLM_USE_V2_MODEL_RUNNER and options is not None and options.levels
    return [name for name in names if not (chain and "custom_class" in name)]


def _serve_parameters(config: Any) -> None:
    """Allow min-p and logit bias under speculation, which vLLM refuses."""
    from vllm.sampling_params import SamplingParams

    if config.speculative_config is not None:
        object.__setattr__(config.speculative_config, _MARK, True)

    def validate(original: Any, parameters: Any, speculative: Any) -> None:
        if not hasattr(speculative, _MARK):
            original(parameters, speculative)

    replace(SamplingParams, "_validate_spec_decode", validate)


def _make_worker(original: Any, worker: Any, vllm_config: Any, *args: Any, **options: Any) -> None:
    original(worker, vllm_config, *args, **options)
    if Options.of(vllm_config) is not None:
        runner = "v2" if vllm_config.use_v2_model_runner else "sampler"
        importlib.import_module(f"{__name__}.{runner}").install()
