"""A server of the S3 protocol on loopback, and the rules as Snakemake parses them."""

from __future__ import annotations

import functools
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def inspected():
    """What `inspect_rules.py` prints of the repository's rules when it is asked this, once for all tests."""

    @functools.cache
    def asked(what: str) -> dict:
        here = Path(__file__)
        command = [sys.executable, here.with_name("inspect_rules.py"), what]
        found = subprocess.run(command, cwd=here.parents[2], capture_output=True, text=True, timeout=900)
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)

    return asked


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """Address of an S3 server without buckets; it takes any key.

    A process of its own: what it imports into one breaks a vLLM that is started there later, which looks at every
    name of every module.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open(tmp_path_factory.mktemp("s3") / "log", "w") as log:
        command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not is_listening(port):
            assert server.poll() is None and time.monotonic() < deadline, "the S3 server does not start"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=30)


def is_listening(port: int) -> bool:
    """Whether something answers at a port of this machine."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
