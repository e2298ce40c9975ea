"""Where compiled kernels are kept between processes.

A cached kernel is machine code that the next process loads and runs: nobody but its user may write it. quack's own
default lies below the shared temporary folder, where whoever comes first owns it. Unless QUACK_CACHE_DIR says where,
ours is ~/.cache/liger_cutedsl/kernels (below XDG_CACHE_HOME, if set), readable and writable by its user alone; where
there is no home that can be written, as for a container's arbitrary user, a folder of that user in the temporary one.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
import warnings
from pathlib import Path


def use_private_cache() -> None:
    """Points quack at a folder of the user's own. Where none can be written, or others can write to it, kernels live in
    a temporary one as long as the process, with a warning; what a read-only folder holds is still found."""
    import quack.cache as quack_cache

    if not quack_cache.CACHE_ENABLED:
        return
    # A kernel is found again only by the very sources that compiled it: quack hashes its own, and these too.
    package = Path(__file__).parent
    if package not in quack_cache.EXTRA_SOURCE_DIRS:
        quack_cache.EXTRA_SOURCE_DIRS.append(package)
    folder = chosen_folder(quack_cache.CACHE_DIR)
    obstacle = obstacle_of(folder)
    if obstacle is None:
        quack_cache.CACHE_DIR = str(folder)
        return
    readable = folder if "others" not in obstacle else None
    quack_cache.CACHE_DIR = str(_temporary(readable))
    warnings.warn(
        f"compiled kernels cannot be kept in {folder}: {obstacle}. Each process compiles what it does not find, 2 "
        f"to 4 seconds each; QUACK_CACHE_DIR=FOLDER chooses another folder",
        RuntimeWarning,
        stacklevel=2,
    )


def chosen_folder(setting: str | None) -> Path:
    """QUACK_CACHE_DIR's folder, or the first of the user's own that can be written."""
    if setting:
        return Path(setting)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "liger_cutedsl" / "kernels"
    usable = folder.is_absolute() and obstacle_of(folder) is None
    own = f"liger_cutedsl-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    # itself in the temporary folder, where nobody else can rename it: its owner is checked
    return folder if usable else Path(tempfile.gettempdir()) / own


def obstacle_of(folder: Path) -> str | None:
    """Why kernels cannot be kept there, or None. Creates the folder for its user alone."""
    try:
        for part in reversed((folder, *folder.parents)):
            part.mkdir(mode=0o700, exist_ok=True)  # parents too: mkdir(parents=True) gives them the default mode
        found = folder.stat()
    except OSError as error:
        return f"it cannot be created ({error})"
    if hasattr(os, "getuid"):
        if found.st_mode & stat.S_IWOTH:
            return "others can write to it, and what lies there runs as you (chmod o-w makes it usable)"
        if found.st_uid not in (os.getuid(), 0):
            return "it belongs to others, and what lies there runs as you"
    if not os.access(folder, os.W_OK):
        return "it cannot be written"
    return None


def _temporary(readable: Path | None) -> Path:
    """A folder that goes with the process, with links to the kernels of another."""
    temporary = Path(tempfile.mkdtemp(prefix="liger_cutedsl-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    for kernel in readable.glob("*/*.o") if readable is not None and readable.is_dir() else ():
        link = temporary / kernel.parent.name / kernel.name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(kernel.resolve())
    return temporary
