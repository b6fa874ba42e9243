"""For all tests: GPU tests skip without a GPU, hypothesis is deterministic, torch is seeded."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

import polyspec_ext as ps

hypothesis.settings.register_profile("polyspec", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("polyspec")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ps.has_cuda():
        return
    skip = pytest.mark.skip(reason="no CUDA device, or a build without CUDA kernels")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured in tests is not kept for the user, nor the user's used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Runs a test on the CPU and, where there is one, on the GPU."""
    return torch.device(request.param)
