"""A few connections to the Redis-protocol server, and one way of calling it.

Guarantees:

* A broken connection, a server that is loading, or one that is away is tried again with back-off for `reconnect_s`; then,
  or at once when the server refuses for good (no memory, no disk, wrong password), the caller gets `StoreUnavailable`.
* A call may therefore run twice at the server. Whoever calls must make that harmless.
* A connection on which an answer is outstanding is closed, never reused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from hashlib import sha1
from typing import Any
from urllib.parse import quote

import redis.exceptions as errors
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from rollout.store import StoreUnavailable
from rollout.urls import masked, redis_url

CONNECT_S = 5.0
ANSWER_S = 15.0
"""A server that has a connection and says nothing for this long is taken for gone."""
FIRST_DELAY_S = 0.02
LONGEST_DELAY_S = 2.0

_AGAIN = ("LOADING", "BUSY ", "MASTERDOWN", "READONLY", "TRYAGAIN", "CLUSTERDOWN")
"""Answers of a server that starts, fails over, or runs a long script: they pass."""


class AccessRefused(StoreUnavailable):
    """The server is there and does not want this user."""


class Script:
    """A Lua script and its SHA-1, by which it is called."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.sha = sha1(self.text, usedforsecurity=False).hexdigest().encode()


class ValkeyClient:
    """Connections are made when needed, `connections` at most, and belong to the running event loop."""

    def __init__(self, url: str, *, reconnect_s: float, connections: int = 4, name: str = "farmhand") -> None:
        self.url = masked(url)
        self._reconnect_s = reconnect_s
        self._answer_s = min(ANSWER_S, max(1.0, reconnect_s))
        self._factory = ConnectionPool.from_url(
            redis_url(url),
            protocol=2,
            client_name=quote(name),
            socket_timeout=None,
            socket_connect_timeout=CONNECT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._idle: list[AbstractConnection] = []
        self._slots = asyncio.Semaphore(connections)
        self._closed = False
        self.connects = 0
        """Connections made. When it grows between two calls, the server may not be what it was at the first."""

    async def call(self, *args: bytes | str | int, wait_s: float = 0.0) -> Any:
        """One command, which the server may keep waiting for `wait_s`; str and int arguments are written as text.

        Strings in the answer are bytes. Raises `StoreUnavailable`, or `redis.exceptions.ResponseError` for an answer that is
        the caller's business.
        """
        packed = _pack([arg if isinstance(arg, bytes) else str(arg).encode() for arg in args])
        return await self._patiently(packed, wait_s)

    async def run(self, script: Script, args: Sequence[bytes]) -> Any:
        """A script with `args` as ARGV, by its hash; the server is taught it when it does not know it."""
        packed = _pack([b"EVALSHA", script.sha, b"0", *args])
        while True:
            try:
                return await self._patiently(packed, 0.0)
            except errors.NoScriptError:
                await self.call("SCRIPT", "LOAD", script.text)

    async def close(self) -> None:
        self._closed = True
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)

    async def _patiently(self, packed: bytes, wait_s: float) -> Any:
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        delay = 0.0
        while True:
            try:
                return await self._once(packed, wait_s + self._answer_s)
            except errors.ResponseError as error:
                cause = self._judge(error)
            except (errors.RedisError, OSError, TimeoutError) as error:
                if _refused(error):
                    raise AccessRefused(
                        f"{self.url} refuses this user: {error} Check the password in `broker.url`."
                    ) from error
                cause = error
            now = loop.time()
            deadline = now + self._reconnect_s if deadline is None else deadline
            if now + delay > deadline:
                raise StoreUnavailable(
                    f"no answer from {self.url} for {self._reconnect_s:g} s ({type(cause).__name__}: {cause})."
                    " Check that the server runs and that `broker.url` names it."
                ) from cause
            await asyncio.sleep(delay)
            delay = min(max(delay * 2, FIRST_DELAY_S), LONGEST_DELAY_S)

    def _judge(self, error: errors.ResponseError) -> Exception:
        """What the server answered: return what will pass, raise what will not."""
        text = str(error)
        if text.startswith(_AGAIN) or isinstance(error, errors.BusyLoadingError | errors.ReadOnlyError):
            return error
        if isinstance(error, errors.NoPermissionError):
            raise AccessRefused(f"{self.url} refuses this user: {error} Check the user in `broker.url`.") from error
        if isinstance(error, errors.OutOfMemoryError) or "OOM command not allowed" in text:
            raise StoreUnavailable(
                f"{self.url} has no memory left: {text} Raise the server's `maxmemory`, or let the learner catch up;"
                " `broker.url` names the server."
            ) from error
        if "MISCONF" in text:
            raise StoreUnavailable(
                f"{self.url} refuses to write: {text} Free space on the server's disk, or set another `broker.url`."
            ) from error
        raise error

    async def _once(self, packed: bytes, answer_s: float) -> Any:
        if self._closed:
            raise StoreUnavailable(f"the connection to {self.url} was closed by this process; `broker.url` names the server")
        async with self._slots:
            connection = self._idle.pop() if self._idle else self._connection()
            try:
                async with asyncio.timeout(answer_s):
                    if not connection.is_connected:
                        self.connects += 1
                        await connection.connect()  # type: ignore[no-untyped-call]
                    await connection.send_packed_command(packed, check_health=False)
                    answer = await connection.read_response(disable_decoding=True)
            except errors.ResponseError:
                self._keep(connection)
                raise
            except BaseException:
                with contextlib.suppress(Exception):
                    await connection.disconnect(nowait=True)
                raise
            self._keep(connection)
            return answer

    def _connection(self) -> AbstractConnection:
        connection: AbstractConnection = self._factory.make_connection()  # type: ignore[no-untyped-call]
        return connection

    def _keep(self, connection: AbstractConnection) -> None:
        if connection.is_connected:
            self._idle.append(connection)


def _refused(error: BaseException | None) -> bool:
    """Whether redis-py failed to log in; it may wrap that in an error of the connection."""
    while error is not None:
        if isinstance(error, errors.AuthenticationError | errors.AuthorizationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _pack(args: Sequence[bytes]) -> bytes:
    parts = [b"*%d\r\n" % len(args)]
    for arg in args:
        parts.append(b"$%d\r\n" % len(arg))
        parts.append(arg)
        parts.append(b"\r\n")
    return b"".join(parts)
