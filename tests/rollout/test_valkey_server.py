"""The embedded server as its owner sees it, and the broker's URL in every form."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psutil
import pytest
import redis
from kombu.connection import Connection

from rollout.store import StoreUnavailable
from rollout.urls import BadUrl, celery_url, masked, redis_url
from rollout.valkey_server import EmbeddedServer, embedded_command, embedded_server, ready, wait_ready
from rollout.valkey_store import ValkeyStore
from tests.rollout.store_contract import RUN, claimed, order, segment


def socket_of(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


async def test_what_it_held_is_there_after_a_restart(tmp_path: Path) -> None:
    async with embedded_server(tmp_path / "broker") as server:
        store = ValkeyStore(server.url)
        await store.submit([order("e0"), order("e1")])
        await store.close()
        first = server.url
    assert not await ready(first)
    async with embedded_server(tmp_path / "broker") as server:
        assert server.url == first
        store = ValkeyStore(server.url)
        assert await store.open_episodes(RUN) == ["e0", "e1"]
        await store.close()


async def test_it_is_private_and_safe_as_set_up(tmp_path: Path) -> None:
    async with embedded_server(tmp_path / "broker") as server:
        path = socket_of(server.url)
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        assert stat.S_IMODE((tmp_path / "broker").stat().st_mode) == 0o700
        listening = [c for c in psutil.Process(server.pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert listening == []
        with redis.from_url(redis_url(server.url), decode_responses=True) as plain:
            for name, value in {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction"}.items():
                assert plain.config_get(name) == {name: value}


async def test_a_port_is_opened_only_when_asked_for_and_only_at_home(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with embedded_server(tmp_path, port=port) as server:
        listening = [c for c in psutil.Process(server.pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert [tuple(c.laddr) for c in listening] == [("127.0.0.1", port)]
        assert await ready(f"redis://127.0.0.1:{port}")


async def test_a_folder_too_deep_for_a_socket_gets_a_short_private_one_and_finds_it_again(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 60) / ("e" * 60)
    async with embedded_server(folder) as server:
        first = socket_of(server.url)
        assert len(os.fsencode(first)) <= 107
        assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    assert socket_of(embedded_command(folder)[1]) == first
    first.parent.chmod(0o755)
    try:
        other = socket_of(embedded_command(folder)[1]).parent
        assert other != first.parent
        other.rmdir()
    finally:
        for leftover in first.parent.iterdir():
            leftover.unlink()
        first.parent.rmdir()


async def test_a_folder_with_odd_characters(tmp_path: Path) -> None:
    async with embedded_server(tmp_path / "a run#1 100%?ü") as server:
        store = ValkeyStore(server.url)
        await store.submit([order()])
        lease = await claimed(store)
        await store.append(lease, segment(lease, 0), {})
        await store.close()


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    (folder / "appendonlydir").mkdir(parents=True)
    (folder / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(StoreUnavailable, match=r"(?s)the embedded server ended with 1; .*manifest"):
        await EmbeddedServer(folder).start()


async def test_nobody_there_is_reported_in_time(tmp_path: Path) -> None:
    assert not await ready("redis://:secret@127.0.0.1:1")
    with pytest.raises(StoreUnavailable, match=r"redis://:\*\*\*@127\.0\.0\.1:1 within 0\.05 s.*broker\.url"):
        await wait_ready("redis://:secret@127.0.0.1:1", timeout_s=0.05)


OWNER = """
import asyncio, sys
from pathlib import Path
from rollout.valkey_server import embedded_server
async def main():
    async with embedded_server(Path(sys.argv[1])) as server:
        print(server.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def test_it_ends_with_its_owner_even_when_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        server = psutil.Process(int(owner.stdout.readline()))
        assert os.getpgid(server.pid) == server.pid
        owner.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs([server], timeout=10)
    # As a container's first process may not reap what it inherits, a zombie is as gone as can be.
    assert gone or all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


async def test_celery_reaches_the_same_database(tmp_path: Path) -> None:
    async with embedded_server(tmp_path / "a run ü") as server:
        for url, database in ((server.url, 0), (f"{server.url}?db=3", 3)):
            with Connection(celery_url(url)) as connection:  # type: ignore[no-untyped-call]
                queue = connection.SimpleQueue("rollout-urls")
                queue.put({"run": "r"})
                queue.close()
            with redis.from_url(redis_url(url)) as plain:
                assert plain.connection_pool.connection_kwargs.get("db", 0) == database
                assert plain.llen("rollout-urls") == 1


@pytest.mark.parametrize(
    ("ours", "for_redis", "for_celery"),
    [
        ("redis://h:7/2", "redis://h:7/2", "redis://h:7/2"),
        ("redis://u:p%40@h", "redis://u:p%40@h", "redis://u:p%40@h"),
        ("rediss://h/1", "rediss://h/1?ssl_cert_reqs=required", "rediss://h/1?ssl_cert_reqs=required"),
        ("rediss://h?ssl_cert_reqs=none", "rediss://h?ssl_cert_reqs=none", "rediss://h?ssl_cert_reqs=none"),
        ("unix:///run/v.sock", "unix:///run/v.sock", "redis+socket:///run/v.sock"),
        ("unix://:pw@/v.sock?db=2", "unix://:pw@/v.sock?db=2", "redis+socket://:pw@/v.sock?virtual_host=2"),
    ],
)
def test_forms_of_a_url(ours: str, for_redis: str, for_celery: str) -> None:
    assert redis_url(ours) == for_redis
    assert celery_url(ours) == for_celery


@pytest.mark.parametrize("bad", ["", "valkey", "http://h", "redis://", "redis://:hidden@h:port", "unix://run/x", "unix:x"])
def test_a_url_of_another_kind_is_refused_without_its_password(bad: str) -> None:
    for form in (redis_url, celery_url):
        with pytest.raises(BadUrl, match=r"broker\.url is ") as caught:
            form(bad)
        assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@h:1/0", "redis://user:***@h:1/0"),
        ("redis://:se@cret@h", "redis://:***@h"),
        ("redis://h?password=secret&db=1", "redis://h?password=***&db=1"),
        ("unix:///a%20b/v.sock", "unix:///a%20b/v.sock"),
        ("redis://[bad", "***"),
    ],
)
def test_a_masked_url_shows_all_but_the_password(url: str, shown: str) -> None:
    assert masked(url) == shown
