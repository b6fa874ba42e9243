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
from typing import Any

from .options import VERSIONS, Options, refuse

__all__ = ["Options", "register"]

_WORKERS = "vllm.v1.worker.worker_base"
_MARK = "polyspec"  # attribute of replacements, and of configurations with the plug-in


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
    refuse(config)
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
