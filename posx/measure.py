"""Measure a trained model at one length: does it compute there, and does it perform there?

One teacher-forced pass gives everything about the first mistake exactly: under greedy decoding the
prefix is the same up to that mistake, so exact match and first error of free-running generation are
the same numbers. Only accuracy after the first mistake needs generation.
"""

import copy
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posx import metrics, stats
from posx.attention import BLOCK_BYTES, DENSE, block, choose_path
from posx.build import Extension, extend
from posx.config import Config
from posx.device import DTYPES, precision
from posx.errors import UserError
from posx.generate import greedy
from posx.memory import MIB, Peak, available
from posx.model import Transformer
from posx.seeds import generator
from posx.tasks.base import Batch, Task
from posx.train import per_second, training_batch, training_items

MIN_TOKENS = 4000  # answer tokens a length, at least
MIN_SEQUENCES = 4
BATCH_TOKENS = 8192  # tokens a forward pass
ENTROPY_ROWS = 32  # queries at each of ENTROPY_BLOCKS places
ENTROPY_BLOCKS = 8


@dataclass(frozen=True)
class Budget:
    """What one cell may take, and how much it evaluates."""

    max_memory: float | None = None  # MiB above the weights; None: what the machine can still give
    max_seconds: float = 600.0
    sequences: int | None = None
    seed: int = 0  # of the evaluation sequences
    generate: bool = False


def n_sequences(task: Task, length: int, budget: Budget) -> int:
    """Sequences evaluated at a length: enough for MIN_TOKENS answer tokens."""
    if budget.sequences is not None:
        return budget.sequences
    return max(MIN_SEQUENCES, math.ceil(MIN_TOKENS / task.items(length)))


def draw(task: Task, length: int, budget: Budget) -> Batch:
    """The evaluation sequences of a length: a function of task, length and seed alone, so that
    every scheme sees the same ones."""
    random = generator("eval", task.name, budget.seed, length)
    return task.sample(random, n_sequences(task, length, budget), length)


def measure(
    model: Transformer,
    task: Task,
    config: Config,
    length: int,
    budget: Budget,
    extension: Extension | None = None,
    steps: int = 0,
) -> dict[str, Any]:
    """One cell: the columns of eval.csv that do not name the run, without a verdict.

    `steps` is how long the run was trained, to count sequences that training saw too. Nothing that
    goes wrong in the pass is raised: it becomes the status and the reason.

    Raises:
        UserError: the task cannot make the length, or the extension does not fit the scheme.
    """
    task.check_length(length)
    row: dict[str, Any] = {
        "length": length,
        "items": task.items(length),
        "sequences": n_sequences(task, length, budget),
        "eval_seed": budget.seed,
        "chance": task.chance(length),
    }
    changed = model
    if extension is not None:
        changed = copy.deepcopy(model)
        extend(changed, extension, length)
    changed.eval()
    n_tokens = task.length(row["items"])
    row["path"] = choose_path(
        changed.scheme(len(changed.layers) - 1), n_tokens - 1, n_tokens - 1, training=False
    )
    refused = _refuse(changed, n_tokens, row["sequences"], budget)
    if refused is None:
        batch = draw(task, length, budget)
        row |= _compute(changed, batch, row["chance"], task, config, budget)
        if row["status"] == "ok" and length <= config.train_len:
            row["overlap"] = overlap(batch, task, config, steps)
    else:
        row |= refused
    return row | {"computes": row["status"] == "ok"}


def _refuse(
    model: Transformer, n_tokens: int, sequences: int, budget: Budget
) -> dict[str, Any] | None:
    """Status and reason where it is known before the start that the pass cannot be made."""
    max_len = model.max_len
    if max_len is not None and n_tokens > max_len:
        return {
            "status": "out_of_range",
            "reason": f"{n_tokens} tokens, the scheme's longest length is {max_len}; evaluate with "
            "--extend, or train with a higher scheme.max_len",
        }
    need = predict_mib(model, n_tokens, sequences)
    limit = budget.max_memory or available(model.embedding.device)
    if need > limit:
        return {
            "status": "over_memory",
            "reason": f"needs about {need:.0f} MiB, the budget is {limit:.0f} MiB (--max-memory)",
        }
    return None


