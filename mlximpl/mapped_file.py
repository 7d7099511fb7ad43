"""A file as memory: its pages are read when they are looked at, and changed ones stay private."""

import errno
import io
import mmap
import os
import stat
import sys
import weakref

from .checks import whole

MODES = {"ro": mmap.ACCESS_READ, "cow": mmap.ACCESS_COPY}
ADVICE = {
    "DONTNEED": getattr(mmap, "MADV_DONTNEED", None),
    "FREE": getattr(mmap, "MADV_FREE", None),
    # Python names it from 3.13 on.
    "FREE_REUSABLE": 7 if sys.platform == "darwin" else None,
}


class MappedFile:
    """A file mapped into memory, of any size above 0.

    It must not be made shorter by others while it is mapped: looking at pages that it has lost ends the process. A file
    that is replaced or deleted under its name stays whole here.

    Args:
        path: the file.
        mode: "ro", or "cow" for views that may be written to. What is written never reaches the file.

    Attributes:
        path: as it was given.
        size: its bytes.
        mode: "ro" or "cow".

    Raises:
        ValueError: another mode; an empty file, or none that is ordinary.
        OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], mode: str = "ro") -> None:
        if not isinstance(mode, str) or mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        self.path = os.fspath(path)
        if not isinstance(self.path, str):
            raise ValueError(f"path must be a str or a path, not {self.path!r}")
        self.mode = mode
        number = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            info = os.fstat(number)
            if stat.S_ISDIR(info.st_mode):
                raise IsADirectoryError(errno.EISDIR, "is a directory", self.path)
            if not stat.S_ISREG(info.st_mode) or not info.st_size:
                what = "is empty" if stat.S_ISREG(info.st_mode) else "is no ordinary file"
                raise ValueError(f"{self.path} {what}, and cannot be mapped")
            self.size = info.st_size
            self._map: mmap.mmap | None = mmap.mmap(number, self.size, access=MODES[mode])
        finally:
            os.close(number)
        self._views: dict[int, weakref.ref[memoryview]] = {}

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._map is None

    def _open(self) -> mmap.mmap:
        if self._map is None:
            raise ValueError(f"{self.path} is closed")
        return self._map

    def view(self, offset: int, length: int) -> memoryview:
        """Bytes of the file, without reading them.

        Args:
            offset: where they begin, in bytes.
            length: how many there are; may be 0.

        Returns:
            A view of bytes; read-only, or in mode "cow" one that may be written to.

        Raises:
            ValueError: they do not lie within the file, or it is closed.
        """
        mapping = self._open()
        offset, length = self._range(offset, length)
        view = memoryview(mapping)[offset : offset + length]
        key = id(view)
        self._views[key] = weakref.ref(view, lambda _: self._views.pop(key, None))
        return view

    def _range(self, offset: int, length: int) -> tuple[int, int]:
        offset, length = whole("offset", offset), whole("length", length)
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(f"{length} bytes at {offset} do not lie within the {self.size} of {self.path}")
        return offset, length

    def advise(self, offset: int, length: int, advice: str) -> None:
        """Tell the system what pages are needed for.

        Args:
            offset: where the pages begin, a multiple of the platform's page size (`mmap.PAGESIZE`).
            length: whole pages, or all up to the file's end.
            advice: "DONTNEED": drop them from memory, to be read from the file again; in mode "cow" what was written
                to them may be lost. "FREE": the system may take them when it is short of memory. "FREE_REUSABLE":
                likewise, and they do not count as this process's until then (macOS).

        Raises:
            ValueError: another advice; a range that is not of whole pages within the file; or the file is closed.
            io.UnsupportedOperation: the platform has no such advice, or not for a mapped file. It is an OSError and a
                ValueError.
        """
        mapping = self._open()
        if not isinstance(advice, str) or advice not in ADVICE:
            raise ValueError(f"advice must be one of {', '.join(ADVICE)}, not {advice!r}")
        offset, length = self._range(offset, length)
        if offset % mmap.PAGESIZE or (length % mmap.PAGESIZE and offset + length != self.size):
            raise ValueError(f"{length} bytes at {offset} are not whole pages of {mmap.PAGESIZE}")
        number = ADVICE[advice]
        if number is None:
            raise io.UnsupportedOperation(f"{advice}: {sys.platform} has no such advice")
        if not length:
            return
        try:
            mapping.madvise(number, offset, length)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EPERM, errno.ENOSYS):
                raise io.UnsupportedOperation(f"{advice}: not for a mapped file on {sys.platform} ({error})") from error
            raise

    def close(self) -> None:
        """End it. A second call does nothing.

        Views handed out are refused by Python from here on; one that something else still uses, such as an array
        over it or a slice of it, stays valid, and the pages stay mapped as long as that lives.
        """
        mapping, self._map = self._map, None
        if mapping is None:
            return
        for reference in list(self._views.values()):
            view = reference()
            try:
                if view is not None:
                    view.release()
            except BufferError:
                continue
        try:
            mapping.close()
        except BufferError:
            return  # what still uses it closes it by going away

    def __enter__(self) -> "MappedFile":
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MappedFile({self.path!r}, mode={self.mode!r}{', closed' if self.closed else ''})"
