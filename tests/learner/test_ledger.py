"""The ledger: every episode ends once, in one way."""

import json

import pytest

from learner.ledger import Ledger, LedgerError


def test_counts_add_up_after_every_change() -> None:
    ledger = Ledger()
    ledger.dispatch(["a", "b", "c", "d"])
    ledger.train("a")
    ledger.fail("b", "sandbox")
    ledger.drop("c", "stale")
    assert ledger.counts() == {"dispatched": 4, "trained": 1, "failed": 1, "dropped": 1, "unfinished": 1}
    assert ledger.unfinished == ("d",)
    assert (ledger.is_open("d"), ledger.is_open("a"), ledger.is_open("never")) == (True, False, False)


@pytest.mark.parametrize("end", ["train", "fail", "drop"])
def test_an_episode_ends_once(end: str) -> None:
    ledger = Ledger()
    ledger.dispatch(["a"])
    ledger.train("a")
    with pytest.raises(LedgerError, match="episode a is not open"):
        getattr(ledger, end)("a", *([] if end == "train" else ["x"]))
    assert ledger.counts()["dispatched"] == 1


@pytest.mark.parametrize("episodes", [["b", "a"], ["b", "b"]])
def test_a_dispatch_that_repeats_an_episode_counts_none_of_its_episodes(episodes: list[str]) -> None:
    ledger = Ledger()
    ledger.dispatch(["a"])
    with pytest.raises(LedgerError, match="dispatched already"):
        ledger.dispatch(episodes)
    assert ledger.unfinished == ("a",)


def test_its_state_is_json_and_comes_back() -> None:
    ledger = Ledger()
    ledger.dispatch(["a", "b", "c", "d"])
    ledger.train("a")
    ledger.fail("b", "policy")
    ledger.drop("c", "stale")
    ledger.lag.add({0: 5, 3: 2})
    again = Ledger()
    again.load_state(json.loads(json.dumps(ledger.state())))
    assert again.state() == ledger.state()
    assert again.lag.summary() == ledger.lag.summary()
    again.train("d")
