"""What the tests of schemes share: sizes that all differ, golden values, comparison.

Sizes are all different, so that a wrong broadcast cannot pass.
"""

import json
from pathlib import Path
from typing import Any

import torch

from posx.schemes.base import Site

B, H, T, S, D = 2, 3, 5, 9, 8
E = 24
SITE = Site(d_model=E, n_heads=H, d_head=D, train_len=16)
NO_X = torch.empty(0)  # for schemes that do not read x


def golden(name: str) -> Any:
    """Values of published implementations, 9 digits of float32; each file says which."""
    return json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())


def close(got: torch.Tensor, want: Any, atol: float) -> None:
    want = torch.as_tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got.detach().double(), want, atol=atol, rtol=0)
