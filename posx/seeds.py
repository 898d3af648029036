"""Seeds as a function of names, so that no generator needs a state and no two streams meet."""

import hashlib

import torch


def generator(*names: object) -> torch.Generator:
    """A generator whose stream belongs to `names` alone, such as ("train", data_seed, step)."""
    text = "/".join(map(str, names))
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
    return torch.Generator().manual_seed(seed)
