"""A policy server without a policy: `python -m benchmarks.policy_stub` answers every request at once with the same tokens.

Speaks just enough HTTP/1.1 to cost next to nothing, so that what is measured is its client. Prints its URL; ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

TOKENS = 32


def answer() -> bytes:
    body = json.dumps(
        {
            "request_id": "generate-tokens-x",
            "model": "stub",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "length",
                    "token_ids": list(range(100, 100 + TOKENS)),
                    "weight_versions": [{"version": "1", "start": 0, "end": TOKENS}],
                    "logprobs": {"content": [{"token_id": 100 + i, "logprob": -0.75 - i / 64} for i in range(TOKENS)]},
                }
            ],
        }
    ).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Stub(asyncio.Protocol):
    reply = answer()

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            mark = head.find(b"content-length:")
            length = int(head[mark + 15 :].split(b"\r\n", 1)[0]) if mark >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            self._transport.write(self.reply)


async def main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Stub, "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        # The parent holds the other end of the input: it closes, however the parent ends.
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
