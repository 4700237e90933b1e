"""A bucket of a real S3 server, for one test."""

import pytest

from helpers.stores import bucket


@pytest.fixture
def way(monkeypatch):
    """A way to a server with a bucket `bucket`, which breaks when it is asked to."""
    pytest.importorskip("moto.server", reason="pip install 'shardproof[test]' brings the server")
    from shardproof.backend.base import urls

    monkeypatch.setattr(urls, "FIRST_PAUSE_S", 0.01)
    with bucket(monkeypatch.setenv) as way:
        yield way
