"""Pushes to in-memory servers that hold real weights files, and that lie, hang, refuse or die on demand."""

# ruff: noqa: ASYNC240 (a test may wait for its own files)

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from learner import publish as module
from learner.batch import Batch, TokenSequence
from learner.publish import OWNER, SHARED_MEMORY, Publisher, PushNotVerified
from learner.settings import ObjectiveSettings, OptimizerSettings, PublishSettings
from learner.trainer import Trainer
from rollout.policy.base import PauseMode, PolicyError, PolicyUnavailable, SamplingParams
from rollout.policy.client import VllmAdmin, VllmPolicy
from rollout.policy.memory import MemoryPolicy
from tests.rollout.policy.tiny import EngineProcess, make_tokenizer
from tests.rollout.policy.tiny import make_model as tiny_model

VOCABULARY = 11


def logprobs(weights: Mapping[str, torch.Tensor], tokens: list[int]) -> list[float]:
    """A unigram model: enough to tell one set of weights from another."""
    table = torch.log_softmax(weights["table"].float(), -1)
    return [float(table[token]) for token in tokens[1:]]


class Model:
    """What the trainer is to the publisher."""

    vocab_size = VOCABULARY

    def __init__(self) -> None:
        self.table = torch.zeros(VOCABULARY)

    def learn(self) -> None:
        self.table = self.table + torch.arange(VOCABULARY) / 7

    def weights(self) -> dict[str, torch.Tensor]:
        return {"table": self.table.clone()}

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        return logprobs(self.weights(), token_ids)


class Server(MemoryPolicy):
    """Loads what it is given. `faults` are raised, or awaited, by the next calls of that name."""

    def __init__(self, url: str = "http://server") -> None:
        super().__init__(vocab_size=VOCABULARY, tokens_per_tick=1)
        self.url = url
        self.faults: dict[str, list[Any]] = {}
        self.calls: list[str] = []
        self.served = {"table": torch.zeros(VOCABULARY)}
        self.ignores_weights = False

    def restart(self) -> None:
        self._version = 0
        self.served = {"table": torch.zeros(VOCABULARY)}
        self._open.set()

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.faults.get(name):
            fault = self.faults[name].pop(0)
            if isinstance(fault, BaseException):
                raise fault
            await fault()

    async def version(self) -> int:
        await self._called("version")
        return await super().version()

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        assert mode == "keep"
        await self._called("pause")
        await super().pause(mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        await self._called("resume")
        await super().resume()

    async def update_weights(self, update_info: Mapping[str, Any], version: int) -> None:
        await self._called("update_weights")
        await super().update_weights(update_info, version)
        if not self.ignores_weights:
            self.served = load_file(update_info["path"])

    async def prompt_logprobs(self, token_ids: Any) -> list[float]:
        await self._called("prompt_logprobs")
        return logprobs(self.served, list(token_ids))


class Rig:
    def __init__(self, run: Path, count: int, dtype: str, **settings: Any) -> None:
        self.model = Model()
        self.servers = [Server(f"http://server-{i}") for i in range(count)]
        self.run = run
        self.publisher = Publisher(PublishSettings.model_validate(settings), run, self.servers, dtype=dtype)

    def files(self) -> list[Path]:
        return sorted((self.run / "files").rglob("*.safetensors"))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, 1, "float32", folder=str(tmp_path / "files"), timeout_s=5)


async def test_a_push_is_served_and_verified(rig: Rig) -> None:
    rig.model.learn()
    report = await rig.publisher.publish(rig.model, 1)
    assert torch.equal(rig.servers[0].served["table"], rig.model.table)
    assert report.version == await rig.servers[0].version() == 1
    assert report.difference == pytest.approx(0, abs=1e-6)
    assert 0 <= report.pause_seconds <= report.seconds
    assert not rig.servers[0].paused


