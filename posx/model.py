"""The tiny causal Transformer, whole, in reading order.

Pre-norm, after Vaswani et al. 2017 (arXiv:1706.03762) and GPT-2. What differs serves learning in
seconds on a CPU: an output head that shares the embedding through one projection (results/recipe
has the comparison), and symbols of several digits. Position enters through the scheme alone.
"""

import math
from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posx.attention import Cache, attend
from posx.config import ModelConfig
from posx.schemes.base import Scheme, Site
from posx.tasks.base import Batch, Vocab

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "relu2": lambda x: F.relu(x).square()}


class Attention(nn.Module):
    """Multi-head causal attention; the scheme of its layer acts on it through its hooks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads, self.d_head = config.n_heads, config.d_head
        width = config.n_heads * config.d_head
        self.query = nn.Linear(config.d_model, width, bias=False)
        self.key = nn.Linear(config.d_model, width, bias=False)
        self.val = nn.Linear(config.d_model, width, bias=False)
        self.out = nn.Linear(width, config.d_model, bias=False)

    def project(
        self, x: Tensor, pos: Tensor, scheme: Scheme, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x: (B, T, E) -> q, k, v (B, H, T, D) after the scheme's `prepare`, and its state.
        `past` is the state of the tokens before them."""
        shape = (*x.shape[:2], self.n_heads, self.d_head)
        q, k, v = (
            linear(x).view(shape).transpose(1, 2) for linear in (self.query, self.key, self.val)
        )
        return scheme.prepare(x, q, k, v, pos, past)

    def forward(
        self, x: Tensor, pos: Tensor, scheme: Scheme, last: int, cache: Cache | None = None
    ) -> Tensor:
        """The output of the last `last` tokens. x: (B, T, E), pos: (T,) -> (B, last, E)."""
        past = None if cache is None else cache.past
        q, k, v, state = self.project(x, pos, scheme, past)
        key_pos = pos
        if cache is not None:
            k, v, state, key_pos = cache.append(k, v, state, pos)
        out = attend(
            scheme, q[:, :, -last:], k, v, pos[..., -last:], key_pos, state
        )  # (B, H, last, D)
        return self.out(out.transpose(1, 2).flatten(2))  # (B, last, E)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.up = nn.Linear(config.d_model, config.d_ff)
        self.down = nn.Linear(config.d_ff, config.d_model)
        self.activation = ACTIVATIONS[config.activation]

    def forward(
        self, x: Tensor, pos: Tensor, scheme: Scheme, last: int, cache: Cache | None = None
    ) -> Tensor:
        """x: (B, T, E) -> (B, last, E): all tokens are attended to, the last ones are computed."""
        x = x[:, -last:] + self.attention(self.attention_norm(x), pos, scheme, last, cache)
        return x + self.down(self.activation(self.up(self.mlp_norm(x))))


def make_schemes(make_scheme: Callable[[Site], Scheme], site: Site) -> list[Scheme]:
    """One scheme a layer, or a single one for all; the first gives positions and embeds them."""
    first = make_scheme(site)
    others = () if first.shared else range(1, site.n_layers)
    return [first, *(make_scheme(site.at(layer)) for layer in others)]


def shortest_limit(schemes: Iterable[Scheme]) -> int | None:
    """The lowest `max_len` of these; None where none has a limit."""
    limits = [scheme.max_len for scheme in schemes]
    return min((limit for limit in limits if limit is not None), default=None)


