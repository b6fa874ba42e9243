"""Drives CMake: only CMakeLists.txt says which targets are built, and how."""

import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def project_version() -> str:
    text = (ROOT / "CMakeLists.txt").read_text()
    found = re.search(r"project\(polyspec VERSION ([0-9.]+)", text)
    assert found is not None
    return found.group(1)


def require_setuptools() -> None:
    """Refuse a release that cannot read pyproject.toml, with a clear error."""
    if int(setuptools.__version__.split(".")[0]) < 77:
        sys.exit(
            "polyspec_ext cannot be built: expected setuptools >= 77, as a fresh environment of "
            f"Python 3.11 does not have, found {setuptools.__version__}.\n"
            f"Install first: {sys.executable} -m pip install 'setuptools>=77'"
        )


def report_left_out(build: Path) -> None:
    """Say loudly that CUDA kernels were left out. pip shows no output of a build that succeeds, so
    the terminal is written to."""
    found = re.search(
        r"^POLYSPEC_CUDA_LEFT_OUT:INTERNAL=(.+)$", (build / "CMakeCache.txt").read_text(), re.M
    )
    if found is None:
        return
    text = f"\nWARNING: {found.group(1)}\n\n"
    sys.stderr.write(text)
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write(text)


def require_tools() -> None:
    """Names everything that is missing at once, with the command that brings it."""
    # cmake and ninja of the environment that runs this, also when it is not activated.
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    missing = [name for name in ("torch", "pybind11") if importlib.util.find_spec(name) is None]
    missing += [name for name in ("cmake", "ninja") if shutil.which(name) is None]
    if missing:
        wanted = " ".join("'torch>=2.11'" if name == "torch" else name for name in missing)
        sys.exit(
            f"polyspec_ext cannot be built: {', '.join(missing)} not found for {sys.executable}.\n"
            f"Install first: {sys.executable} -m pip install {wanted}\n"
            "and then: pip install --no-build-isolation -e ."
        )


class CMakeBuild(build_ext):
    """Configures, builds and installs CMake's component `python` where setuptools wants it."""

    def build_extension(self, ext: Extension) -> None:
        require_tools()
        # One build folder per interpreter, so that environments can share a checkout.
        tag = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
        build = Path(os.environ.get("POLYSPEC_BUILD_DIR") or ROOT / "build" / f"python-{tag}")
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
        configure += ["-DPOLYSPEC_BUILD_PYTHON=ON", f"-DPython_EXECUTABLE={sys.executable}"]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        install = ["cmake", "--install", str(build), "--component", "python"]
        try:
            subprocess.run(configure, check=True)
            subprocess.run(["cmake", "--build", str(build)], check=True)
            subprocess.run([*install, "--prefix", str(target)], check=True)
        except subprocess.CalledProcessError as failure:
            sys.exit(f"polyspec_ext: '{shlex.join(failure.cmd)}' failed; CMake's message is above")
        report_left_out(build)


require_setuptools()
setup(
    version=project_version(),
    ext_modules=[Extension("polyspec_ext._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
