"""A disk that is full, as far as this process can tell."""

import contextlib
import resource


@contextlib.contextmanager
def full_disk(num_bytes):
    """No file of this process grows beyond `num_bytes`: the system refuses to write or to allocate more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
