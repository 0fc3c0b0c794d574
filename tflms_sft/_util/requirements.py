"""Installed TensorFlow and Keras, and Keras's backend, against the supported ones, without an import of either."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys

from rewriters.errors import RewriteError
from tflms_sft._version import SUPPORTED_RELEASES

TENSORFLOW = "tensorflow"
"""Name of the only supported backend of Keras."""

BACKEND_REMEDY = 'Set the environment variable KERAS_BACKEND="tensorflow"'

TITLES = {"tensorflow": "TensorFlow", "keras": "Keras"}

_DISTRIBUTIONS = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos", "tf-nightly"),
    "keras": ("keras", "keras-nightly"),
}
"""Distributions that install a module, the usual one first."""


def installed_version(package: str) -> str | None:
    """Return the version of an imported or installed package; `None` if it is absent or has an unknown distribution."""
    version = getattr(sys.modules.get(package), "__version__", None)
    if version is not None:
        return str(version)
    import importlib.metadata  # Slow, and `tflms-sft --help` must answer at once.

    for name in _DISTRIBUTIONS.get(package, (package,)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    import importlib.util

    return package in sys.modules or importlib.util.find_spec(package) is not None


def keras_backend() -> str:
    """Return the backend of the imported Keras, or the one that Keras would choose at its import."""
    backend = getattr(getattr(sys.modules.get("keras"), "config", None), "backend", None)
    if backend is not None:
        return str(backend())
    home = os.environ.get("KERAS_HOME") or os.path.join(os.path.expanduser("~"), ".keras")
    named = os.environ.get("KERAS_BACKEND")
    with contextlib.suppress(OSError, ValueError), open(os.path.join(home, "keras.json"), encoding="utf-8") as file:
        config = json.load(file)
        named = named or (config.get("backend") if isinstance(config, dict) else None)
    return str(named or TENSORFLOW)


def check_backend() -> None:
    """Refuse another Keras backend than TensorFlow.

    The first use of a public name or module calls this function, and each command that builds a model.

    Raises:
        RewriteError: With the backend and the remedy.
    """
    backend = keras_backend()
    if backend != TENSORFLOW:
        raise RewriteError(
            f"tflms-sft rewrites TensorFlow graphs, and the backend of Keras is {backend!r}. {BACKEND_REMEDY}, before "
            "Keras is imported."
        )


def release_of(version: str) -> tuple[int, int] | None:
    """Return major and minor number of a version such as `"2.18.0rc1"`; `None` for other text."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match[1]), int(match[2]))


def is_too_old(package: str, version: str) -> bool:
    """Return whether a version is older than the oldest supported release."""
    release = release_of(version)
    oldest, _ = SUPPORTED_RELEASES[package]
    return release is not None and release < oldest


def is_untested(package: str, version: str) -> bool:
    """Return whether a version is newer than the newest tested release."""
    release = release_of(version)
    _, newest = SUPPORTED_RELEASES[package]
    return release is not None and release > newest


def supported_range(package: str) -> str:
    """Return a text such as `"2.18 to 2.21"`."""
    oldest, newest = SUPPORTED_RELEASES[package]
    return "{}.{} to {}.{}".format(*oldest, *newest)


def pip_command() -> str:
    """Return the command that installs supported versions."""
    bounds = (f'"{name}>={first[0]}.{first[1]},<{last[0] + 1}"' for name, (first, last) in SUPPORTED_RELEASES.items())
    return f"pip install --upgrade {' '.join(bounds)}"


def check_versions(*, quiet: bool = False) -> None:
    """Refuse missing packages and old versions, and print one line about each that is newer than the tested versions.

    The first use of a public name or module calls this function, and each command of the command line except `doctor`.

    Args:
        quiet: Whether to print nothing, neither now nor in a later call.

    Raises:
        RewriteError: With the versions found, the supported versions and the command that installs them.
    """
    notices = pending_notices()
    for notice in [] if quiet else notices:
        print(f"tflms-sft: {notice}", file=sys.stderr, flush=True)
    notices.clear()


@functools.cache
def pending_notices() -> list[str]:
    """Return the notices that `check_versions` has not printed yet."""
    versions = {package: installed_version(package) for package in SUPPORTED_RELEASES}
    installed = {package: version for package, version in versions.items() if version is not None}
    old = [f"{TITLES[package]} {version}" for package, version in installed.items() if is_too_old(package, version)]
    missing = [
        f"no {TITLES[package]}" for package in versions if package not in installed and not is_installed(package)
    ]
    if old or missing:
        supported = " and ".join(f"{TITLES[package]} {supported_range(package)}" for package in SUPPORTED_RELEASES)
        found = " and ".join([*old, *missing])
        raise RewriteError(
            f"tflms-sft needs {supported}. Found: {found}. Install supported versions with: {pip_command()}"
        )
    return [untested_text(package, version) for package, version in installed.items() if is_untested(package, version)]


def untested_text(package: str, version: str) -> str:
    """Return the notice about a version that is newer than the tested versions."""
    _, (major, minor) = SUPPORTED_RELEASES[package]
    return (
        f"{TITLES[package]} {version} is newer than the tested versions ({supported_range(package)}). Check it with "
        f'`tflms-sft doctor`, or install a tested version with: pip install "{package}<{major}.{minor + 1}"'
    )
