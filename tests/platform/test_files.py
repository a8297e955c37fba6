"""Files appear whole or not at all, whoever else writes or is killed; what is read is bounded."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pystaged.platform.files import check_room, leftovers, part_file, read_small, remove_leftover, whole_file

WRITER = """
import os, sys
from pathlib import Path
from pystaged.platform.files import whole_file
os.getpid = lambda: 1  # as in a container of its own
with whole_file(Path(sys.argv[1])) as part:
    part.write_text("half of one")
    print("begun", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def writer(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process in the middle of writing `file`."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path / "file"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def test_two_threads(tmp_path: Path) -> None:
    """The one that ends first is not torn by the other."""
    path = tmp_path / "file"
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        with whole_file(path) as part:
            part.write_text("slow")
            begun.set()
            go_on.wait(600)

    thread = threading.Thread(target=slow)
    thread.start()
    begun.wait(600)
    with whole_file(path) as part:
        part.write_text("quick")
    assert path.read_text() == "quick"
    go_on.set()
    thread.join()
    assert path.read_text() == "slow"
    assert list(tmp_path.iterdir()) == [path]


def test_two_processes_of_one_pid(
    tmp_path: Path, writer: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with whole_file(tmp_path / "file") as part:
        part.write_text("whole")
    assert (tmp_path / "file").read_text() == "whole"
    writer.communicate(timeout=600)
    assert (writer.returncode, (tmp_path / "file").read_text()) == (0, "half of one")
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_writer_left_goes(tmp_path: Path, writer: subprocess.Popen[str]) -> None:
    path = tmp_path / "file"
    (part,) = tmp_path.iterdir()
    assert leftovers(tmp_path) == []  # its writer lives
    remove_leftover(part)
    assert part.exists()
    writer.send_signal(signal.SIGKILL)
    writer.communicate(timeout=600)
    assert leftovers(tmp_path) == [part]
    kept = ["file.of-a-user.part", f"other.{'0' * 16}.part"]
    for name in kept:
        (tmp_path / name).write_text("kept")
    with whole_file(path) as new:
        new.write_text("whole")
    assert sorted(found.name for found in tmp_path.iterdir()) == ["file", *kept]


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def half(part: Path) -> None:
        part.write_text("half")
        raise KeyError

    with pytest.raises(KeyError), whole_file(path) as part:
        half(part)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_said_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write(part: Path) -> None:
        part.write_text("half")
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(OSError, match="no space") as caught, whole_file(path) as part:
        write(part)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_can_be_read_by_others(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with whole_file(tmp_path / "file"):
        pass
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("there", [True, False])
def test_links_are_followed(tmp_path: Path, there: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "file", tmp_path / "link"
    if there:
        target.write_text("old")
    link.symlink_to(target)
    with whole_file(link) as part:
        assert part.parent == target.parent
        part.write_text("new")
    assert (link.is_symlink(), target.read_text()) == (True, "new")


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def link_to_a_device(folder: Path) -> Path:
    (folder / "link").symlink_to("/dev/null")
    return folder / "link"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (pipe, "pipe is a device or a pipe and is not replaced; name a file"),
        (link_to_a_device, "link is a device or a pipe and is not replaced"),
        (lambda folder: folder, "is a folder; name a file in it"),
        (lambda _: Path(), r"^\. is a folder; name a file in it"),
        (lambda folder: folder / "nowhere" / "file", "there is no folder .*nowhere to write file in"),
    ],
    ids=["pipe", "device", "folder", "here", "nowhere"],
)
def test_what_is_never_replaced(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    path = make(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match=message), whole_file(path):
        pytest.fail("there is nothing to write to")
    assert sorted(tmp_path.iterdir()) == before


def test_files_are_read_within_bounds(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_small(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match=r"file is larger than 4e-06 MB"):
        read_small(tmp_path / "file", 4)
    for path in (pipe(tmp_path), link_to_a_device(tmp_path), tmp_path):
        with pytest.raises(ValueError, match="is no regular file"):
            read_small(path, 100)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "nothing", 100)


def test_room_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    check_room(tmp_path / "not" / "yet", 1)
    with pytest.raises(OSError, match=r"no room in .*yet: "):
        check_room(tmp_path / "not" / "yet", 1 << 62)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written, and nothing is taken for a leftover."""

    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with part_file(tmp_path / "file") as part:
        assert leftovers(tmp_path) == []
        with whole_file(tmp_path / "file") as other:
            other.write_text("whole")
        assert part.exists()
    assert (tmp_path / "file").read_text() == "whole"
