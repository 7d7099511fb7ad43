"""Writing a file so that its name always stands for the old content or the new, whole."""

import errno
import os
import secrets
import stat
import sys
from _thread import start_new_thread
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

if sys.platform == "darwin":
    import fcntl


@contextmanager
def replacing(path: str, durable: bool = False) -> Iterator[BinaryIO]:
    """A file to write to that takes the place of `path` when the block ends, and is removed if it raises.

    It lies beside `path` under a name of its own, and has the permissions of the file that it replaces, or of any new
    file. Where `path` is a symbolic link the link stays, and the file that it points to is replaced.

    A process that is killed loses nothing that it has written, so the old content or the new, whole, is there whenever
    it dies. A computer that loses power forgets what is not on the disk yet.

    Args:
        path: the name.
        durable: put the file on the disk before it is renamed, and its new name afterwards.

    Raises:
        OSError: it cannot be written, or `path` is no ordinary file.
    """
    if path.endswith(os.sep):
        raise IsADirectoryError(errno.EISDIR, "not the name of a file", path)
    path = os.path.realpath(path)
    folder = os.path.dirname(path)
    replaced = None
    with suppress(FileNotFoundError):
        replaced = os.stat(path)
        if not stat.S_ISREG(replaced.st_mode):
            code = errno.EISDIR if stat.S_ISDIR(replaced.st_mode) else errno.EINVAL
            raise OSError(code, "not an ordinary file", path)
    beside = os.path.join(folder, f".mlximpl-{secrets.token_hex(8)}.tmp")
    try:
        number = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        # The caller knows the name that was given, not the one beside it.
        raise OSError(error.errno, error.strerror, path) from error
    try:
        with os.fdopen(number, "wb") as file:
            if replaced is not None:
                os.fchmod(number, stat.S_IMODE(replaced.st_mode))
            yield file
            file.flush()
            if durable:
                _sync(number)
        with _freed_later(path if replaced else None):
            os.replace(beside, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(beside)
        raise
    if durable:
        _sync_folder(folder)


@contextmanager
def _freed_later(path: str | None) -> Iterator[None]:
    """Leave it to a thread to close the file that loses this name in here: to free its space takes as long as to write.

    A file that cannot be opened is freed at once.
    """
    number = None
    if path is not None:
        with suppress(OSError):
            number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield
    finally:
        if number is not None:
            try:
                start_new_thread(os.close, (number,))  # threading.Thread would wait for it to run
            except RuntimeError:  # there can be no more threads
                os.close(number)


def _sync(number: int) -> None:
    if sys.platform == "darwin":
        # fsync leaves the data in the drive's cache there. Not every file system has the stronger one.
        with suppress(OSError):
            fcntl.fcntl(number, fcntl.F_FULLFSYNC)
            return
    os.fsync(number)


def _sync_folder(folder: str) -> None:
    """Put the new name on the disk, where the folder may be opened and its file system does not do it by itself.

    The new file stands under its name by now, so nothing is raised: should the name be lost in a crash, the old file
    is there, whole.
    """
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
