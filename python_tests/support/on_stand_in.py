"""A plugin of pytest: the compiled module is the one that POLYSPEC_MODULE names.

Its operators run the CUDA kernels on the host (csrc/tests/cuda_on_cpu).
"""

import importlib.util
import os
import sys

import pytest
import torch  # noqa: F401  (the module needs its libraries)

NAME = "polyspec_ext._C"


def _load() -> None:
    spec = importlib.util.spec_from_file_location(NAME, os.environ["POLYSPEC_MODULE"])
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])


_load()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Nothing was shown if no kernel ran."""
    launched = sys.modules[NAME].launches()
    print(f"\n{launched} kernels launched")
    if not launched:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
