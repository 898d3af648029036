"""Run folders in and out: the only module that touches files of a run.

    <results>/runs/<task>/<scheme>/seed<k>-<hash8>/
        config.yaml        resolved and complete: rebuilds the model without today's yaml files
        run.json           status, versions, machine, counts
        train.csv          one row a logging interval
        eval.csv           one row an (extension, length)
        model.safetensors  the weights, once training has ended
        state.pt           optimizer, step and everything a resumed run needs

Every file is written under a temporary name, flushed and renamed, so a reader sees the old file or
the new one and a full disk loses neither.
"""

import io
import json
import os
import secrets
import tempfile
import zipfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from posx import lease
from posx.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

SCHEMA = 1  # of the run folder; part of the hash, so a change of meaning never mixes with old runs

NO_EXTENSION = "none"  # in eval.csv

AGAIN = "move the folder away and train the run again"  # where a finished run lost a file

# What every run.json has, whatever its status.
IN_RECORD = {
    *("schema", "status", "reason", "task", "scheme", "label", "train_len", "seed", "data_seed"),
    *("hash", "group", "converged", "steps"),
}

# What each column means; `posx show RUN` prints these.
TRAIN_COLUMNS = {
    "step": "optimizer steps done",
    "tokens": "tokens seen",
    "loss": "mean training loss since the row before, nats a token, summed over its digits",
    "token_acc": "token accuracy at train_len on fresh in-range sequences",
    "tail_acc": "the same over the last tenth of the answer",
    "exact_match": "share of those sequences with every answer token and EOS right",
    "lr": "learning rate as a fraction of its peak",
    "grad_norm": "mean gradient norm before clipping since the row before",
    "tokens_per_s": "training tokens a second since the row before",
}
EVAL_COLUMNS = {
    "scheme": "name of the trained scheme",
    "extension": "training-free change applied for this evaluation; none without",
    "extension_keys": "parameters of that change",
    "task": "name of the task",
    "seed": "seed of the weights",
    "train_len": "longest training sequence, tokens",
    "length": "evaluated sequence length, tokens (special tokens included)",
    "items": "payload symbols at that length",
    "sequences": "sequences evaluated",
    "eval_seed": "seed of those sequences",
    "computes": "whether the forward pass finished within the budget with finite logits",
    "status": "ok, out_of_range, over_memory, over_time, non_finite or error",
    "reason": "why it did not compute",
    "token_acc": "teacher-forced token accuracy over the payload of the answer",
    "token_acc_lo": "lower end of its 95 % interval",
    "token_acc_hi": "upper end of its 95 % interval",
    "exact_match": "share of sequences with every answer token and EOS right",
    "exact_match_lo": "lower end of its 95 % Wilson interval",
    "exact_match_hi": "upper end of its 95 % Wilson interval",
    "first_error": "mean share of the answer that is right before the first mistake",
    "acc_in": "token accuracy at output indices that training reached",
    "acc_out": "token accuracy at output indices beyond those",
    "loss": "mean loss, nats a token, summed over its digits",
    "chance": "token accuracy of the task's baseline at this length",
    "skill": "(token_acc - chance) / (1 - chance)",
    "verdict": "cannot, untrained, performs, degrades or fails",
    "generated_acc": "token accuracy of free-running greedy generation (--generate)",
    "overlap": "evaluation sequences at train_len or below that training may have drawn too",
    "seconds": "wall seconds of the forward passes",
    "tokens_per_s": "tokens a second of those",
    "peak_mb": "peak memory above the start, MiB",
    "attention_entropy": "mean entropy of the last layer's attention rows, nats",
    "path": "how attention was computed below the top layer",
}

_TEXT = {"scheme", "extension", "extension_keys", "task", "status", "reason", "verdict", "path"}
_COUNTS = {"seed", "train_len", "length", "items", "sequences", "eval_seed"}
EVAL_DTYPES = {
    column: "object" if column in _TEXT else "int64" if column in _COUNTS else "float64"
    for column in EVAL_COLUMNS
} | {"computes": "bool"}

Record = dict[str, Any]  # of run.json


