"""The installed library, for all that is built on it."""

from collections.abc import Callable
from pathlib import Path

import native_builds
import pytest


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return native_builds.installer(tmp_path_factory.mktemp("polyspec"))


@pytest.fixture(scope="session")
def prefix(installed: Callable[[str], Path]) -> Path:
    return installed("static")
