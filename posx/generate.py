"""Free-running greedy generation, with a cache of keys and values where the scheme allows one."""

import torch
from torch import Tensor

from posx.attention import Cache
from posx.model import Transformer


@torch.no_grad()
def greedy(model: Transformer, prompt: Tensor, n_new: int) -> Tensor:
    """The digits of the n_new most likely tokens, one after the other.

    prompt: (B, P, digits) -> (B, n_new, digits).
    """
    cached = all(model.scheme(layer).kv for layer in range(len(model.layers)))
    caches = [Cache() for _ in model.layers] if cached else None
    sequence, feed = prompt, prompt
    for _ in range(n_new):
        logits = model(feed if cached else sequence, last=1, caches=caches)  # (B, 1, digits, rows)
        feed = logits.argmax(-1)  # (B, 1, digits)
        sequence = torch.cat([sequence, feed], 1)
    return sequence[:, prompt.shape[1] :]