@dataclass(frozen=True)
class Run:
    """One run folder."""

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    # -- the record ------------------------------------------------------------------------------

    def record(self) -> Record:
        """run.json as a dict.

        Raises:
            UserError: missing, unreadable, or not a run of posx.
        """
        path = self.folder / "run.json"
        try:
            record = json.loads(path.read_text("utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            what = "it has no run.json" if self.folder.is_dir() else "there is no such folder"
            raise UserError(f"{self.folder} is not a run folder: {what}") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}); move the folder away") from None
        if not isinstance(record, dict) or "status" not in record or "schema" not in record:
            raise UserError(f"{path} was not written by posx; move the folder away")
        if record["schema"] != SCHEMA:
            raise UserError(
                f"{path} has schema {record['schema']}, this posx reads {SCHEMA}: train it again"
            )
        if missing := IN_RECORD - record.keys():
            raise UserError(
                f"{path} lacks {', '.join(sorted(missing))}; move the folder away and train again"
            )
        return record

    def write_record(self, record: Mapping[str, Any]) -> None:
        text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        write_text(self.folder / "run.json", text)

    # -- the config ------------------------------------------------------------------------------

    def config_text(self) -> str:
        """config.yaml as text."""
        try:
            return (self.folder / "config.yaml").read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{self.folder}/config.yaml cannot be read ({error}); {AGAIN}"
            ) from None

    def write_config(self, text: str) -> None:
        write_text(self.folder / "config.yaml", text)

    # -- tables ----------------------------------------------------------------------------------

    def table(self, name: str) -> "pd.DataFrame":
        """`train` or `eval` as a data frame with the columns above; empty where there is none
        yet."""
        import pandas as pd

        columns = {"train": TRAIN_COLUMNS, "eval": EVAL_COLUMNS}[name]
        again = {"train": AGAIN, "eval": "delete it and run the command again"}[name]
        path = self.folder / f"{name}.csv"
        if not path.exists():
            return pd.DataFrame(columns=list(columns))
        try:
            # "none" is a value here and an empty cell is missing: pandas' own list has both.
            table = pd.read_csv(
                path, keep_default_na=False, na_values=[""], dtype=dict.fromkeys(_TEXT, object)
            )
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}); {again}") from None
        if missing := [column for column in columns if column not in table]:
            raise UserError(f"{path} lacks the columns {', '.join(missing)}; {again}")
        if not path.read_bytes().endswith(b"\n"):
            raise UserError(f"{path} is cut short; {again}")
        allowed = dict.fromkeys(_TEXT, "O") | dict.fromkeys((*_COUNTS, "step"), "i")
        allowed["computes"] = "b"
        kinds = {column: kind.kind for column, kind in table.dtypes.items()}
        damaged = [name for name in columns if kinds[name] not in allowed.get(name, "if")]
        if damaged and len(table):
            raise UserError(f"{path} is damaged ({', '.join(damaged)}); {again}")
        return table

    def write_table(self, name: str, table: "pd.DataFrame") -> None:
        columns = list({"train": TRAIN_COLUMNS, "eval": EVAL_COLUMNS}[name])
        text = table[columns].to_csv(index=False, lineterminator="\n")
        write_text(self.folder / f"{name}.csv", text)

    # -- tensors ---------------------------------------------------------------------------------

    def save_weights(self, weights: "dict[str, Tensor]") -> None:
        from safetensors.torch import save

        data = save({name: tensor.contiguous() for name, tensor in weights.items()})
        write_atomic(self.folder / "model.safetensors", lambda file: file.write(data))

    def load_weights(self) -> "dict[str, Tensor]":
        from safetensors import SafetensorError
        from safetensors.torch import load

        path = self.folder / "model.safetensors"
        try:
            return load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error}); {AGAIN}") from None

    def save_state(self, state: dict[str, Any]) -> None:
        import torch

        data = io.BytesIO()  # torch's own writer reports a full disk as a RuntimeError
        torch.save(state, data)
        write_atomic(self.folder / "state.pt", lambda file: file.write(data.getbuffer()))

    def load_state(self) -> dict[str, Any] | None:
        """The training state, or None where there is none or only a broken one."""
        import torch

        path = self.folder / "state.pt"
        if not path.exists():
            return None
        try:
            # No mmap: the file may be replaced while this process trains on.
            with zipfile.ZipFile(path) as parts:
                if parts.testzip() is not None:  # torch.load does not compare the checksums
                    return None
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # torch.load has no narrower class for a truncated or foreign file
            return None

    def clean(self) -> None:
        """Remove what earlier, killed or failed attempts left behind; only under the lock."""
        with suppress(OSError):  # what cannot be removed is in nobody's way
            (self.folder / "error.txt").unlink(missing_ok=True)
            for leftover in self.folder.glob(".*.*.*"):  # temporary files of write_atomic
                leftover.unlink(missing_ok=True)

    # -- one writer at a time --------------------------------------------------------------------

    @contextmanager
    def lock(self) -> Generator[bool]:
        """Whether this process is the only one working on the run. The kernel frees the lock of a
        killed process; a lease stands in where the lock does not reach another machine.

        Raises:
            UserError: there can be no lock in the folder.
        """
        from filelock import FileLock, Timeout

        make_folder(self.folder)
        lock = FileLock(self.folder / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            yield False
            return
        except OSError as error:
            raise UserError(f"cannot lock {self.folder}/.lock ({error.strerror})") from None
        try:
            with lease.hold(self.folder) as mine:
                yield mine
        finally:
            lock.release()


def folder_of(results: Path, task: str, scheme: str, seed: int, digest: str) -> Path:
    """The one folder of a run: the same config always gives the same folder."""
    return results / "runs" / task / scheme / f"seed{seed}-{digest[:8]}"


def find(results: Path) -> tuple[dict[Run, Record], list[str]]:
    """All readable runs below `results` with their records, sorted by folder, and a sentence for
    each other one."""
    records, problems = {}, []
    for folder in sorted((results / "runs").glob("*/*/seed*")):
        run = Run(folder)
        try:
            records[run] = run.record()
        except UserError as error:
            if not _holds_nothing(folder):
                problems.append(str(error))
    return records, problems


def _holds_nothing(folder: Path) -> bool:
    """Somebody's notes, or a run that was refused or killed before anything was written."""
    return not folder.is_dir() or all(
        path.name.startswith((".lock", ".lease.")) for path in folder.iterdir()
    )


def make_folder(folder: Path) -> None:
    """Create a folder that can be written to.

    Raises:
        UserError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error.strerror}): choose another folder with "
            "results_dir=... or POSX_RESULTS_DIR"
        ) from None


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda file: file.write(text.encode()))


def write_atomic(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file so that it is there whole or not at all.

    Raises:
        UserError: the disk is full or the folder cannot be written; the old file is still there.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        # The mode follows the umask; files of `tempfile` would be the owner's alone.
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror or error}): what was there is kept"
        ) from None
    finally:
        with suppress(OSError):  # it is renamed, or the folder cannot be written
            temporary.unlink()
