"""Where compiled kernels are kept between processes.

A cached kernel is machine code that the next process loads and runs: nobody but its user may write it. quack's own
default lies below the shared temporary folder, where whoever comes first owns it. Unless QUACK_CACHE_DIR says where,
ours is ~/.cache/liger_cutedsl/kernels (below XDG_CACHE_HOME, if set), readable and writable by its user alone; where
there is no home that can be written, as for a container's arbitrary user, a folder of that user in the temporary one.

Who can write to a folder can put a kernel into it, and who can write to one above it can put another in its place,
unless that one is sticky, as /tmp is. So both are looked at, along the path as it is written and as links lead it.
"""

from __future__ import annotations

import atexit
import contextlib
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
    readable = folder if others_obstacle(folder) is None else None
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
    except OSError as error:
        return f"it cannot be created ({error})"
    obstacle = others_obstacle(folder)
    if obstacle is None and not os.access(folder, os.W_OK):
        return "it cannot be written"
    return obstacle


def others_obstacle(folder: Path) -> str | None:
    """Why what lies there may be others', or None."""
    if not hasattr(os, "getuid") or not os.path.exists(folder):
        return None
    written, real = folder.absolute(), folder.resolve()
    for part in dict.fromkeys((*reversed(written.parents), written, *reversed(real.parents), real)):
        reason = _others_write(part, part == real)
        if reason is not None:
            return reason.format(part="it" if part in (written, real) else part)
    if not real.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        return None  # nobody else gets there
    for part in real.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process writes kernels
            if _others_write(part, within=True) is not None:
                return f"others can write to {part}, and what lies there runs as you (chmod 700 {real} makes it usable)"
    return None


def _others_write(part: Path, within: bool) -> str | None:
    """How others could put something into a folder, or into its place; or None. within: kernels lie in it."""
    found = part.lstat()
    if found.st_uid not in (os.getuid(), 0) and (within or found.st_uid != _NOBODY):
        return "{part} belongs to others, and what lies there runs as you"
    if stat.S_ISLNK(found.st_mode):
        around = part.parent.stat().st_mode
        shared = around & stat.S_ISVTX and around & (stat.S_IWGRP | stat.S_IWOTH)
        return "{part} is a link in a folder that others can write to, and may lead anywhere" if shared else None
    if found.st_mode & stat.S_ISVTX and not within:
        return None
    group = found.st_mode & stat.S_IWGRP and (within or not _is_private(found.st_gid))
    remedy = ",".join(["o-w"] * bool(found.st_mode & stat.S_IWOTH) + ["g-w"] * bool(group))
    if not remedy:
        return None
    return "others can write to {part}, and what lies there runs as you (chmod " + remedy + " makes it usable)"


_NOBODY = 65534  # owns what a container's user namespace has no name for, such as its /


def _is_private(gid: int) -> bool:
    """Whether a group is the one its user has alone, in whose name a umask of 002 lets ~/.cache be written."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _temporary(readable: Path | None) -> Path:
    """A folder that goes with the process, with links to the kernels of another."""
    temporary = Path(tempfile.mkdtemp(prefix="liger_cutedsl-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    for kernel in readable.glob("*/*.o") if readable is not None and readable.is_dir() else ():
        link = temporary / kernel.parent.name / kernel.name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(kernel.resolve())
    return temporary
