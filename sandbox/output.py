"""Bounded capture of one output stream: at most `limit` bytes are held, the head and the tail of what was produced."""

from __future__ import annotations


class Capture:
    """Keeps everything up to `limit` bytes; beyond it the first half and the last half, and sets `truncated`.

    Memory stays below twice the limit however much is fed.
    """

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"max_output must not be negative, got {limit}")
        self._limit = limit
        self._head = bytearray()
        self._tail = bytearray()
        self._tail_limit = limit - limit // 2
        self.truncated = False

    def feed(self, data: bytes) -> None:
        if not self.truncated:
            self._head += data
            if len(self._head) <= self._limit:
                return
            self.truncated = True
            cut = self._limit // 2
            data = bytes(self._head[cut:])
            del self._head[cut:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit:
            del self._tail[: len(self._tail) - self._tail_limit]

    def value(self) -> bytes:
        return bytes(self._head + self._tail[max(0, len(self._tail) - self._tail_limit) :])
