"""An operation on several caches that happens to all of them or to none."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .cache import AnyCache


@contextmanager
def all_or_none(caches: Sequence[AnyCache]) -> Iterator[None]:
    """Put every field of the caches back if what is done meanwhile raises.

    Caches replace what they hold and never change it in place, so that the fields as they were are enough.
    """
    before = [dict(vars(cache)) for cache in caches]
    try:
        yield
    except BaseException:
        for cache, fields in zip(caches, before, strict=True):
            vars(cache).clear()
            vars(cache).update(fields)
        raise
