"""posx and its peers at one shape: the same vocabulary, width, depth, heads and weights in number.

A peer that is not installed is None, and said once.
"""

import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posx import build, catalog
from posx.config import ModelConfig
from posx.model import Transformer
from posx.schemes.base import Maker
from posx.tasks.base import Vocab

VOCAB = Vocab(base=61)  # 64 rows with the special tokens
TRAIN_LEN = 128
LARGE = ModelConfig(4, 128, 4, 32, 512, "layernorm", "gelu", "tied", 0.02)
SMALL = replace(LARGE, n_layers=2, d_model=64, n_heads=4, d_head=16, d_ff=256)

Forward = Callable[[Tensor], Tensor]  # token ids (B, T) -> logits (B, T, V)


def scheme(name: str) -> Maker:
    """What builds a scheme of the catalogue with its default keys."""
    return build.maker(build.load_yaml(catalog.find("scheme", name)))


def posx(shape: ModelConfig, name: str, train_len: int = TRAIN_LEN) -> Transformer:
    torch.manual_seed(0)
    return Transformer(shape, VOCAB, scheme(name), train_len)


def posx_forward(model: Transformer) -> Forward:
    return lambda ids: model(VOCAB.split(ids))[:, :, 0]


def llama_forward(model: nn.Module) -> Forward:
    return lambda ids: model(ids, use_cache=False).logits


def tokens(batch: int, n: int) -> Tensor:
    """Random token ids: (B, n)."""
    random = torch.Generator().manual_seed(0)
    return torch.randint(VOCAB.rows, (batch, n), generator=random)


def step(parameters: Iterable[nn.Parameter], forward: Forward, ids: Tensor) -> Callable[[], None]:
    """One training step, the same for everybody: loss of all tokens, clipping, fused AdamW."""
    trained = list(parameters)
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def work() -> None:
        logits = forward(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    return work


def llama(shape: ModelConfig, max_len: int) -> Any:
    """LlamaForCausalLM with fused attention; its gated MLP has as many weights as ours."""
    hf = peer("transformers")
    if hf is None:
        return None
    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=VOCAB.rows, hidden_size=shape.d_model, intermediate_size=2 * shape.d_ff // 3,
        num_hidden_layers=shape.n_layers, num_attention_heads=shape.n_heads,
        max_position_embeddings=max_len, attn_implementation="sdpa", tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def x_transformer(shape: ModelConfig, max_len: int, **positions: bool) -> Any:
    """TransformerWrapper with the given kind of positions."""
    xt = peer("x_transformers")
    if xt is None:
        return None
    torch.manual_seed(0)
    layers = xt.Decoder(
        dim=shape.d_model, depth=shape.n_layers, heads=shape.n_heads, attn_dim_head=shape.d_head,
        rotary_emb_dim=shape.d_head, **positions,
    )  # fmt: skip
    return xt.TransformerWrapper(
        num_tokens=VOCAB.rows, max_seq_len=max_len, attn_layers=layers, tie_embedding=True,
        use_abs_pos_emb=False,
    )  # fmt: skip


@cache
def peer(name: str) -> ModuleType | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # x-transformers uses torch.jit
            return import_module(name)
    except ImportError:
        package = name.replace("_", "-")
        hint = "pip install '.[bench]'"
        print(f"{package} is not installed: its rows are left out ({hint})", file=sys.stderr)
        return None
