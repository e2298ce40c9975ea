"""The versions this package was tested with, and a warning at import where its kernels may not compile."""

from __future__ import annotations

import warnings
from importlib import metadata

from packaging.version import InvalidVersion, Version

# package → (lowest, highest) that tests have passed with; a version counts as far as it is written here.
TESTED = {
    "torch": ("2.11", "2.14"),
    "triton": ("3.6", "3.8"),
    "liger-kernel": ("0.8.4", "0.8"),
    "quack-kernels": ("0.6.5", "0.6.5"),
    "nvidia-cutlass-dsl": ("4.8.1", "4.8.1"),
    "transformers": ("5.0", "5.24"),
    "trl": ("1.15", "1.16"),
}
# Pinned, because their interfaces are young: another one is a broken installation rather than a newer one.
PINNED = ("quack-kernels", "nvidia-cutlass-dsl")


def installed(package: str) -> str | None:
    """The version of a package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def tested(package: str) -> str:
    """The versions of a package that tests have passed with, in words."""
    lowest, highest = TESTED[package]
    return lowest if lowest == highest else f"{lowest} to {highest}"


def is_untested(package: str) -> bool:
    """Whether a package is installed in a version that tests have not passed with."""
    found = installed(package)
    return found is not None and not _between(found, *TESTED[package])


def warn_about_untested_versions() -> None:
    """At import, about the pinned packages alone; python -m liger_cutedsl tells about all."""
    outside = [
        f"{package} {installed(package)} (tested: {tested(package)})" for package in PINNED if is_untested(package)
    ]
    if outside:
        warnings.warn(
            f"liger-cutedsl was not tested with {', '.join(outside)}. It may work; `python -m pytest` of its "
            f"repository tells, and the tested versions are in its constraints-dev.txt",
            RuntimeWarning,
            stacklevel=3,
        )


def _between(version: str, lowest: str, highest: str) -> bool:
    try:
        found = Version(version).release
    except InvalidVersion:
        return False
    low, high = Version(lowest).release, Version(highest).release
    return low <= found[: len(low)] and found[: len(high)] <= high
