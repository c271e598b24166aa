"""Ways from one process to another on one machine: a pipe, TCP over loopback, shared memory.

A pipe and a connection carry pieces, each with its length before it, and an empty one at the end: who refuses a stream
halfway can still read on to the end of it, and then the next.
"""

from __future__ import annotations

import socket
import struct
from typing import Protocol

from kvlab.core.errors import StreamError

LENGTH = struct.Struct("<I")
PIECE = 1 << 20  # bytes that are gathered before they are sent
MOST = 1 << 31  # bytes of a piece


class SocketEnds(Protocol):
    """What carries bytes, of a pipe or a connection."""

    def write(self, data: bytes | memoryview) -> object:
        """All of them."""

    def read(self, size: int) -> bytes:
        """So many, or fewer at the end."""


class WireWriter:
    """Sends one stream after the other."""

    def __init__(self, ends: SocketEnds):
        self._ends, self._held, self.sent = ends, bytearray(), 0

    def write(self, data: bytes | memoryview) -> None:
        """Send, now or with what follows."""
        view = memoryview(data)
        if len(view) < PIECE:
            self._held += view
            if len(self._held) >= PIECE:
                self._flush()
            return
        self._flush()
        for begin in range(0, len(view), MOST - 1):
            self._piece(view[begin : begin + MOST - 1])

    def end(self) -> None:
        """The stream is whole."""
        self._flush()
        self._ends.write(LENGTH.pack(0))
        getattr(self._ends, "flush", lambda: None)()
        self.sent += LENGTH.size

    def _flush(self) -> None:
        if self._held:
            self._piece(memoryview(bytes(self._held)))
            self._held.clear()

    def _piece(self, view: memoryview) -> None:
        self._ends.write(LENGTH.pack(len(view)))
        self._ends.write(view)
        self.sent += LENGTH.size + len(view)


class WireReader:
    """Reads what a `WireWriter` sends, a stream at a time."""

    def __init__(self, ends: SocketEnds):
        self._ends, self._left, self._over = ends, 0, False

    def begin(self) -> None:
        """A stream begins."""
        self._left, self._over = 0, False

    def read(self, size: int) -> bytes:
        """At most so many bytes; none at the end of the stream."""
        if not self._left and not self._over:
            self._left = LENGTH.unpack(self._exactly(LENGTH.size))[0]
            self._over = not self._left
        if self._over:
            return b""
        data = self._ends.read(min(size, self._left))
        if not data:
            raise StreamError("the other process is gone", code="stream.gone")
        self._left -= len(data)
        return data

    def drain(self) -> None:
        """Read to the end of the stream, whatever it holds."""
        while self.read(PIECE):
            pass

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._ends.read(size - len(data))
            if not part:
                raise StreamError("the other process is gone", code="stream.gone")
            data += part
        return data


def listening() -> socket.socket:
    """A socket of loopback that waits for one connection, at a port that is free."""
    return socket.create_server(("127.0.0.1", 0), backlog=1)


def ends_of(connection: socket.socket) -> SocketEnds:
    """A connection as `SocketEnds`; small pieces are not held back (RFC 896's delay would cost a hand-over 40 ms)."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection.makefile("rwb", buffering=1 << 16)
