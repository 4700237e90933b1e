"""The door for files: what is read, within which limits, and what writing leaves in place."""

from __future__ import annotations

import gzip
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardproof.core.base.errors import FileError
from shardproof.core.base.files import (
    DOCUMENT_BYTES,
    LINE_BYTES,
    read_bytes,
    read_lines,
    read_packed,
    read_text,
    write_bytes,
    write_text,
)

# Reading


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


def socket_file(folder: Path) -> Path:
    (server := socket.socket(socket.AF_UNIX)).bind(str(folder / "socket"))
    server.close()
    return folder / "socket"


def link_to_device(folder: Path) -> Path:
    (folder / "link").symlink_to("/dev/zero")
    return folder / "link"


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (pipe, "a pipe"),
        (socket_file, "a socket"),
        (lambda folder: Path("/dev/zero"), "a device"),
        (lambda folder: folder, "a folder"),
        (link_to_device, "a device"),
    ],
)
def test_what_is_no_regular_file_is_refused_at_once(make, kind, tmp_path):
    path = make(tmp_path)
    with pytest.raises(FileError, match=f"{path}: this is {kind}, and files are read"):
        read_bytes(path)


def test_a_name_with_a_zero_is_refused_for_reading_and_writing():
    for call in (read_bytes, lambda path: list(read_lines(path)), lambda path: write_bytes(path, b"")):
        with pytest.raises(FileError, match=r"'a\\x00b' is no name of a file"):
            call("a\0b")


def test_a_file_of_more_than_the_limit_is_not_read(tmp_path):
    with (tmp_path / "long").open("wb") as file:
        file.truncate(10 * 2**30)  # takes no room on the disk
    for read in (read_bytes, read_packed):
        with pytest.raises(FileError, match="has 10 GiB, and at most"):
            read(tmp_path / "long")
    with pytest.raises(FileError, match="a line has more than 1 MiB"):
        list(read_lines(tmp_path / "long"))
    (tmp_path / "fits").write_bytes(bytes(DOCUMENT_BYTES))
    assert len(read_bytes(tmp_path / "fits")) == DOCUMENT_BYTES


def test_a_file_that_does_not_say_how_long_it_is_is_read_up_to_the_limit():
    assert Path("/proc/self/maps").stat().st_size == 0 and len(read_bytes("/proc/self/maps")) > 100
    with pytest.raises(FileError, match="more than 10 B"):
        read_bytes("/proc/self/maps", most_bytes=10)


def test_text_loses_its_mark_and_returns(tmp_path):
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read_text(tmp_path / "text") == "one\ntwo\nthree\n"
    assert list(read_lines(tmp_path / "text")) == ["one\n", "two\nthree\n"]
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    for read in (read_text, read_packed, lambda path: list(read_lines(path))):
        with pytest.raises(FileError, match="this is not a text file"):
            read(tmp_path / "text")


def test_lines_come_with_their_newline_and_the_last_as_it_is(tmp_path):
    lines = ["x" * (LINE_BYTES - 1) + "\n", "\n", "half a li"]
    (tmp_path / "lines").write_text("".join(lines))
    assert list(read_lines(tmp_path / "lines")) == lines


def test_packed_texts_are_read_whole_or_refused(tmp_path):
    path, packed = tmp_path / "x.gz", gzip.compress(b"one") + gzip.compress(b" two")
    path.write_bytes(packed + b"\0" * 100)
    assert read_packed(path) == "one two"
    for broken, words in (
        (packed[:-1], "ends too early"),
        (packed[:20], "ends too early"),
        (packed[:12] + b"\xff\xff\xff" + packed[15:], "broken"),
        (packed + b"tail", "broken"),
    ):
        path.write_bytes(broken)
        with pytest.raises(FileError, match=words):
            read_packed(path)


def test_a_bomb_is_refused_while_it_is_unpacked_and_in_little_memory(tmp_path):
    bomb = gzip.compress(gzip.compress(bytes(2**26)))  # what is unpacked is not unpacked again
    (tmp_path / "twice.gz").write_bytes(bomb)
    with pytest.raises(FileError, match="not a text file"):
        read_packed(tmp_path / "twice.gz")
    member = gzip.compress(bytes(2**26))
    (tmp_path / "bomb.gz").write_bytes(member * 160)
    program = (
        "import re; from pathlib import Path; from shardproof.core.base.files import read_packed, FileError\n"
        f"try: read_packed({str(tmp_path / 'bomb.gz')!r})\n"
        "except FileError as error: print(error)\n"
        # ru_maxrss begins with the parent's
        "print(re.search(r'VmHWM:\\s+([0-9]+)', Path('/proc/self/status').read_text())[1])\n"
    )
    words, kib = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "more than 128 MiB when unpacked" in words and int(kib) < 500_000


# Writing


def test_a_regular_file_is_replaced_and_keeps_its_permissions(tmp_path):
    path = tmp_path / "report.json"
    write_text(path, "one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask()
    path.chmod(0o640)
    before = path.stat().st_ino
    write_text(path, "two")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("two", 0o640) and path.stat().st_ino != before
    assert list(tmp_path.iterdir()) == [path]


def umask() -> int:
    old = os.umask(0)
    os.umask(old)
    return old


def test_a_link_stays_and_its_target_is_replaced_or_made(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for name in ("there", "new"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere" / name)
    (tmp_path / "elsewhere" / "there").write_text("old")
    for name in ("there", "new"):
        write_text(tmp_path / name, "written")
        assert (tmp_path / name).is_symlink() and (tmp_path / "elsewhere" / name).read_text() == "written"


def test_a_link_to_itself_and_one_into_no_folder_are_errors_and_stay(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing" / "x")
    for name in ("loop", "nowhere"):
        with pytest.raises(OSError, match=name):
            write_text(tmp_path / name, "text")
        assert (tmp_path / name).is_symlink()


def test_devices_and_pipes_are_written_to_and_stay(tmp_path):
    (tmp_path / "null").symlink_to("/dev/null")
    for path in ("/dev/null", tmp_path / "null"):
        write_text(path, "text")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode) and (tmp_path / "null").is_symlink()
    fifo, found = pipe(tmp_path), []
    reader = threading.Thread(target=lambda: found.append(fifo.read_text()))
    reader.start()
    write_text(fifo, "through" * 20_000)
    reader.join()
    assert found == ["through" * 20_000] and stat.S_ISFIFO(fifo.stat().st_mode)


@pytest.mark.parametrize("name", ["/dev/stdout", "/proc/self/fd/1", "/dev/fd/1"])
def test_standard_output_by_its_name_is_written_to_after_what_it_has(name, tmp_path):
    program = (
        f"print('one', flush=True); from shardproof.core.base.files import write_text; write_text({name!r}, "
        "'two\\n'); print('three')"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    piped = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert piped == (tmp_path / "out").read_text() == "one\ntwo\nthree\n"