async def test_requests_in_flight_go_on_under_the_new_weights(rig: Rig) -> None:
    server = rig.servers[0]
    request = asyncio.create_task(server.generate([1], SamplingParams(max_tokens=5000), request_id="a"))
    # One turn of the loop begins the request; it makes one token in each turn from then on.
    await asyncio.sleep(0)
    assert server.in_flight
    await rig.publisher.publish(rig.model, 3)
    completion = await request
    assert [version for version, _ in completion.versions] == [0, 3]


async def test_a_server_with_other_weights_is_found_out(rig: Rig) -> None:
    server = rig.servers[0]
    server.ignores_weights = True
    rig.model.learn()
    with pytest.raises(PushNotVerified) as caught:
        await rig.publisher.publish(rig.model, 1)
    text = str(caught.value)
    release = rig.publisher._release
    assert release is not None
    pairs = zip(logprobs(server.served, release.probe), release.expected, strict=True)
    probe_difference = sum(abs(a - b) for a, b in pairs) / len(release.expected)
    assert probe_difference > 0.1
    for part in (f"by {probe_difference:.4g} nats", "http://server-0", "publish.tolerance", "0.002", "publish.verify"):
        assert part in text
    assert not server.paused


async def test_without_verification_it_is_not(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 1, "float32", folder=str(tmp_path / "files"), verify=False)
    rig.servers[0].ignores_weights = True
    rig.model.learn()
    assert (await rig.publisher.publish(rig.model, 1)).difference is None
    assert "prompt_logprobs" not in rig.servers[0].calls


async def test_not_a_number_is_a_difference(rig: Rig) -> None:
    rig.servers[0].ignores_weights = True
    rig.servers[0].served = {"table": torch.full((VOCABULARY,), float("nan"))}
    with pytest.raises(PushNotVerified, match="nan"):
        await rig.publisher.publish(rig.model, 1)


async def test_bfloat16_servers_get_bfloat16_and_a_wider_tolerance(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 1, "bfloat16", folder=str(tmp_path / "files"))
    rig.model.learn()
    report = await rig.publisher.publish(rig.model, 1)
    assert rig.servers[0].served["table"].dtype == torch.bfloat16
    assert report.difference is not None
    assert 0 < report.difference < 0.1


async def test_a_refusal_ends_the_push_and_resumes_the_server(rig: Rig) -> None:
    rig.servers[0].faults["update_weights"] = [PolicyError("tensor 'x' has shape [1]") for _ in range(10)]
    with pytest.raises(PolicyError, match="shape") as caught:
        await rig.publisher.publish(rig.model, 1)
    assert not isinstance(caught.value, PolicyUnavailable)
    assert not rig.servers[0].paused


@pytest.mark.parametrize("call", ["pause", "update_weights", "resume", "prompt_logprobs", "version"])
async def test_a_server_that_dies_in_the_middle_and_comes_back_is_pushed_to_again(rig: Rig, call: str) -> None:
    server = rig.servers[0]

    async def dies() -> None:
        server.restart()
        raise PolicyUnavailable("connection reset")

    server.faults[call] = [dies]
    rig.model.learn()
    report = await rig.publisher.publish(rig.model, 1)
    assert await server.version() == 1
    assert torch.equal(server.served["table"], rig.model.table)
    assert report.difference is not None
    assert not server.paused


async def test_a_server_that_restarts_unseen_before_the_probe_is_pushed_to_again(rig: Rig) -> None:
    server = rig.servers[0]

    async def restarts() -> None:
        server.restart()

    server.faults["prompt_logprobs"] = [restarts]
    rig.model.learn()
    await rig.publisher.publish(rig.model, 1)
    assert torch.equal(server.served["table"], rig.model.table)


async def test_a_server_that_stays_away_is_given_up_after_the_deadline(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 1, "float32", folder=str(tmp_path / "files"), timeout_s=0.2)
    rig.servers[0].faults["pause"] = [PolicyUnavailable("connection refused") for _ in range(1000)]
    with pytest.raises(PolicyUnavailable, match=r"http://server-0 .*publish\.timeout_s. = 0\.2: connection refused"):
        await rig.publisher.publish(rig.model, 1)


