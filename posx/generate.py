"""Free-running greedy generation, with a cache of keys and values where the scheme allows one."""

import torch
import torch.nn.functional as F
from torch import Tensor

from posx.attention import Cache
from posx.model import Transformer


@torch.no_grad()
def greedy(model: Transformer, prompt: Tensor, n_new: int) -> Tensor:
    """The digits of the n_new most likely tokens, one after the other.

    prompt: (B, P, digits) -> (B, n_new, digits). A scheme whose output depends on the total length
    is told that length: the tokens still to come stand there as zeros, which causality hides.
    """
    schemes = [model.scheme(layer) for layer in range(len(model.layers))]
    if any(scheme.length_dependent for scheme in schemes):
        return _in_place(model, prompt, n_new)
    cached = all(scheme.kv for scheme in schemes)
    caches = [Cache() for _ in schemes] if cached else None
    sequence, feed = prompt, prompt
    for _ in range(n_new):
        logits = model(feed if cached else sequence, last=1, caches=caches)  # (B, 1, digits, rows)
        feed = logits.argmax(-1)  # (B, 1, digits)
        sequence = torch.cat([sequence, feed], 1)
    return sequence[:, prompt.shape[1] :]


def _in_place(model: Transformer, prompt: Tensor, n_new: int) -> Tensor:
    """`greedy` by full passes over a sequence of the final length."""
    sequence = F.pad(prompt, (0, 0, 0, n_new))  # (B, P + n_new, digits)
    for left in range(n_new, 0, -1):
        logits = model(sequence[:, :-1], last=left)  # (B, left, digits, rows)
        sequence[:, -left] = logits[:, 0].argmax(-1)
    return sequence[:, -n_new:]
