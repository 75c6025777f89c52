"""An S3 server in a process of its own, on loopback: moto's."""

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from tests.kit.ports import free_port

START_S = 60


@contextmanager
def s3_server(bucket: str) -> Iterator[dict[str, str]]:
    """Start it with an empty bucket. Yields the environment of its clients."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _make_bucket(f"{endpoint}/{bucket}", process)
            yield {
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "someone",
                "AWS_SECRET_ACCESS_KEY": "something",
            }
        finally:
            process.kill()


def _make_bucket(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=START_S).close()
            return
        except urllib.error.URLError:
            assert process.poll() is None, "the server ended: is moto installed?"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)
