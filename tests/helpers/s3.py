"""An S3 server on the loopback device (moto's), which may refuse its keys."""

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its address. The environment leads s3fs there, to a bucket called `bucket`."""
    reason = "needs s3fs and moto[server], which CI does not install"
    s3fs = pytest.importorskip("s3fs", reason=reason)
    moto = pytest.importorskip("moto.server", reason=reason)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    for name, value in zip(names, (address, "me", "mine", "us-east-1"), strict=True):
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("bucket")
    yield address
    accept_keys(address, 10**9)
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def accept_keys(server: str, num_requests: int) -> None:
    """Has the server refuse the keys after so many requests."""
    url, content = f"{server}/moto-api/reset-auth", str(num_requests).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "text/plain"}, method="POST")
    urllib.request.urlopen(request).close()
