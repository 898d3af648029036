"""Train one run: until it has learned its training length, or `train.max_steps`.

Batch t is a function of (data_seed, t) alone, so a resumed run needs no random state: weights,
optimizer and the step are all there is, and it ends bit for bit as if it had never stopped.
"""

import math
import os
import platform
import signal
import subprocess
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from posx import metrics, optim
from posx.build import make_model, make_task
from posx.config import Config, TrainConfig
from posx.device import DTYPES, device_name, pick_device, pick_dtype, precision, weight_dtype
from posx.errors import UserError
from posx.model import Transformer
from posx.progress import Bar, say
from posx.runs import SCHEMA, TRAIN_COLUMNS, Run
from posx.seeds import generator
from posx.tasks.base import Batch, Task

FINAL_CHECK = 4  # the last check draws this many times train.check_sequences
CHECK_TOKENS = 16384  # tokens a forward pass of a check
STOPS = [  # signals on which a run is saved and ends; the last two are those of batch systems
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]


class Interrupted(Exception):
    """Training was asked to stop; the run was saved and goes on with the same command."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class State:
    """All that a resumed run needs besides weights and optimizers."""

    step: int = 0
    tokens: int = 0
    steps_to_target: int | None = None  # the first check that reached train.target
    seconds: float = 0.0  # wall time, over all sittings
    cpu_seconds: float = 0.0  # processor time, over all sittings
    losses: list[float] = field(default_factory=list)  # since the last row
    grad_norms: list[float] = field(default_factory=list)
    row_tokens: int = 0
    row_seconds: float = 0.0
    rows: list[dict[str, float]] = field(default_factory=list)  # of train.csv


def train(config: Config, run: Run, parent: Run | None, label: str) -> dict[str, Any]:
    """Train a run in its folder and return its record.

    Raises:
        Interrupted: by ctrl-C, SIGTERM or SIGUSR1; saved before.
        UserError: the config does not fit the task, the scheme or this machine.
    """
    torch.set_num_threads(config.threads)
    device, dtype = pick_device(config.device), pick_dtype(config.dtype, config.device)
    task = make_task(config)
    task.check_length(config.train_len)
    torch.manual_seed(config.seed)  # the only use of the global generator: initial weights
    model = make_model(config, task, parent)
    model.to(device, weight_dtype(dtype))
    optimizers = optim.make_optimizers(config.optim, model)
    # Checked and kept is a running mean of the weights, which is steadier than any one step's.
    average = AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(config.train.average), use_buffers=False
    )
    run.clean()
    state = _resume(run, model, average, optimizers)

    record = _record(config, parent, label, model, device)
    run.write_config(config.dumps())
    run.write_record(record | {"status": "running", "steps": state.step})
    try:
        with stop_signals() as pending:
            _loop(config, run, task, model, average, optimizers, state, pending)
        started, cpu_started = time.perf_counter(), time.process_time()
        check = _check(config, task, average, -1, config.train.check_sequences * FINAL_CHECK)
        state.seconds += time.perf_counter() - started
        state.cpu_seconds += time.process_time() - cpu_started
    except Interrupted as error:
        run.write_record(
            record | {"status": "interrupted", "reason": str(error), "steps": state.step}
        )
        raise
    converged = min(check["token_acc"], check["tail_acc"]) >= config.train.converged_at
    run.save_weights(average.module.state_dict())
    run.write_table("train", pd.DataFrame(state.rows, columns=list(TRAIN_COLUMNS)))
    record |= {
        "status": "finished",
        "converged": converged,
        "steps": state.step,
        "steps_to_target": state.steps_to_target,
        "tokens": state.tokens,
        "wall_s": round(state.seconds, 3),
        "cpu_s": round(state.cpu_seconds, 3),
        "flops": model.flops(config.train_len) * state.tokens,
        "check": check,
    }
    run.write_record(record)
    with suppress(OSError):  # it is only in the way now, and the run is finished all the same
        (run.folder / "state.pt").unlink()
    return record


def draw_items(config: TrainConfig, most: int, step: int, random: torch.Generator) -> int:
    """How many payload symbols step `step` trains on: one count a step, the same for the batch."""
    if config.lengths == "fixed":
        return most
    if config.lengths == "curriculum":
        grown = min(1.0, 0.2 + 0.8 * step / config.curriculum_steps)
        most = max(1, round(most * grown))
    return int(torch.randint(1, most + 1, (1,), generator=random))


def training_items(config: Config, task: Task, step: int) -> tuple[int, torch.Generator]:
    """Payload symbols of a step, and the generator that goes on to draw them."""
    origin = [] if config.init is None else [config.init]  # never the parent's sequences again
    random = generator("train", *origin, config.data_seed, step)
    return draw_items(config.train, task.items(config.train_len), step, random), random


def training_batch(config: Config, task: Task, step: int) -> tuple[Batch, torch.Generator]:
    """The batch of a step and the generator that goes on to draw the scheme's positions."""
    n, random = training_items(config, task, step)
    length = task.length(n)
    sequences = max(1, config.train.tokens_per_step // length)
    return task.sample(random, sequences, length), random


def rate(config: Config, state: State) -> float:
    """Learning rate as a fraction of its peak: warm-up, a slow fall to 0 at max_steps, and from the
    step at which the target was reached a fast one to 0 within decay_steps."""
    law = config.train
    warm = min(1.0, (state.step + 1) / config.optim.warmup_steps)
    if state.steps_to_target is None:
        return warm * (1 - state.step / law.max_steps)
    slow = 1 - state.steps_to_target / law.max_steps
    return warm * slow * (1 - (state.step - state.steps_to_target) / law.decay_steps)


def last_step(law: TrainConfig, state: State) -> int:
    """The step at which training ends, as far as is known."""
    if state.steps_to_target is None:
        return law.max_steps
    return min(law.max_steps, state.steps_to_target + law.decay_steps)


def _loop(
    config: Config,
    run: Run,
    task: Task,
    model: Transformer,
    average: AveragedModel,
    optimizers: list[torch.optim.Optimizer],
    state: State,
    pending: list[int],
) -> None:
    """Steps until the learning rate is 0; `pending` fills with signals that ask to stop."""
    law = config.train
    title = f"{config.task_name}/{config.scheme_name} seed {config.seed}"
    with Bar(title, law.max_steps, state.step) as bar:
        while state.step < (end := last_step(law, state)):
            started, cpu_started = time.perf_counter(), time.process_time()
            batch, random = training_batch(config, task, state.step)
            fraction = rate(config, state)
            optim.set_rate(optimizers, fraction)
            loss, norm = _step(config, model, optimizers, batch, random)
            average.update_parameters(model)
            elapsed = time.perf_counter() - started
            state.step += 1
            state.tokens += batch.tokens.numel()
            state.row_tokens += batch.tokens.numel()
            state.row_seconds += elapsed
            state.losses.append(loss)
            state.grad_norms.append(norm)
            if state.step % law.check_every == 0 or state.step == end:
                check = _check(config, task, average, state.step, law.check_sequences)
                _add_row(state, check, fraction)
                reached = min(check["token_acc"], check["tail_acc"])
                if state.steps_to_target is None and reached >= law.target:
                    state.steps_to_target = state.step
            bar.update(state.step, _facts(state), total=end)
            state.seconds += time.perf_counter() - started
            state.cpu_seconds += time.process_time() - cpu_started
            if pending or state.step % law.checkpoint_every == 0:
                _save(run, model, average, optimizers, state)
            if pending:
                raise Interrupted(pending[0])


def per_second(tokens: int, seconds: float) -> float:
    """Tokens a second; NaN where the clock stood still or went backwards."""
    return round(tokens / seconds, 1) if seconds > 0 else math.nan


def _facts(state: State) -> dict[str, str]:
    if not state.rows:
        return {"loss": f"{state.losses[-1]:.3f}"}
    row = state.rows[-1]
    return {
        "loss": f"{row['loss']:.3f}",
        "acc": f"{row['token_acc']:.3f}",
        "tok/s": f"{row['tokens_per_s'] / 1000:.1f}k",
    }


def _step(
    config: Config,
    model: Transformer,
    optimizers: list[torch.optim.Optimizer],
    batch: Batch,
    random: torch.Generator,
) -> tuple[float, float]:
    """One optimizer step; returns the loss and the gradient norm before clipping."""
    with precision(DTYPES[config.dtype], model.embedding.device):
        logits, digits = model.answer(batch, random)
    loss = metrics.loss(logits, digits)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
    for optimizer in optimizers:
        optimizer.step()
    return loss.item(), norm.item()


@torch.no_grad()
def _check(
    config: Config, task: Task, average: AveragedModel, step: int, sequences: int
) -> dict[str, float]:
    """Accuracy at the training length on fresh in-range sequences; decides when training ends."""
    random = generator("check", config.data_seed, step)
    batch = task.sample(random, sequences, config.train_len)
    model = cast(Transformer, average.module)
    rows = max(1, CHECK_TOKENS // config.train_len)
    with precision(DTYPES[config.dtype], model.embedding.device):
        parts = [Batch(tokens, batch.n_answer) for tokens in batch.tokens.split(rows)]
        right = torch.cat([metrics.right(*model.answer(part)) for part in parts])  # (B, n + 1)
    payload = right[:, :-1].double()  # (B, n)
    last = metrics.tail(payload.shape[1])
    return {
        "token_acc": payload.mean().item(),
        "tail_acc": payload[:, -last:].mean().item(),
        "exact_match": right.all(1).double().mean().item(),
    }


def _add_row(state: State, check: dict[str, float], fraction: float) -> None:
    """Close the row of train.csv since the last check."""
    state.rows.append(
        {
            "step": state.step,
            "tokens": state.tokens,
            "loss": sum(state.losses) / len(state.losses),
            **check,
            "lr": fraction,
            "grad_norm": sum(state.grad_norms) / len(state.grad_norms),
            "tokens_per_s": per_second(state.row_tokens, state.row_seconds),
        }
    )
    state.losses, state.grad_norms, state.row_tokens, state.row_seconds = [], [], 0, 0.0


def _save(
    run: Run,
    model: nn.Module,
    average: AveragedModel,
    optimizers: list[torch.optim.Optimizer],
    state: State,
) -> None:
    run.save_state(
        {
            "model": model.state_dict(),
            "average": average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "state": asdict(state),
        }
    )
    run.write_table("train", pd.DataFrame(state.rows, columns=list(TRAIN_COLUMNS)))


def _resume(
    run: Run, model: nn.Module, average: AveragedModel, optimizers: list[torch.optim.Optimizer]
) -> State:
    """The saved state put into models and optimizers; a new one where none was saved.

    Raises:
        UserError: it is that of another run.
    """
    saved = run.load_state()
    if saved is None:
        if (run.folder / "state.pt").exists():
            say(f"{run.folder}: its state.pt cannot be read; training starts over")
        return State()
    try:
        model.load_state_dict(saved["model"])
        average.load_state_dict(saved["average"])
        for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        state = State(**saved["state"])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        raise UserError(
            f"{run.folder}/state.pt is not of this run; delete it and run the command again"
        ) from None
    say(f"{run.folder}: goes on at step {state.step}")
    return state


@contextmanager
def stop_signals() -> Generator[list[int]]:
    """Collect requests to stop, so that a step is never cut in half. Only a main thread can."""
    pending: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pending
        return
    before = {number: signal.signal(number, lambda got, _: pending.append(got)) for number in STOPS}
    try:
        yield pending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _record(
    config: Config, parent: Run | None, label: str, model: nn.Module, device: torch.device
) -> dict[str, Any]:
    """What is known before training starts."""
    return {
        "schema": SCHEMA,
        "status": "running",
        "reason": None,
        "task": config.task_name,
        "scheme": config.scheme_name,
        "label": label,
        "train_len": config.train_len,
        "seed": config.seed,
        "data_seed": config.data_seed,
        "hash": config.digest(),
        "group": config.group(None if parent is None else parent.record()["group"]),
        "parent": None if parent is None else str(parent.folder),
        "converged": None,
        "steps": 0,
        "steps_to_target": None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": config.dtype,
        "device": device_name(device),
        "threads": config.threads,
        "posx": version("posx"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "git": _git_revision(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _git_revision() -> str | None:
    """The revision of the checkout that this code runs from, if it is one; not that of a project
    of the user in which posx is installed."""
    checkout = Path(__file__).parents[1]
    if not (checkout / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=checkout,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
