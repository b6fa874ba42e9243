"""For all tests: GPU tests skip without a GPU, hypothesis is deterministic, torch is seeded."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import native_builds
import pytest
import torch

import polyspec_ext as ps

hypothesis.settings.register_profile("polyspec", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("polyspec")


# For benchmarks and training. Last, so that an installed package goes first.
sys.path.append(str(Path(__file__).parents[1]))

# Shells have their background jobs ignore Ctrl-C, and programs that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def slow_tests() -> dict[str, set[str]]:
    """Read slow.txt: functions with instances that `make test` leaves out, and the instances
    kept."""
    kept: dict[str, set[str]] = {}
    function = ""
    for line in (Path(__file__).parent / "slow.txt").read_text().splitlines():
        if line.startswith(" "):
            kept[function].add(line.strip())
        elif line and not line.startswith("#"):
            kept[function := line] = set()
    return kept


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    kept = slow_tests()
    for item in items:
        function, _, instance = item.nodeid.removeprefix("python_tests/").partition("[")
        left_out = function in kept and instance.removesuffix("]") not in kept[function]
        if left_out or "installed" in getattr(item, "fixturenames", ()):  # it builds with cmake
            item.add_marker(pytest.mark.slow)
    if ps.has_cuda():
        return
    skip = pytest.mark.skip(reason="no CUDA device, or a build without CUDA kernels")
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # no folder of this name
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measurements of tests apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _device_answers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wait for the device after each of its tests, so that a fault names the test."""
    yield
    if request.node.get_closest_marker("gpu") is not None:
        torch.cuda.synchronize()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of all processes of a run; lock it to write."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def untrained(shared_folder: Path) -> Path:
    folder = shared_folder / "tiny"
    with native_builds.locked(shared_folder):
        if not folder.exists():
            import saved_chain  # which loads much that most tests do not need

            saved_chain.save(folder)
    return folder


@pytest.fixture
def tiny_untrained(untrained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYSPEC_TINY", str(untrained))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Runs a test on the CPU and, where there is one, on the GPU."""
    return torch.device(request.param)
