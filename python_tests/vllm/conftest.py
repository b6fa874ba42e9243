"""Skips without vLLM, and the models of its engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm_engines as engines

import polyspec_ext.integrations.vllm as plugin


@pytest.fixture(scope="session", autouse=True)
def _registered() -> None:
    pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` installs it")
    plugin.register()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a target, a middle and a drafter."""
    root = tmp_path_factory.mktemp("models")
    for name, layers in (("target", 2), ("middle", 1), ("drafter", 1)):
        engines.save_llama(root / name, seed=len(name), layers=layers)
    return root


@pytest.fixture(scope="session")
def law(models: Path) -> engines.Law:
    return engines.Law(models / "target")
