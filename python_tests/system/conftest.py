"""The installed library, for all that is built on it."""

from collections.abc import Callable
from pathlib import Path

import native_builds
import pytest


@pytest.fixture(scope="session")
def installed(shared_folder: Path) -> Callable[[str], Path]:
    folder = shared_folder / "polyspec"
    folder.mkdir(exist_ok=True)
    return native_builds.installer(folder)


@pytest.fixture(scope="session")
def prefix(installed: Callable[[str], Path]) -> Path:
    return installed("static")
