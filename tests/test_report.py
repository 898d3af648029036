"""Reports from run folders made by hand, so that every number can be worked out on paper."""

import io
import json
import math
import os
import subprocess
import sys
import zlib

import pandas as pd
import pytest
from rich.console import Console

from posx import report, stats
from posx.errors import UserError
from posx.runs import EVAL_COLUMNS, SCHEMA, TRAIN_COLUMNS, Run, folder_of

LONG = "hard_alibi scheme.window=16 scheme.a_very_long_parameter_name_of_a_user=0.125"
LENGTHS = (64, 72, 96, 128, 256, 512)
SEQUENCES = 100


def eval_row(scheme, length, acc, *, task="copy", seed=0, extension="none", trained=True, **other):
    """An eval.csv row with the accuracy `acc` (None: out of range), of SEQUENCES sequences."""
    computes, items = acc is not None, (length - 3) // 2
    chance = round(sum(1 / k for k in range(1, items + 1)) / items, 6)
    row = dict.fromkeys(EVAL_COLUMNS, math.nan)
    row |= {"scheme": scheme, "extension": extension, "task": task, "seed": seed}
    row |= {"train_len": 64, "length": length, "items": items, "sequences": SEQUENCES}
    row |= {"computes": computes, "status": "ok" if computes else "out_of_range"}
    row |= {"reason": None if computes else "a table of 64 rows", "chance": chance}
    row["verdict"] = "cannot"
    if computes:
        tokens = SEQUENCES * items
        lo, hi = stats.wilson(acc * tokens, tokens)
        row |= {"token_acc": acc, "token_acc_lo": lo, "token_acc_hi": hi, "exact_match": acc / 2}
        row |= {"skill": stats.skill(acc, chance), "tokens_per_s": 1234.5, "peak_mb": 10.0}
        row["verdict"] = stats.verdict(True, lo, stats.skill(hi, chance), trained)
    return row | other


def make_run(
    results, scheme, accs, *, task="copy", seed=0, group=None, label=None, converged=True, **other
):
    """A run folder with one eval.csv row a value of `accs`, a dict of length or (extension, length)
    to accuracy."""
    group = group or f"{zlib.crc32((label or scheme).encode()):08x}"
    run = Run(folder_of(results, task, scheme, seed, f"{zlib.crc32(f'{group}{seed}'.encode()):08x}"))
    run.folder.mkdir(parents=True)
    record = {"schema": SCHEMA, "status": "finished", "reason": "", "scheme": scheme, "task": task}
    record |= {"seed": seed, "data_seed": 0, "train_len": 64, "label": label or scheme}
    record |= {"group": group, "hash": run.folder.name, "converged": converged, "steps": 1000}
    run.write_record(record | {"steps_to_target": 800, "parameters": 9, "wall_s": 1.5} | other)
    run.write_table("train", pd.DataFrame(columns=list(TRAIN_COLUMNS)))
    at = {key if isinstance(key, tuple) else ("none", key): acc for key, acc in accs.items()}
    first = at.get(("none", 64))
    tokens = SEQUENCES * 30
    trained = first is not None and stats.is_trained(stats.wilson(first * tokens, tokens)[0])
    rows = [
        eval_row(scheme, length, acc, task=task, seed=seed, extension=extension, trained=trained)
        for (extension, length), acc in at.items()
    ]
    if rows:
        run.write_table("eval", pd.DataFrame(rows))
    return run