async def test_a_server_that_hangs_is_given_up_after_the_deadline_and_resumed(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 1, "float32", folder=str(tmp_path / "files"), timeout_s=0.1)
    rig.servers[0].faults["update_weights"] = [asyncio.Event().wait]
    with pytest.raises(PolicyUnavailable, match=r"publish\.timeout_s"):
        await rig.publisher.publish(rig.model, 1)
    assert not rig.servers[0].paused


async def test_a_cancelled_push_resumes_the_server(rig: Rig) -> None:
    server = rig.servers[0]
    reached = asyncio.Event()

    async def hangs() -> None:
        reached.set()
        await asyncio.Event().wait()

    server.faults["update_weights"] = [hangs]
    push = asyncio.create_task(rig.publisher.publish(rig.model, 1))
    await reached.wait()
    assert server.paused
    push.cancel()
    with pytest.raises(asyncio.CancelledError):
        await push
    assert not server.paused


async def test_every_server_is_pushed_to_and_the_worst_one_counts(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 3, "float32", folder=str(tmp_path / "files"))
    rig.model.learn()
    rig.servers[1].ignores_weights = True
    with pytest.raises(PushNotVerified, match="http://server-1 "):
        await rig.publisher.publish(rig.model, 1)
    assert [await server.version() for server in rig.servers] == [1, 1, 1]
    assert torch.equal(rig.servers[2].served["table"], rig.model.table)


async def test_catching_up_pushes_the_newest_version_while_the_trainer_is_elsewhere(rig: Rig) -> None:
    rig.model.learn()
    await rig.publisher.publish(rig.model, 4)
    published = rig.model.table
    rig.servers[0].restart()
    rig.model.learn()
    report = await rig.publisher.catch_up(rig.model, 4)
    assert report.version == await rig.servers[0].version() == 4
    assert torch.equal(rig.servers[0].served["table"], published)


async def test_catching_up_leaves_a_server_alone_that_is_right(rig: Rig) -> None:
    await rig.publisher.publish(rig.model, 4)
    rig.servers[0].calls.clear()
    await rig.publisher.catch_up(rig.model, 4)
    assert "pause" not in rig.servers[0].calls


async def test_catching_up_replaces_other_weights_of_the_same_version(rig: Rig) -> None:
    await rig.publisher.publish(rig.model, 4)
    rig.servers[0].served = {"table": torch.arange(VOCABULARY).float()}
    await rig.publisher.catch_up(rig.model, 4)
    assert torch.equal(rig.servers[0].served["table"], rig.model.table)


async def test_on_resume_it_is_the_trainer_that_is_published(rig: Rig) -> None:
    rig.model.learn()
    await rig.publisher.catch_up(rig.model, 7)
    assert await rig.servers[0].version() == 7
    assert torch.equal(rig.servers[0].served["table"], rig.model.table)


async def test_at_the_start_a_server_of_the_same_model_is_left_alone(rig: Rig) -> None:
    report = await rig.publisher.catch_up(rig.model, 0)
    assert (report.version, report.pause_seconds) == (0, 0.0)
    assert report.difference == pytest.approx(0, abs=1e-6)
    assert rig.servers[0].updates == []


@pytest.mark.parametrize("version", [0, 9])
async def test_at_the_start_a_server_with_other_weights_gets_ours(rig: Rig, version: int) -> None:
    rig.servers[0]._version = version
    rig.servers[0].served = {"table": torch.arange(VOCABULARY).float()}
    await rig.publisher.catch_up(rig.model, 0)
    assert await rig.servers[0].version() == 0
    assert torch.equal(rig.servers[0].served["table"], rig.model.table)


async def test_as_many_versions_stay_on_disk_as_were_asked_for(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 1, "float32", folder=str(tmp_path / "files"), keep=2)
    for version in range(1, 5):
        await rig.publisher.publish(rig.model, version)
    assert [path.parent.name.split("-")[1] for path in rig.files()] == ["3", "4"]
    assert rig.servers[0].updates[-1][0]["path"] == str(rig.files()[-1])


