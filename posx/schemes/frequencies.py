"""Rules that make the inverse frequencies of RoPE: the angle of pair c at position p is p theta_c.

theta is float64, (F,) with F = dim / 2. `base` and `dim` are those of the trained model, L is its
training length `train_len`, and s, the `factor`, says how far an extension goes.
"""

import math

import torch
from torch import Tensor

from posx.errors import UserError


def rope(base: float, dim: int) -> Tensor:
    """theta_c = base^(-2c / dim). Su et al. 2021 (arXiv:2104.09864)."""
    return base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def pi(base: float, dim: int, factor: float) -> Tensor:
    """theta_c / s: position interpolation. Chen et al. 2023 (arXiv:2306.15595)."""
    return rope(base, dim) / factor


def ntk(base: float, dim: int, factor: float) -> Tensor:
    """theta_c of base b s^(dim / (dim - 2)): the fastest pair stays, the slowest is divided by s.

    "NTK-aware" scaling, bloc97 2023; in Peng et al. 2023 (arXiv:2309.00071), 3.1.

    Raises:
        UserError: dim 2 has one pair, which cannot both keep its frequency and lose it.
    """
    if dim < 4:
        raise UserError(
            f"ntk and dynamic keep the fastest pair and stretch the slowest; {dim} rotated "
            "dimensions are one pair: use --extend pi, or train with scheme.rotary_dim=4 or more"
        )
    return rope(base * factor ** (dim / (dim - 2)), dim)


def dynamic(base: float, dim: int, factor: float, n: int, train_len: int) -> Tensor:
    """`ntk` with the factor s n / L - (s - 1) at n tokens, and 1 as long as n <= L.

    "Dynamic NTK", emozilla 2023; in Peng et al. 2023 (arXiv:2309.00071), 3.3. s = 1 is the rule
    without a parameter: the factor of `ntk` is n / L.
    """
    return ntk(base, dim, 1 + factor * (max(n, train_len) / train_len - 1))


def yarn(
    base: float,
    dim: int,
    factor: float,
    train_len: int,
    beta_fast: float,
    beta_slow: float,
    ramp: str,
) -> Tensor:
    """theta_c (g_c + (1 - g_c) / s): pairs that turn often in L tokens stay, slow ones stretch.

    Peng et al. 2023 (arXiv:2309.00071), 3.2. g falls from 1, at the pair that makes beta_fast turns
    in L tokens, to 0, at the pair that makes beta_slow: linearly in the turns (ramp "turns", the
    paper's formula) or linearly in the pair's number c between ends rounded outwards to whole pairs
    (ramp "pairs", what the published code and transformers do). With thousands of training tokens
    the two are close; with 64 they are not."""
    theta = rope(base, dim)  # (F,)
    if ramp == "turns":
        turns = train_len * theta / (2 * math.pi)
        kept = ((turns - beta_slow) / max(beta_fast - beta_slow, 0.001)).clamp(0, 1)  # g
    else:
        first, last = (
            dim * math.log(train_len / (2 * math.pi * turns)) / (2 * math.log(base))
            for turns in (beta_fast, beta_slow)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
        pair = torch.arange(dim // 2, dtype=torch.float64)
        kept = 1 - ((pair - first) / max(last - first, 0.001)).clamp(0, 1)
    return torch.lerp(pi(base, dim, factor), theta, kept)


def yarn_attention_factor(factor: float) -> float:
    """0.1 ln s + 1, on cos and sin alike, so that scores grow by its square.

    Peng et al. 2023 (arXiv:2309.00071), 3.4: 1 / sqrt(t) there.
    """
    return 0.1 * math.log(factor) + 1


def top(count: int, share: float) -> Tensor:
    """1 for the fastest `share` of `count` pairs, rounded down, and 0 for the others: p-RoPE.

    Barbero et al. 2024 (arXiv:2410.06205).
    """
    return (torch.arange(count) < int(share * count)).double()


def clip(count: int, share: float, soft: bool) -> Tensor:
    """Factors of the frequencies of `count` pairs that take the slowest out: clipped RoPE.

    1 but for the slowest `share` of the pairs, rounded; there (1 + cos u) / 2 with u from 0 to pi
    in even steps, ends included, or 0 when not soft. Li et al. 2026 (arXiv:2602.05258).
    """
    slow = round(share * count)
    u = torch.linspace(0, math.pi, slow, dtype=torch.float64)
    taper = (1 + u.cos()) / 2 if soft else torch.zeros_like(u)
    return torch.cat([torch.ones(count - slow, dtype=torch.float64), taper])


def full_turns(base: float, dim: int, train_len: int) -> Tensor:
    """1 for the pairs that make a full turn in `train_len` tokens, theta_c >= 2 pi / L, else 0."""
    return (rope(base, dim) >= 2 * math.pi / train_len).double()


def resonance(theta: Tensor) -> Tensor:
    """2 pi / round(2 pi / theta): waves of whole tokens. Wang et al. 2024 (arXiv:2403.00071)."""
    return 2 * math.pi / (2 * math.pi / theta).round()
