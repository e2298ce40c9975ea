"""The versions this package was tested with, and a warning at import for those outside."""

from __future__ import annotations

import re
import warnings
from importlib import metadata

# package → (lowest, highest) that tests have passed with; a version counts as far as it is written here.
TESTED = {
    "torch": ("2.11", "2.13"),
    "triton": ("3.6", "3.6"),
    "liger-kernel": ("0.8.5", "0.8"),
    "quack-kernels": ("0.6.5", "0.6.5"),
    "nvidia-cutlass-dsl": ("4.8.1", "4.8.1"),
    "transformers": ("5.0", "5.24"),
}


def installed(package: str) -> str | None:
    """The version of a package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def warn_about_untested_versions() -> None:
    outside = []
    for package, (lowest, highest) in TESTED.items():
        found = installed(package)
        if found and not _between(found, lowest, highest):
            tested = lowest if lowest == highest else f"{lowest} to {highest}"
            outside.append(f"{package} {found} (tested: {tested})")
    if outside:
        warnings.warn(
            f"liger-cutedsl was not tested with {', '.join(outside)}. It may work; `python -m pytest` of its "
            f"repository tells, and the tested versions are in its constraints-dev.txt",
            RuntimeWarning,
            stacklevel=3,
        )


def _between(version: str, lowest: str, highest: str) -> bool:
    found, low, high = (tuple(int(n) for n in re.findall(r"\d+", v.split("+")[0])) for v in (version, lowest, highest))
    return found[: len(low)] >= low and found[: len(high)] <= high
