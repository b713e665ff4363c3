"""The broker's URL in the three forms it is needed in, and the one that may be shown.

Ours is `redis://[[user]:password@]host[:port][/db]`, the same with `rediss://` for TLS, or `unix:///path/of/socket[?db=N]`.
`broker.url` holds that form; redis-py and Celery (kombu) each write a socket their own way.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

SCHEMES = ("redis", "rediss", "unix")


class BadUrl(ValueError):
    """A broker URL of no known form; the message names `broker.url` and hides the password."""


def redis_url(url: str) -> str:
    """The form of `redis.from_url`."""
    parts = _split(url)
    if parts.scheme != "rediss":
        return url
    options = {"ssl_cert_reqs": "required", **dict(parse_qsl(parts.query))}
    return _join(parts.scheme, parts.netloc, parts.path, options)


def celery_url(url: str) -> str:
    """The form of Celery's `broker_url`."""
    parts = _split(url)
    if parts.scheme != "unix":
        return redis_url(url)
    options = dict(parse_qsl(parts.query))
    database = options.pop("db", None)
    if database is not None:
        options["virtual_host"] = database
    credentials = parts.netloc.rpartition("@")[0]
    netloc = f"{credentials}@" if credentials else ""
    return _join("redis+socket", netloc, quote(unquote(parts.path)), options)


def socket_url(path: str) -> str:
    """Our form of a unix socket's absolute path."""
    return f"unix://{quote(path)}"


def masked(url: str) -> str:
    """The URL with its password hidden, for messages. Never raises."""
    try:
        parts = urlsplit(url)
        options = [(k, "***" if "password" in k.lower() else v) for k, v in parse_qsl(parts.query, keep_blank_values=True)]
    except ValueError:
        return "***"
    netloc = parts.netloc
    if "@" in netloc:
        credentials, _, host = netloc.rpartition("@")
        user, colon, _ = credentials.partition(":")
        netloc = f"{user}{colon}{'***' if colon else ''}@{host}"
    return _join(parts.scheme, netloc, parts.path, dict(options))


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port if parts.scheme != "unix" else None
    except ValueError as error:
        raise BadUrl(f"broker.url is {masked(url)!r}: {error}") from None
    if parts.scheme not in SCHEMES:
        raise BadUrl(f"broker.url is {masked(url)!r}, expected redis://host:port/db, rediss://host:port/db or unix:///path")
    if parts.scheme == "unix" and (not parts.path.startswith("/") or parts.hostname):
        raise BadUrl(f"broker.url is {masked(url)!r}, expected an absolute path of a socket: unix:///path")
    if parts.scheme != "unix" and not parts.hostname:
        raise BadUrl(f"broker.url is {masked(url)!r}, which names no host (port {port})")
    return parts


def _join(scheme: str, netloc: str, path: str, options: Mapping[str, str]) -> str:
    # `urlunsplit` leaves out the // of a scheme that it does not know.
    return f"{scheme}://{netloc}{path}" + (f"?{urlencode(options, safe='*/')}" if options else "")
