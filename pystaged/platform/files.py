"""Atomic writing of files, and safe reading of untrusted ones."""

from __future__ import annotations

import codecs
import errno
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from pystaged.platform import system

_PART = re.compile(r"\.[0-9a-f]{16}\.part")
_CHUNK = 1 << 22
_LONGEST_WRITE = 86400.0  # seconds; where writers hold no lock, older files are leftovers
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DIGEST_BYTES = 16


def update(digest: Any, file: BinaryIO) -> None:
    """Add the rest of a file to a hashlib digest."""
    while chunk := file.read(_CHUNK):
        digest.update(chunk)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`, which replaces `path` if the block ends without an error. Links are followed.
    Raises as destination."""
    path = destination(path)
    with part_file(path) as part:
        yield part
        part.replace(path)


@contextmanager
def part_file(path: Path) -> Iterator[Path]:
    """An empty file beside `path` with a unique name, removed when the block ends unless it was moved.

    It is locked while the block runs. Files without a lock, which killed writers left, are removed first. If the block
    raises an OSError of a full disk, it is raised again with `path` in it.
    """
    for other in path.parent.iterdir():
        if other.name.startswith(path.name) and _PART.fullmatch(other.name[len(path.name) :]):
            remove_leftover(other)
    part, file = _locked_part(path)
    with closing(file):
        try:
            yield part
        except OSError as error:
            if error.errno in _FULL:  # raised by a write, without a file name
                raise OSError(error.errno, error.strerror, os.fspath(path)) from None
            raise
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other processes that ask for the same out of a folder while the block runs. Raises OSError where one is
    there already."""
    with (folder / ".lock").open("ab") as file:
        try:
            system.lock(file)
        except BlockingIOError:
            raise OSError(f"another process works in {folder}; wait for its end, or choose another folder") from None
        except OSError:  # a file system without locks
            pass
        yield


def keep(path: Path, data: bytes) -> None:
    """Write a file of the cache folder atomically for `kept`, readable for this user only. Errors are ignored, because
    caches are optional."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with part_file(path) as part:
            part.chmod(0o600)
            part.write_bytes(data + _digest(data))
            part.replace(path)


def kept(path: Path) -> bytes | None:
    """What `keep` wrote; None for no file. A damaged one is removed."""
    try:
        with open_regular(path) as file:
            data = file.read()
    except (OSError, ValueError):
        return None
    data, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if digest == _digest(data):
        return data
    with suppress(OSError):
        path.unlink()
    return None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def destination(path: Path) -> Path:
    """The path at which a file will be written, with links followed. Raises OSError for a folder or a device, or where
    its folder does not exist."""
    try:
        target = path.resolve()
    except RuntimeError:  # a loop of links, before Python 3.13
        raise OSError(f"{path} is a link that leads back to itself") from None
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    if target.exists() and not target.is_file():
        raise OSError(f"{path} is a device or a pipe and is not replaced; name a file")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to write {path.name} in")
    return target


def writable(path: Path | None, usual: Path) -> Path:
    """Where a long work will write its file: the path that is named, or the usual one, whose folder is made. Fails now,
    not after the work, if no file can be made there; errors as in destination."""
    if path is None:
        usual.parent.mkdir(parents=True, exist_ok=True)
    target = destination(path or usual)
    with part_file(target):
        pass
    return target


def expanded(path: str | Path) -> Path:
    """A path with ~ or ~NAME replaced by a home folder. Raises FileNotFoundError if that does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise FileNotFoundError(f"there is no home folder for {path}") from None


def leftovers(folder: Path) -> list[Path]:
    """Unfinished files in a folder and those below, except those being written."""
    return [part for part in sorted(folder.rglob("*.part")) if _is_leftover(part, remove=False)]


def remove_leftover(part: Path) -> None:
    """Remove an unfinished file, unless it is being written."""
    _is_leftover(part, remove=True)


def read_small(path: Path, most_bytes: int) -> bytes:
    """Read a regular file; errors as in open_regular, and ValueError for one that is larger than `most_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise ValueError(f"{path} is larger than {most_bytes / 1e6:g} MB")
        return file.read(size)


def lines_of(name: object, data: bytes) -> Iterator[tuple[str, str]]:
    """The lines of a file of that name that are not blank, each behind its place, such as "prompts.txt, line 3". Raises
    ValueError for one that is not UTF-8."""
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        where = f"{name}, line {number}"
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{where}: not UTF-8") from None
        if text.strip():
            yield where, text


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; never blocks on pipes or devices. Raises OSError where it cannot be opened, and
    ValueError for what is no regular file."""
    # Opening a pipe would wait for its writer, and a device need not end.
    descriptor = os.open(path, system.READ_ONLY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb")


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise OSError if the disk has no room for a file, naming the folder and the needed and free bytes."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if free < num_bytes:
        raise OSError(f"no room in {folder}: {num_bytes / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free")


def cache_folder() -> Path:
    """The user's cache folder for pystaged; without a home folder, a path that cannot exist."""
    import platformdirs  # noqa: PLC0415

    with suppress(RuntimeError):
        folder = Path(platformdirs.user_cache_dir("pystaged"))
        if folder.is_absolute():
            return folder
    # Otherwise the cache would be a folder named ~ in the current folder.
    return Path(os.devnull) / "there is no home folder, set XDG_CACHE_HOME"


def _locked_part(path: Path) -> tuple[Path, BinaryIO]:
    """Create and lock a new file."""
    while True:
        part = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part")
        file = part.open("xb")
        if not system.POSIX:
            file.close()
            return part, file
        try:
            system.lock(file)
            locked = part.exists()
        except BlockingIOError:
            locked = False  # another process tests whether it is a leftover
        except OSError:
            locked = True  # the file system has no locks, and no file of it counts as a leftover
        if locked:
            return part, file
        # Another process took it for a leftover before it was locked.
        file.close()
        part.unlink(missing_ok=True)


def _is_leftover(part: Path, *, remove: bool) -> bool:
    try:
        found = part.lstat()
        if not stat.S_ISREG(found.st_mode) or (not system.POSIX and time.time() - found.st_mtime < _LONGEST_WRITE):
            return False
        with part.open("r+b") if system.POSIX else nullcontext() as file:
            if file:
                system.lock(file)
            if remove:
                part.unlink()
        return True
    except OSError:  # locked, removed, or another user's
        return False
