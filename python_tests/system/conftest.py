"""The installed library, for all that is built on it."""

import os
from collections.abc import Callable
from pathlib import Path

import native_builds
import pytest


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    folder = folder / "polyspec"
    folder.mkdir(exist_ok=True)
    return native_builds.installer(folder)


@pytest.fixture(scope="session")
def prefix(installed: Callable[[str], Path]) -> Path:
    return installed("static")
