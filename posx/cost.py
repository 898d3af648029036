"""What schemes cost: time relative to no positions at all, and memory on long inputs.

Every measurement of a scheme stands beside one of the plain model in the same process, in turns, so
that a busy machine slows both. Process time, not wall time; one thread.
"""

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from posx.config import ModelConfig
from posx.memory import Peak
from posx.model import Transformer
from posx.schemes.base import Nope, Scheme, Site
from posx.tasks.base import Vocab

TRAIN_LEN, LONG = 256, 8192  # tokens
TRAIN_ROUNDS, LONG_ROUNDS = 7, 3
BATCH = 4  # sequences of a training step
VOCAB = Vocab(base=128, digits=2)


@dataclass(frozen=True)
class Cost:
    """Times as multiples of those without positions (medians over rounds), memory above the
    weights; `long` and `mib` are None where the scheme cannot process so many tokens."""

    train: float
    long: float | None
    mib: float | None


class Seconds(NamedTuple):
    """What a piece of work took: processor time, that of finished child processes included."""

    cpu: float
    wall: float


def interleave(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[Seconds]]:
    """The times of every piece of work, one of each a round, after an unmeasured round."""
    times: dict[str, list[Seconds]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            times[name].append(_seconds(work))
    return {name: each[1:] for name, each in times.items()}


class Meter:
    """Measures schemes on one model shape, the plain model built once."""

    def __init__(self, shape: ModelConfig) -> None:
        self.shape = shape
        self.plain = self._model(Nope, TRAIN_LEN)

    def measure(self, make: Callable[[Site], Scheme]) -> Cost:
        """The cost of one scheme, trained at 256 tokens and evaluated at 8192."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            model = self._model(make, TRAIN_LEN)
            train = self._ratio(_train, model, _digits(BATCH, TRAIN_LEN), TRAIN_ROUNDS)
            limit = model.max_len
            if limit is not None and limit < LONG:
                return Cost(train, None, None)
            digits = _digits(1, LONG)
            with Peak(torch.device("cpu")) as peak:
                _evaluate(model, digits)
            return Cost(train, self._ratio(_evaluate, model, digits, LONG_ROUNDS), peak.mib)
        finally:
            torch.set_num_threads(threads)

    def _model(self, make: Callable[[Site], Scheme], train_len: int) -> Transformer:
        torch.manual_seed(0)
        return Transformer(self.shape, VOCAB, make, train_len)

    def _ratio(
        self,
        work: Callable[[Transformer, Tensor], None],
        model: Transformer,
        digits: Tensor,
        rounds: int,
    ) -> float:
        """Median over rounds of the scheme's time by the plain model's."""
        works = {"plain": partial(work, self.plain, digits), "own": partial(work, model, digits)}
        times = interleave(works, rounds)
        pairs = zip(times["plain"], times["own"], strict=True)
        return median(own.cpu / plain.cpu for plain, own in pairs)


def _digits(batch: int, n: int) -> Tensor:
    """Random tokens: (B, n, digits)."""
    random = torch.Generator().manual_seed(0)
    return VOCAB.split(torch.randint(VOCAB.size, (batch, n), generator=random))


def _seconds(work: Callable[[], object]) -> Seconds:
    started = _cpu_seconds(), time.perf_counter()
    work()
    return Seconds(_cpu_seconds() - started[0], time.perf_counter() - started[1])


def _cpu_seconds() -> float:
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def _train(model: Transformer, digits: Tensor) -> None:
    random = torch.Generator().manual_seed(0)
    logits = model(digits, last=digits.shape[1] // 2, generator=random)
    logits.square().mean().backward()
    model.zero_grad()


@torch.no_grad()
def _evaluate(model: Transformer, digits: Tensor) -> None:
    model(digits, last=digits.shape[1] // 2)