def predict_mib(model: Transformer, n_tokens: int, sequences: int) -> float:
    """Memory of one forward pass above the weights, and of the sequences, from the shapes: an upper
    estimate."""
    c = model.config
    rows = min(sequences, max(1, BATCH_TOKENS // n_tokens)) * n_tokens  # tokens in flight
    width = c.n_heads * c.d_head
    floats = rows * (6 * c.d_model + 2 * c.d_ff + 5 * width)
    floats += rows * model.vocab.digits * (2 * model.vocab.rows + c.d_model) // 2
    size = model.embedding.element_size()
    strips = 8 * BLOCK_BYTES + 6 * 4 * c.n_heads * n_tokens
    if n_tokens <= DENSE:  # scores, weights and what is between them, should the path be dense
        floats += 6 * rows * c.n_heads * n_tokens
    drawn = 8 * 8 * sequences * n_tokens  # int64 symbols, and what drawing them takes
    return (floats * size + strips + drawn) / MIB


@torch.no_grad()
def _compute(
    model: Transformer, batch: Batch, chance: float, task: Task, config: Config, budget: Budget
) -> dict[str, Any]:
    """The pass itself: status, and the measures when it is ok."""
    step = max(1, BATCH_TOKENS // batch.tokens.shape[1])
    right, losses = [], []
    probe = _Probe(model)
    started = time.perf_counter()
    try:
        device = model.embedding.device
        with Peak(device) as peak, probe, precision(DTYPES[config.dtype], device):
            for tokens in batch.tokens.split(step):
                part = Batch(tokens, batch.n_answer)
                logits, digits = model.answer(part)
                if not logits.isfinite().all():
                    return {"status": "non_finite", "reason": "some logits are not finite"}
                right.append(metrics.right(logits, digits).cpu())  # (B, n + 1)
                losses.append(metrics.loss(logits, digits).item() * len(tokens))
                if (seconds := time.perf_counter() - started) > budget.max_seconds:
                    done = sum(len(part) for part in right)
                    return {
                        "status": "over_time",
                        "seconds": round(seconds, 4),
                        "reason": f"{seconds:.0f} s for {done} of {len(batch.tokens)} sequences, "
                        f"the budget is {budget.max_seconds:.0f} s (--max-seconds)",
                    }
    except UserError as error:
        return {"status": "out_of_range", "reason": str(error)}
    except (MemoryError, RuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        memory = isinstance(error, MemoryError) or "memory" in text
        return {"status": "over_memory" if memory else "error", "reason": text}
    measured = {
        "status": "ok",
        "seconds": round(seconds, 4),
        "tokens_per_s": per_second(batch.tokens.numel(), seconds),
        "peak_mb": round(peak.mib, 1),
        "loss": sum(losses) / len(batch.tokens),
        "attention_entropy": probe.entropy(),
    }
    measured |= summarise(torch.cat(right), task.items(config.train_len), chance)
    if budget.generate:
        measured["generated_acc"] = _generated_acc(model, batch)
    return measured


def len_of(batch: Batch) -> int:
    return batch.tokens.shape[1]


def summarise(right: Tensor, n_in: int, chance: float) -> dict[str, float | None]:
    """Accuracies and intervals from which tokens were right.

    right: bool (B, n + 1), the last column EOS; n_in: output indices that training reached.
    """
    payload = right[:, :-1]  # (B, n)
    sequences, n = payload.shape
    correct = payload.sum(1)  # (B,)
    accuracy = float(correct.sum()) / payload.numel()
    deff = stats.design_effect(correct.tolist(), n)
    n_eff = stats.effective_n(payload.numel(), deff)
    low, high = stats.wilson(float(correct.sum()), payload.numel(), n_eff)
    exact = int(right.all(1).sum())
    exact_low, exact_high = stats.wilson(exact, sequences)
    return {
        "token_acc": accuracy,
        "token_acc_lo": low,
        "token_acc_hi": high,
        "exact_match": exact / sequences,
        "exact_match_lo": exact_low,
        "exact_match_hi": exact_high,
        "first_error": metrics.first_error(right).double().mean().item(),
        "acc_in": payload[:, :n_in].double().mean().item(),
        "acc_out": payload[:, n_in:].double().mean().item() if n > n_in else None,
        "skill": stats.skill(accuracy, chance),
    }


def _generated_acc(model: Transformer, batch: Batch) -> float:
    """Token accuracy of free-running greedy generation, by output index."""
    right = 0.0
    for tokens in batch.tokens.split(max(1, BATCH_TOKENS // len_of(batch))):
        digits = model.vocab.split(tokens.to(model.embedding.device))  # (B, T, digits)
        n = batch.n_answer
        made = greedy(model, digits[:, :-n], n)  # (B, n + 1, digits)
        right += (made == digits[:, -n:]).all(-1)[:, :-1].sum().item()
    return right / (len(batch.tokens) * (batch.n_answer - 1))


def overlap(batch: Batch, task: Task, config: Config, steps: int) -> int:
    """How many evaluation sequences the run was trained on as well: its batches of this size are
    drawn again and compared. The two streams never share a seed, but short payloads recur by
    chance."""
    evaluated = [row.numpy().tobytes() for row in batch.prompt]
    wanted, trained = set(evaluated), set[bytes]()
    n = batch.n_answer - 1
    for step in range(steps):
        if training_items(config, task, step)[0] == n:
            drawn, _ = training_batch(config, task, step)
            trained |= wanted & {row.numpy().tobytes() for row in drawn.prompt}
    return sum(row in trained for row in evaluated)


class _Probe:
    """Catches the input of the last layer's attention, to take the entropy of its weights later."""

    def __init__(self, model: Transformer) -> None:
        self.attention = model.layers[-1].attention
        self.scheme = model.scheme(len(model.layers) - 1)
        self.caught: tuple[Any, ...] = ()

    def __enter__(self) -> "_Probe":
        self.handle = self.attention.register_forward_pre_hook(self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def _catch(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.caught = arguments

    @torch.no_grad()
    def entropy(self) -> float:
        """Mean entropy in nats over queries at ENTROPY_BLOCKS places spread over one sequence."""
        x, pos = self.caught[0][:1], self.caught[1]
        pos = pos[:1] if pos.ndim == 2 else pos  # (T,) or (1, T)
        q, k, v, state = self.attention.project(x, pos, self.scheme, None)
        n = x.shape[1]
        means = []
        for stop in torch.linspace(min(n, ENTROPY_ROWS), n, ENTROPY_BLOCKS).long().tolist():
            first = max(0, stop - ENTROPY_ROWS)
            _, p = block(
                self.scheme,
                q[:, :, first:stop],
                k[:, :, :stop],
                v[:, :, :stop],
                pos[..., first:stop],
                pos[..., :stop],
                None if state is None else state[:, :stop],
            )
            means.append(metrics.entropy(p.float()).mean().item())
        return sum(means) / len(means)