class Transformer(nn.Module):
    """Digits of tokens to logits. `make_scheme` builds the scheme object of a site: one a layer, or
    one for all layers when the class says that it is shared."""

    def __init__(
        self,
        config: ModelConfig,
        vocab: Vocab,
        make_scheme: Callable[[Site], Scheme],
        train_len: int,
        seen: int = 0,
    ) -> None:
        super().__init__()
        self.config, self.vocab = config, vocab
        site = Site(
            config.d_model, config.n_heads, config.d_head, train_len, config.n_layers, seen=seen
        )
        self.schemes = nn.ModuleList(make_schemes(make_scheme, site))
        # One embedding row a digit value: (digits, rows, E).
        self.embedding = nn.Parameter(torch.empty(vocab.digits, vocab.rows, config.d_model))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.final_norm = make_norm(config)
        width = vocab.digits * (vocab.rows if config.head == "untied" else config.d_model)
        self.head = None if config.head == "tied" else nn.Linear(config.d_model, width, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Draw the weights, by these laws.

            embedding            N(0, 1 / E), and scaled by sqrt(E) at the input
            matrices             N(0, init_std^2)
            to the residual      N(0, init_std^2 / (2 n_layers)): attention.out and down
            biases, norms        0 and 1

        What belongs to a scheme was initialised by the scheme.
        """
        std = self.config.init_std
        nn.init.normal_(self.embedding, std=self.config.d_model**-0.5)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=std)
        for block in self.layers:
            attention = block.attention
            for linear in (attention.query, attention.key, attention.val, block.up):
                nn.init.normal_(linear.weight, std=std)
            for linear in (attention.out, block.down):
                nn.init.normal_(linear.weight, std=std / math.sqrt(2 * len(self.layers)))
            nn.init.zeros_(block.up.bias)
            nn.init.zeros_(block.down.bias)

    @property
    def max_len(self) -> int | None:
        """Tokens of the longest sequence that all its schemes can process; None: no limit."""
        return shortest_limit(cast(list[Scheme], list(self.schemes)))

    @property
    def layers(self) -> list[Block]:
        """The blocks, bottom first."""
        return cast(list[Block], list(self.blocks))

    def scheme(self, layer: int) -> Scheme:
        """The scheme of a layer."""
        return cast(Scheme, self.schemes[layer if len(self.schemes) > 1 else 0])

    def replace_schemes(self, change: Callable[[Scheme], Scheme]) -> None:
        """Put `change(scheme)` in the place of every scheme; a shared one stays one object."""
        self.schemes = nn.ModuleList(change(cast(Scheme, scheme)) for scheme in self.schemes)

    def flops(self, length: int) -> int:
        """Floating-point operations of training on one token: three times the forward pass,
        attention counted as causal (half of the n x n products)."""
        c = self.config
        width = c.n_heads * c.d_head
        matrices = c.n_layers * (4 * c.d_model * width + 2 * c.d_model * c.d_ff)
        logits = (
            self.vocab.digits * self.vocab.rows * c.d_model
        )  # on the answer: half of the tokens
        if self.head is not None and c.head == "tied_projected":
            logits += self.head.weight.numel()
        return 3 * (2 * matrices + logits + 2 * c.n_layers * length * width)

    def forward(
        self,
        digits: Tensor,
        last: int | None = None,
        caches: list[Cache] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Digit ids (B, T, digits), as `Vocab.split` makes them -> logits of the last `last` tokens
        (all when None): (B, last, digits, rows).

        With `caches` (one a layer), the tokens follow those already cached. `generator` is given in
        training only, for schemes that draw positions.
        """
        scheme = self.scheme(0)
        offset = len(caches[0]) if caches else 0
        symbols = digits[..., 0] < self.vocab.base  # (B, T)
        pos = scheme.positions(symbols, offset, generator)  # (T,) or (B, T)
        x = scheme.embed(self._embed(digits), pos)  # (B, T, E)
        n_tokens = x.shape[1]
        for layer, block in enumerate(self.layers):
            top = layer == len(self.layers) - 1  # above it, only the wanted tokens are needed
            wanted = last if top and last is not None else n_tokens
            cache = caches[layer] if caches else None
            x = block(x, pos, self.scheme(layer), wanted, cache)
        return self._logits(self.final_norm(x))

    def answer(
        self, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Teacher-forced logits of the answer and EOS, and the digits that are right.

        -> (B, n_answer, digits, rows), (B, n_answer, digits).
        """
        digits = self.vocab.split(batch.tokens.to(self.embedding.device))  # (B, T, digits)
        logits = self(digits[:, :-1], last=batch.n_answer, generator=generator)
        return logits, digits[:, -batch.n_answer :]

    def _embed(self, digits: Tensor) -> Tensor:
        """(B, T, digits) -> (B, T, E), with unit variance a component."""
        rows = [F.embedding(digits[..., d], self.embedding[d]) for d in range(self.vocab.digits)]
        return sum(rows[1:], rows[0]) * math.sqrt(self.config.d_model / self.vocab.digits)

    def _logits(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, digits, rows)."""
        if self.head is None:
            return torch.einsum("bte,dre->btdr", x, self.embedding)
        out = self.head(x).unflatten(-1, (self.vocab.digits, -1))  # (B, T, digits, E or rows)
        if self.config.head == "untied":
            return out
        return torch.einsum("btde,dre->btdr", out, self.embedding)


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=1e-5)
    return nn.LayerNorm(config.d_model, eps=1e-5)
