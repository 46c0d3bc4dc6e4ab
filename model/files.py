"""Finding the files of a training text, and refusing those that can't be one."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from blocktrain.protocol.errors import DataError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def find_files(path_spec: str) -> list[tuple[Path, int]]:
    """Paths and sizes (bytes) of a file, of all files under a folder, or of a glob's matches.

    They come in the order of their paths; `**` in a glob matches any folders. Under a folder,
    hidden files and folders and linked folders are skipped. Empty files among others are skipped.
    A file that is reached twice through links counts once, so that a split can't put it in both
    parts.

    Raises:
        DataError: nothing there, no files, nothing but empty files, not a regular file, unreadable,
            or a git-lfs pointer in place of its content.
    """
    seen: set[tuple[int, int]] = set()
    found = []
    for path in sorted(_candidates(path_spec)):
        status = _inspect(path)
        identity = (status.st_dev, status.st_ino)
        if status.st_size and identity not in seen:
            found.append((path, status.st_size))
        seen.add(identity)
    if not found:
        what = "the file is empty" if len(seen) == 1 else f"all {len(seen)} files are empty"
        raise DataError(f"{path_spec}: {what}; give a text with something in it")
    return found


def unreadable(path: object, error: OSError | ValueError) -> DataError:
    """The error to raise when the system would not let us read `path`."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return DataError(f"{path}: can't be read: {reason}; check the path and its permissions")


def _candidates(path_spec: str) -> list[Path]:
    """The regular files that a path or a glob names; never an empty list."""
    path = Path(os.path.expanduser(path_spec))  # noqa: PTH111 - Path's raises for an unknown ~user
    try:
        mode = path.stat().st_mode if path_spec else 0
    except FileNotFoundError:
        if not glob.has_magic(path_spec):
            raise DataError(f"{path_spec}: no such file or folder; check the path") from None
        matches = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path's also matches hidden files
        return _regular(map(Path, matches), f"{path_spec}: the pattern matches no files; check it")
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise unreadable(repr(path_spec), error) from None
    if stat.S_ISDIR(mode):
        return _regular(
            _walk(path), f"{path_spec}: the folder holds no files (hidden ones don't count); add some"
        )
    if not stat.S_ISREG(mode):
        raise DataError(
            f"{path_spec or 'path of the text'}: not a file, a folder or a glob; give one of these"
        )
    return [path]


def _walk(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise unreadable(error.filename, error)

    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in files if not name.startswith("."))


def _regular(paths: Iterable[Path], message: str) -> list[Path]:
    found = [path for path in paths if _is_regular(path)]
    if not found:
        raise DataError(message)
    return found


def _is_regular(path: Path) -> bool:
    """False for folders, pipes, sockets, devices and dangling links."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unreadable(path, error) from None


def _inspect(path: Path) -> os.stat_result:
    """Status of a file that has shown that it can be read and is no git-lfs pointer."""
    try:
        with path.open("rb") as file:
            head, status = file.read(len(_LFS_POINTER)), os.fstat(file.fileno())
    except OSError as error:
        raise unreadable(path, error) from None
    if head == _LFS_POINTER:
        raise DataError(f"{path}: a git-lfs pointer, not the text itself; run `git lfs pull` in its folder")
    return status
