"""The words of the checks: facts that were collected, and findings that pure functions draw from them.

Knows no way to collect a fact and no check.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from octavo.gpus import CardFacts
from octavo.machine import MachineFacts
from octavo.memory import KvPool, MemoryPrediction
from octavo.sharding import DividedSizes


class Severity(enum.Enum):
    """How bad a finding is: a failure stops the start, a warning does not."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """What a check found: the measured value, the limit it was held against, and what to do if it is not ok."""

    check_id: str
    severity: Severity
    measured: str
    limit: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.check_id}: {self.measured}; {self.limit}"
        return f"{text}. {self.remedy}" if self.remedy else text


@dataclass(frozen=True)
class PackageFacts:
    """An installed package: its version, and the range this release of octavo was tested with (`>=1.80,<2`)."""

    name: str
    version: str
    tested_range: str


@dataclass(frozen=True)
class KernelFacts:
    """The C++ kernels of this installation: built or not, and what the build said when it failed."""

    built: bool
    build_error: str | None


@dataclass(frozen=True)
class PortFacts:
    """A port that the start wants to listen on. `error` says why its address cannot be bound at all."""

    flag: str
    host: str
    port: int
    in_use: bool
    owner: str | None
    error: str | None


@dataclass(frozen=True)
class DirectoryFacts:
    """A directory that something is written to."""

    path: str
    is_writable: bool
    free_bytes: int


@dataclass(frozen=True)
class HostFacts:
    """What `octavo doctor` alone looks at. `cpu_quota` is what control groups allow, in CPUs."""

    num_present_cpus: int
    cpu_quota: float | None
    shared_memory: DirectoryFacts | None
    cache: DirectoryFacts


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer beside the embedding's rows; `problem` says why it could not be read."""

    num_tokens: int
    highest_token_id: int
    num_rows: int
    problem: str | None


@dataclass(frozen=True)
class ModelFacts:
    """The model that was asked for, as far as it could be read without loading it.

    `missing` says why it was not found; `file_problems` what is wrong with its files. What follows is None where
    one of the two stopped the reading.
    """

    name: str
    directory: str | None
    missing: str | None
    file_problems: tuple[str, ...]
    dtype: str | None
    model_limit_tokens: int | None
    max_model_len_tokens: int | None
    memory: MemoryPrediction | None
    kv_pool: KvPool | None
    num_replicas: int = 1
    """Workers on this machine, of which each takes so much memory."""
    num_ranks: int = 1
    """Ranks that hold the model together; `memory` is that of those on this machine, `kv_pool` each one's."""
    num_local_ranks: int = 1
    divided_sizes: DividedSizes | None = None
    other_models_bytes: int = 0
    """What the other models of the stack take on this machine."""
    tokenizer: TokenizerFacts | None = None
    """None where nobody looked."""


@dataclass(frozen=True)
class Facts:
    """Everything the checks look at. `model` is None where none was named, `kernels` where there are none."""

    machine: MachineFacts
    packages: tuple[PackageFacts, ...]
    kernels: KernelFacts | None
    ports: tuple[PortFacts, ...]
    model: ModelFacts | None
    host: HostFacts | None = None
    """None where nobody looked: a start does not."""
    cards: CardFacts | None = None
    """None where no model was named, so that nothing will compute."""


PROCESSES = ("router", "scheduler", "worker")
"""The processes of a stack. All of them share the machine and the installation."""


@dataclass(frozen=True)
class Check:
    """One thing that can be wrong. `title` says what must hold; `remedy` what to do in general, for the manual.

    `run` is a pure function; it returns None where the facts leave nothing to judge. `processes` are those whose start
    it concerns.
    """

    id: str
    title: str
    remedy: str
    run: Callable[[Facts], Finding | None]
    processes: tuple[str, ...] = PROCESSES
