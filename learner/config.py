"""A run's configuration: one TOML file, checked as a whole before anything starts.

Guarantees:

* A mistake is reported with the file, the key, what was found and what is allowed; all mistakes of a file come at once.
* `config.rollout()` is the part that workers need, and holds nothing of the learner.
* `config.model_dump(mode="json", by_alias=True)` loads back to an equal configuration; a run's folder keeps it.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from learner.settings import (
    AsyncSettings,
    BatchSettings,
    CheckpointSettings,
    ObjectiveSettings,
    OptimizerSettings,
    PublishSettings,
)
from rollout.config import RolloutConfig


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunSection(Section):
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the run and of its folder. None: the config file's name and the time of the start."""
    folder: Path = Path("runs")
    """Where the run's folder is made."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    steps: int | None = Field(default=None, ge=1)
    """Training steps; None: until `time_limit_s`."""
    time_limit_s: float | None = Field(default=None, gt=0)
    """Wall clock of training, start and evaluations at its ends apart."""
    max_failed_share: float = Field(default=0.5, gt=0, le=1)
    """The run stops when more than this share of the last `failure_window` train episodes failed."""
    failure_window: int = Field(default=64, ge=1)


class EvalSection(Section):
    every: int = Field(default=0, ge=0)
    """Steps between evaluations on the test split; 0: none between."""
    size: int = Field(default=200, ge=0)
    """Test tasks of an evaluation, the first ones of the split; 0: no evaluation at all."""
    at_start: bool = True
    at_end: bool = True
    temperature: float | None = Field(default=None, ge=0)
    """None: as in training."""
    timeout_s: float = Field(default=900.0, gt=0)


class FarmSection(Section):
    workers: int = Field(default=1, ge=0)
    """Worker processes to start here; 0 where all workers are started elsewhere."""
    concurrency: int = Field(default=128, ge=1)
    """Episodes at once of each worker process."""


class BrokerSection(Section):
    url: str | None = Field(default=None, pattern=r"^(redis|rediss|unix)://")
    """A Valkey or Redis that workers elsewhere can reach. None: one is started in the run's folder."""


class EngineSection(Section):
    """The reference engine that is started where `policy.url` is not set."""

    threads: int = Field(default=1, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_num_seqs: int = Field(default=128, ge=1)
    max_model_len: int | None = Field(default=None, ge=16)
    """Tokens of the longest sequence; None: the model's."""


class TrainConfig(RolloutConfig):
    """Everything that a config file may say: the sections of `RolloutConfig`, and the learner's."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    run: RunSection = RunSection()
    batch: BatchSettings = BatchSettings()
    async_: AsyncSettings = Field(default=AsyncSettings(), alias="async")
    objective: ObjectiveSettings = ObjectiveSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    publish: PublishSettings = PublishSettings()
    eval: EvalSection = EvalSection()
    farm: FarmSection = FarmSection()
    broker: BrokerSection = BrokerSection()
    engine: EngineSection = EngineSection()

    def rollout(self) -> RolloutConfig:
        """The part that is published to the workers."""
        return RolloutConfig(**{name: getattr(self, name) for name in RolloutConfig.model_fields})


@dataclass(frozen=True, slots=True)
class Mistake:
    key: str
    found: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.key}: found {self.found}; {self.allowed}"


class ConfigError(Exception):
    """One or more mistakes in a configuration. `str` is the whole report."""

    def __init__(self, source: str, mistakes: Sequence[Mistake]) -> None:
        many = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__("\n".join([f"{source}: {many}", *(f"  {mistake}" for mistake in mistakes)]))
        self.mistakes = tuple(mistakes)


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file and apply `section.key=value` overrides. Raises `ConfigError` with every mistake of form."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(str(path), [Mistake("file", "nothing at this path", "expected a TOML file")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [Mistake("file", str(error), "expected a readable TOML file")]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), [Mistake("syntax", str(error), "expected TOML, see https://toml.io")]) from None
    apply_overrides(data, overrides)
    return check_form(data, str(path))


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Write each `section.key=value` into `data`. Raises `ConfigError`.

    Another task set takes none of the options that the file has for its own.
    """
    if any(text.partition("=")[0].strip() == "tasks.set" for text in overrides) and isinstance(data.get("tasks"), dict):
        data["tasks"] = {key: value for key, value in data["tasks"].items() if key != "options"}
    mistakes = [mistake for text in overrides if (mistake := _override(data, text))]
    if mistakes:
        raise ConfigError("--set", mistakes)


def check_form(data: Mapping[str, Any], source: str) -> TrainConfig:
    """Build a configuration from plain data. `source` names it in the report."""
    mistakes: list[Mistake] = []
    config: TrainConfig | None = None
    try:
        config = TrainConfig.model_validate(data)
    except ValidationError as error:
        mistakes = list(_explain(TrainConfig, error))
    else:
        if config.run.steps is None and config.run.time_limit_s is None:
            mistakes.append(Mistake("run", "neither `steps` nor `time_limit_s`", "expected at least one, to know the end"))
    if mistakes or config is None:
        raise ConfigError(source, mistakes)
    return config


def _override(data: dict[str, Any], text: str) -> Mistake | None:
    """Apply one `a.b=value`. The value is TOML; what is not TOML is a string, so that quotes are not needed."""
    key, equals, raw = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        return Mistake("--set", repr(text), "expected section.key=value")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    place = data
    for part in parts[:-1]:
        inner = place.setdefault(part, {})
        if not isinstance(inner, dict):
            return Mistake(key, f"{part!r} is not a section", "expected section.key=value")
        place = inner
    place[parts[-1]] = value
    return None


def _explain(model: type[BaseModel], error: ValidationError) -> Iterator[Mistake]:
    """Pydantic's findings in our words."""
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"]]
        key = ".".join(location) or "file"
        found = _show(item["input"])
        if item["type"] == "extra_forbidden":
            owner = _model_at(model, location[:-1])
            known = [field.alias or name for name, field in owner.model_fields.items()]
            near = difflib.get_close_matches(location[-1], known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            what = "section" if len(location) == 1 else "key"
            yield Mistake(key, f"an unknown {what}", f"{hint}allowed: {', '.join(sorted(known))}")
        elif item["type"] == "missing":
            yield Mistake(key, "nothing", "expected a value")
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            yield Mistake(key, found, f"allowed: {message[:1].lower()}{message[1:]}")


def _model_at(model: type[BaseModel], location: Sequence[str]) -> type[BaseModel]:
    """The section that a key lies in."""
    for part in location:
        for name, field in model.model_fields.items():
            if part in {name, field.alias}:
                inner = [a for a in _members(field.annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
                if inner:
                    model = inner[0]
    return model


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        return typing.get_args(annotation)
    return (annotation,)


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