async def test_a_full_disk_leaves_no_half_file_and_no_paused_server(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, tensors: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, os.strerror(28), str(path))

    monkeypatch.setattr(module, "write_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        await rig.publisher.publish(rig.model, 1)
    assert list((rig.run / "files").rglob("*model*")) == []
    assert rig.servers[0].calls == []


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(module, "SHARED_MEMORY", folder)
    return folder


async def test_shared_memory_is_used_tidied_and_closed_to_others(tmp_path: Path, shared: Path) -> None:
    killed = Rig(tmp_path / "run", 1, "float32")
    await killed.publisher.publish(killed.model, 1)
    # The same run again, after a kill -9: what it left is gone.
    rig = Rig(tmp_path / "run", 1, "float32")
    assert list(shared.rglob("*.safetensors")) == []
    await rig.publisher.publish(rig.model, 2)
    (folder,) = shared.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    assert rig.servers[0].updates[0][0]["path"].startswith(str(folder))
    rig.publisher.close()
    assert list(shared.iterdir()) == []


async def test_without_shared_memory_the_runs_folder_is_used(tmp_path: Path, shared: Path) -> None:
    shared.rmdir()
    shared.write_text("no folder")
    rig = Rig(tmp_path / "run", 1, "float32")
    await rig.publisher.publish(rig.model, 1)
    assert rig.servers[0].updates[0][0]["path"].startswith(str(tmp_path / "run" / "weights"))


async def test_a_real_engine_serves_what_a_real_trainer_learned_also_after_a_kill(tmp_path: Path) -> None:
    tiny_model(0).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    trainer = Trainer(
        tmp_path / "model",
        optimizer=OptimizerSettings(learning_rate=1e-2, threads=1),
        objective=ObjectiveSettings(),
        micro_batch_tokens=64,
        temperature=1.0,
        seed=0,
    )

    def learn() -> None:
        tokens = np.array([5, 6, 7, 8], np.int32)
        logprobs = np.array([0, *trainer.prompt_logprobs(tokens.tolist())], np.float32)
        ones = np.array([0, 1, 1, 1])
        item = TokenSequence(
            key="k",
            tokens=tokens,
            mask=ones.astype(np.bool_),
            logprobs=logprobs,
            versions=(ones - 1).astype(np.int32),
            advantages=ones.astype(np.float32),
        )
        trainer.step(Batch(groups=(0,), sequences=(item,)))

    with EngineProcess(tmp_path / "model", tmp_path) as engine:
        admin = VllmAdmin(engine.url, retry_s=1)
        policy = VllmPolicy(engine.url)
        publisher = Publisher(PublishSettings(), tmp_path, [admin], dtype="float32")
        try:
            before = await publisher.catch_up(trainer, 0)
            learn()
            after = await publisher.publish(trainer, 1)
            done = await policy.generate([5, 6], SamplingParams(max_tokens=4, seed=0), request_id="a")
            assert done.versions == ((1, 4),)
            assert done.logprobs == pytest.approx(trainer.prompt_logprobs([5, 6, *done.token_ids])[1:], abs=1e-3)
            for report in (before, after):
                assert report.difference is not None
                assert report.difference < 1e-4
            learn()
            engine.end(signal.SIGKILL)
            push = asyncio.create_task(publisher.publish(trainer, 2))
            with EngineProcess(tmp_path / "model", tmp_path, "--port", engine.url.rsplit(":", 1)[1]):
                await push
                assert await admin.version() == 2
        finally:
            publisher.close()
            await admin.close()
            await policy.close()


def test_weights_of_a_trainer_that_died_do_not_stay_in_shared_memory(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    dead, living = SHARED_MEMORY / "farmhand-of-the-dead", SHARED_MEMORY / "farmhand-of-the-living"
    try:
        for folder, pid in ((dead, child.pid), (living, os.getpid())):
            folder.mkdir(mode=0o700)
            (folder / OWNER).write_text(f"{pid}\n")
        Publisher(PublishSettings(), tmp_path, [], dtype="float32")
        assert not dead.exists()
        assert living.exists()
    finally:
        for folder in (dead, living):
            shutil.rmtree(folder, ignore_errors=True)
