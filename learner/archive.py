"""Finished episodes as Parquet: one row each, with the tokens, what was sampled, and the text as the policy saw it.

Guarantees: every file is written whole; rows hold what the stream said, failures and their tracebacks included. Episodes that
never end have no row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollout.trajectory import Episode, EpisodeEnd, Record, Segment, decode, encode

SCHEMA = pa.schema(
    [
        ("episode", pa.string()),
        ("task_set", pa.string()),
        ("split", pa.string()),
        ("task_index", pa.int64()),
        ("group", pa.int64()),
        ("member", pa.int32()),
        ("attempt", pa.int32()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("failure", pa.string()),
        ("message", pa.string()),
        ("traceback", pa.string()),
        ("turns", pa.int32()),
        ("seconds", pa.float64()),
        ("text", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("sampled", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
    ]
)
"""`logprobs` is 0 and `versions` is -1 where `sampled` is false."""


class EpisodeArchive:
    """Collects records, and writes the ended episodes at `flush`: one file `FOLDER/NAME-SERIAL.parquet` a flush."""

    def __init__(self, folder: Path, name: str, model: str) -> None:
        self._folder = folder
        self._name = name
        self._model = model
        self._serial = 0
        """Of the next file."""
        self._tokenizer: Any = None
        self._orders: dict[str, Episode] = {}
        self._segments: dict[str, list[Segment]] = {}
        self._ended: list[tuple[Episode, list[Segment], EpisodeEnd]] = []

    def dispatch(self, episodes: Iterable[Episode]) -> None:
        for episode in episodes:
            self._orders.setdefault(episode.id, episode)

    def add(self, record: Record) -> None:
        """A record that passed `Dedup`."""
        if isinstance(record, Segment):
            kept = self._segments.setdefault(record.episode_id, [])
            del kept[record.index :]
            kept.append(record)
        elif isinstance(record, EpisodeEnd):
            order = self._orders.pop(record.episode_id, None)
            segments = self._segments.pop(record.episode_id, [])
            if order is not None:
                self._ended.append((order, segments[: record.index], record))

    def flush(self, *, at_least: int = 1) -> Path | None:
        """Write what has ended since the last flush. Blocking. None if that is fewer than `at_least`."""
        if len(self._ended) < at_least:
            return None
        ended, self._ended = self._ended, []
        path = self._folder / f"{self._name}-{self._serial:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [self._row(*item) for item in ended]
        fresh = path.with_name(f".{path.name}.new")
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), fresh, compression="zstd")
        fresh.replace(path)
        self._serial += 1
        return path

    def _row(self, order: Episode, segments: Sequence[Segment], end: EpisodeEnd) -> dict[str, Any]:
        parts: list[tuple[Any, bool, Any, Any]] = []
        for segment in segments:
            n = len(segment.env_tokens)
            parts.append((segment.env_tokens, False, np.zeros(n, np.float32), np.full(n, -1, np.int32)))
            versions = np.repeat(*np.array(segment.versions, np.int32).reshape(-1, 2).T)
            parts.append((segment.sampled_tokens, True, segment.logprobs, versions))
        tokens = np.concatenate([part[0] for part in parts]) if parts else np.zeros(0, np.int32)
        return {
            "episode": order.id,
            "task_set": order.task_set,
            "split": order.split,
            "task_index": order.task_index,
            "group": order.group,
            "member": order.member,
            "attempt": end.attempt,
            "status": end.status,
            "reward": end.reward,
            "failure": None if end.failure is None else end.failure.kind,
            "message": None if end.failure is None else end.failure.message,
            "traceback": None if end.failure is None else end.failure.traceback,
            "turns": len(segments),
            "seconds": end.timing.get("seconds"),
            "text": self._text(tokens.tolist()),
            "tokens": tokens,
            "sampled": np.concatenate([np.full(len(part[0]), part[1]) for part in parts]) if parts else [],
            "logprobs": np.concatenate([part[2] for part in parts]) if parts else [],
            "versions": np.concatenate([part[3] for part in parts]) if parts else [],
        }

    def _text(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            from rollout.models import load_tokenizer, resolve_model

            self._tokenizer = load_tokenizer(resolve_model(self._model))
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def discard_later(self) -> None:
        """Remove files that were written after the state that was loaded: their episodes will be written again."""
        for path in self._folder.glob(f"{self._name}-*.parquet"):
            if int(path.stem.rpartition("-")[2]) >= self._serial:
                path.unlink()

    def state(self) -> dict[str, Any]:
        """Plain data for msgpack: open episodes, and ended ones that are not written yet."""
        return {
            "serial": self._serial,
            "orders": [encode(order) for order in self._orders.values()],
            "segments": [[encode(segment) for segment in segments] for segments in self._segments.values()],
            "ended": [
                [encode(order), [encode(segment) for segment in segments], encode(end)]
                for order, segments, end in self._ended
            ],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._serial = int(state["serial"])
        orders = [decode(data) for data in state["orders"]]
        self._orders = {order.id: order for order in orders if isinstance(order, Episode)}
        self._segments = {}
        for rows in state["segments"]:
            for record in map(decode, rows):
                self.add(record)
        self._ended = []
        for first, rows, last in state["ended"]:
            order, end = decode(first), decode(last)
            assert isinstance(order, Episode)
            assert isinstance(end, EpisodeEnd)
            self._ended.append((order, [item for item in map(decode, rows) if isinstance(item, Segment)], end))
