"""The interface between a positional scheme and attention.

A scheme overrides the hooks it needs and nothing else; the base class does nothing, which is NoPE.
Attention looks at which hooks are overridden, never at a name, and takes the fastest exact path.

Legend of shapes, used in the whole package:
    B batch, H heads, T query tokens, S key tokens (S >= T), D head width (d_head),
    E model width (d_model), V vocabulary.
Positions are (T,) here, and (B, T) for a scheme that draws them for every sequence.
The T queries of a block are always the last T of its S keys, so per-token state of shape
(B, S, ...) holds the queries in its last T rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

HOOKS = (
    *("positions", "embed", "prepare", "scores", "mask", "value", "normalize"),
    *("fold", "distance_bias", "far"),
)
PLACES = (  # where position enters
    "positions", "input", "q/k", "score", "score+value", "softmax", "mask"
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """Where a scheme object sits: one attention layer of one model, trained at one length."""

    d_model: int
    n_heads: int
    d_head: int
    train_len: int  # tokens of the longest training sequence
    n_layers: int = 1
    layer: int = 0
    seen: int = 0  # positions that training fills: the last token is never an input; 0: train_len

    @property
    def positions(self) -> int:
        """How many positions training fills."""
        return self.seen or self.train_len

    def at(self, layer: int) -> "Site":
        return replace(self, layer=layer)


class Scheme(nn.Module):
    """No positional encoding (NoPE): the causal mask alone tells tokens apart.

    Haviv et al. 2022 (arXiv:2203.16634), Kazemnejad et al. 2023 (arXiv:2305.19466). Nothing limits
    the length; attention entropy grows with the number of visible keys.
    """

    # Traits: facts about the class that attention, conformance and tables read.
    enters: str = "mask"  # where position enters: one of PLACES
    shared: bool = False  # one object for all layers instead of one a layer
    relative: bool = False  # moving all positions by the same amount changes nothing
    length_dependent: bool = False  # the output of a prefix depends on the total length
    kv: bool = True  # keys may be cached: decoding step by step equals the full pass
    max_len: int | None = None  # longest sequence it can process, in tokens; None: no limit

    # (sinks, window) when every query sees only the first `sinks` and the last `window` keys
    # (itself included); None when all earlier keys are visible. It says which keys attention may
    # skip and hides none of them: `mask` does that, so a band comes with it.
    band: tuple[int, int] | None = None

    # More tokens than this before a query, `far` holds.
    reach: int = 0

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site
        self._exact: dict[str, Tensor] = {}  # the constants, in float64

    def constant(self, name: str, value: Tensor) -> None:
        """Register a fixed tensor that follows the model to a device and to float64, but never to
        half precision, and that no state dict holds.

        value: float64, as exact as its formula. In bfloat16 a slope or a frequency would be off by
        0.4 %, which at distance 8192 is a wrong bias or another angle altogether.
        """
        self._exact[name] = value
        self.register_buffer(name, value.float(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for name, value in self._exact.items():
            moved = getattr(self, name)
            dtype = torch.promote_types(moved.dtype, torch.float32)
            setattr(self, name, value.to(device=moved.device, dtype=dtype))
        return self

    # -- seven hooks -----------------------------------------------------------------------------

    def positions(self, symbols: Tensor, offset: int, generator: torch.Generator | None) -> Tensor:
        """Position ids of the new tokens, which follow `offset` cached ones -> (T,) or (B, T).

        symbols: bool (B, T), False where the token is BOS, SEP or EOS. Called once a forward, on
        layer 0, and used by every layer. `generator` (a CPU one) is None outside training.
        """
        return torch.arange(offset, offset + symbols.shape[1], device=symbols.device)

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        """Change the token embeddings, once a forward. x: (B, T, E), pos: (T,) -> (B, T, E)."""
        return x

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Change queries, keys and values of the new tokens, in O(T).

        x: (B, T, E) the layer's normalised input; q, k, v: (B, H, T, D); pos: (T,);
        past: the state of the cached tokens before them (B, P, ...), None when there are none.
        Returns q, k, v and the new tokens' state (B, T, ...), which is cached beside k, or None.
        """
        return q, k, v, None

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        """Change the scaled scores of one block of queries, before the mask and softmax.

        z: (B, H, T, S) = q k^T / sqrt(D); i: (T,) and j: (S,) positions of queries and keys;
        state: (B, S, ...) or None -> (B, H, T, S). Entries with j > i are masked afterwards.
        """
        return z

    def mask(self, i: Tensor, j: Tensor) -> Tensor | None:
        """Which keys a query may see, besides causality.

        i: (T,), j: (S,) -> bool (T, S), (H, T, S) or (1 or B, 1 or H, T, S).
        """
        return None

    def value(self, p: Tensor, i: Tensor, j: Tensor) -> Tensor | None:
        """A term added to the output of a block. p: (B, H, T, S) weights -> (B, H, T, D)."""
        return None

    def normalize(self, z: Tensor) -> Tensor:
        """Scores to weights over the last axis; masked entries are -inf. (B, H, T, S) -> same."""
        return z.softmax(-1)

    # -- three shortcuts -------------------------------------------------------------------------

    def fold(self, pos: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The bias as an inner product of extra query and key dimensions.

        pos: (T,), state: (B, T, ...) or None -> each (1 or B, H, T, F). Their dot product divided
        by sqrt(D), like the rest of the score, is the bias up to a constant a row.

        A second form of `distance_bias` or `scores`, one of which comes with it. Training uses the
        fold, because the fused kernel then needs no n x n tensor; a large bias loses digits in the
        dot product (about 1e-5 at 2048 tokens), so evaluation has the exact form.
        """
        raise AssertionError("attention asks for fold only where it is overridden")

    def distance_bias(self, d: Tensor) -> Tensor:
        """A bias that depends on the distance d = i - j >= 0 alone.

        d: any shape -> (H, *d.shape), in float32 or more.
        """
        raise AssertionError("attention asks for distance_bias only where it is overridden")

    def far(
        self, q: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What `scores` and `value` come to for keys far behind: a term a query and a term a key.

        q: (B, H, T, D); i: (T,) and j: (S,) positions of the queries and of keys that all lie more
        than `reach` tokens before the first of them; state: (B, N, ...) of all keys so far, those
        keys first and the queries last, or None.
        Returns what is added to the scores of a query (B, H, T, 1) and of a key (1 or B, H, 1 or T,
        S), and to the output of those keys (broadcasts to (B, H, T, D)); None for nothing.

        A second form of `scores` and `value`, which come with it. Evaluation of long inputs then
        runs the far keys through the fused kernel.
        """
        raise AssertionError("attention asks for far only where it is overridden")

    # --------------------------------------------------------------------------------------------

    def overrides(self, hook: str) -> bool:
        """Whether this scheme changes `hook`, one of HOOKS."""
        return getattr(type(self), hook) is not getattr(Scheme, hook)


# A parameter of this type takes another scheme: its name or its keys in a yaml, built here at the
# site that the scheme around it chooses.
Maker = Callable[[Site], Scheme]


class Nope(Scheme):
    __doc__ = Scheme.__doc__
