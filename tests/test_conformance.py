"""Every scheme of the catalogue passes the conformance suite, and broken ones do not."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from posx import build, catalog, conformance
from posx.conformance import CHECKS, Subject
from posx.errors import UserError
from posx.schemes.base import Scheme, Site
from posx.schemes.bias import Alibi
from posx.schemes.mask import Window

SCHEMES, EXTENSIONS = catalog.files("scheme"), catalog.files("extension")
FIRST = {"rope", "alibi", "learned"}


def subject(name: str) -> Subject:
    path = SCHEMES[name]
    return Subject(name, build.maker(build.load_yaml(path)), catalog.card(path))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", SCHEMES)
def test_scheme(name: str, check: Callable[[Subject], None]) -> None:
    check(subject(name))


def fitting(name: str) -> list[str]:
    """The schemes of the catalogue that an extension changes."""
    extension = build.make_extension(build.load_yaml(EXTENSIONS[name]))
    return [each for each, path in SCHEMES.items() if extension.fits(build.load_yaml(path))]


# Each extension over the first scheme of its kind; over all that it fits with the slow tests.
PAIRS = [
    pytest.param(scheme, name, marks=[pytest.mark.slow] if number else [], id=f"{scheme}-{name}")
    for name in EXTENSIONS
    for number, scheme in enumerate(sorted(fitting(name), key=FIRST.__contains__, reverse=True))
]


@pytest.mark.parametrize(("scheme", "extension"), PAIRS)
def test_extended_scheme(scheme: str, extension: str) -> None:
    """All checks, at four times the training length. One that counts keys by their positions
    refuses positions that do not, in a sentence, at once or when it meets them."""
    change = build.make_extension(build.load_yaml(EXTENSIONS[extension]))
    make = build.maker(build.load_yaml(SCHEMES[scheme]), change)
    pair = Subject(f"{scheme} + {extension}", make, catalog.card(SCHEMES[scheme]))
    try:
        make(pair.site())
        failed = [result for result in conformance.run(pair) if not result.passed]
        refused = any("extend a scheme that keeps positions" in each.message for each in failed)
    except UserError:
        failed, refused = [], True
    if refused:
        assert subject(scheme).scheme().overrides("positions")
    else:
        assert failed == []


def around(name: str, **inner: str) -> Subject:
    """A scheme of the catalogue around others, each given by its parameter and its name."""
    node = build.load_yaml(SCHEMES[name])
    node |= {key: build.load_yaml(SCHEMES[each]) for key, each in inner.items()}
    return Subject(f"{name} {inner}", build.maker(node), catalog.card(SCHEMES[name]))


COMBINED = [
    *(around("randomized", over=each) for each in ("learned", "sinusoidal", "alibi", "t5", "shaw")),
    *(around("shape", over=each) for each in ("sinusoidal_half", "sinusoidal_t2t")),
    *(around("cape", over=each) for each in ("sinusoidal", "alibi")),
    *(around("abacus", over=each) for each in ("sinusoidal", "rope")),
    *(around("logn", over=each) for each in ("alibi", "t5", "shaw", "fox", "window", "cope")),
    *(around("ssmax", over=each) for each in ("nope", "alibi", "learned", "path")),
    *(around("entmax", over=each) for each in ("alibi", "fire")),
    *(around("attn_sink", over=each) for each in ("rope", "window_rope")),
    *(around("nape", first=one, second=two) for one, two in (("rope", "alibi"), ("fox", "cope"))),
    *(
        around("rnope", most=one, other=two)
        for one, two in (("window_rope", "nope"), ("t5", "fox"))
    ),
    around("logn", over="nape"),
    around("randomized", over="rnope"),
]


@pytest.mark.parametrize("combined", COMBINED, ids=lambda each: each.name)
def test_scheme_around_another(combined: Subject) -> None:
    assert [result for result in conformance.run(combined) if not result.passed] == []


class Leaks(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)  # of all tokens, later ones included


class WrongOffset(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    def positions(self, symbols: Tensor, offset: int, generator: torch.Generator | None) -> Tensor:
        return torch.arange(symbols.shape[1])  # forgets what is cached

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x * (1 + pos[:, None] * torch.linspace(0, 0.1, x.shape[-1]))


class DrawsFromTorch(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    def positions(self, symbols: Tensor, offset: int, generator: torch.Generator | None) -> Tensor:
        ids = super().positions(symbols, offset, generator)
        return ids if generator is None else ids + torch.randint(100_000, (1,))  # not from it


class NotRelative(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    relative = True

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return q + pos[:, None] / 100, k, v, None


class DeadParameter(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.weight = torch.nn.Parameter(torch.ones(3))


class CountsBatch(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x * len(x)


class ForgetsItself(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    shape = 0

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        self.shape = max(self.shape, x.shape[1])  # a cache that grows with the longest input
        return x * self.shape


class HalfPositions(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    max_len = 4

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x  # promises a limit and does not keep it


class NoHeads(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    def distance_bias(self, d: Tensor) -> Tensor:
        return -d.float()[None]  # one for all heads


class FoldAlone(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    def fold(self, pos: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        key = pos.float().view(1, 1, -1, 1).expand(1, self.site.n_heads, -1, -1)
        return torch.ones_like(key), key  # evaluation has no bias


class FoldDiffers(FoldAlone):
    """A broken scheme: arXiv:0000.00000."""

    def distance_bias(self, d: Tensor) -> Tensor:
        return -d.float().expand(self.site.n_heads, *d.shape)  # the fold forgets sqrt(D)


class Bonus(Alibi):
    """A broken scheme: arXiv:0000.00000."""

    def distance_bias(self, d: Tensor) -> Tensor:
        return -super().distance_bias(d)  # the sign of the slope in one of the two forms


class BandAlone(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    band = (0, 5)  # nothing hides the other keys


class NarrowBand(Window):
    """A broken scheme: arXiv:0000.00000."""

    def __init__(self, site: Site, window: int = 9) -> None:
        super().__init__(site, window)
        self.band = (0, window - 1)  # the mask shows one key more


class ForgottenSink(Window):
    """A broken scheme: arXiv:0000.00000."""

    def mask(self, i: Tensor, j: Tensor) -> Tensor | None:
        near = super().mask(i, j)
        assert near is not None
        return near | (j[..., None, :] < 1).unsqueeze(-3)  # the band has no sink


class RowsOfABlock(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    beyond = 0

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        row = torch.arange(z.shape[2])[:, None]  # in the block, not in the sequence
        return z * (1 + row / 10) if z.shape[3] > self.beyond else z


class RowsOfALongBlock(RowsOfABlock):
    """A broken scheme: arXiv:0000.00000."""

    beyond = 1000


class CountsLaterKeys(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        # contextual positions: gates summed from key j to the query, and here on to the last key
        count = z.sigmoid().flip(-1).cumsum(-1).flip(-1)
        return z - count.log1p()


class DividesByLength(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x * (1 + pos[:, None] / len(pos))  # and does not say length_dependent


class FloatOnly(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x @ torch.eye(x.shape[-1])  # whatever the number type of the model


class Unsaved(Scheme):
    """A broken scheme: arXiv:0000.00000."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.table = torch.randn(site.d_model)  # random, and in no state dict

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x + self.table.to(x)


class Undocumented(Scheme):
    """No source at all."""


BROKEN = {
    Undocumented: "documented",
    NoHeads: "shapes",
    FoldAlone: "fold",
    FoldDiffers: "fold",
    Bonus: "fold",
    BandAlone: "band",
    ForgottenSink: "band",
    NarrowBand: "band",
    partial(NarrowBand, window=50): "long_path",
    RowsOfABlock: "paths_agree",
    RowsOfALongBlock: "long_path",
    DrawsFromTorch: "drawn_positions",
    Leaks: "causal",
    CountsLaterKeys: "causal",
    DividesByLength: "prefix",
    WrongOffset: "cached_decoding",
    NotRelative: "shift",
    CountsBatch: "batch_rows_independent",
    ForgetsItself: "deterministic",
    DeadParameter: "gradients",
    FloatOnly: "half_precision",
    Unsaved: "round_trips",
    HalfPositions: "long_lengths",
}


def failures(make: Callable[[Site], Scheme]) -> set[str]:
    """The checks that a scheme does not pass."""
    results = conformance.run(Subject("mine", make, "Mine: a scheme of a test"))
    return {result.check.replace(" ", "_") for result in results if not result.passed}


@pytest.mark.parametrize(
    ("broken", "check"), BROKEN.items(), ids=lambda part: getattr(part, "__name__", str(part))
)
def test_broken_scheme_is_caught(broken: Callable[[Site], Scheme], check: str) -> None:
    assert check in failures(broken)


def test_every_check_catches_something() -> None:
    assert {f"check_{check}" for check in BROKEN.values()} == {check.__name__ for check in CHECKS}


@pytest.mark.parametrize("alone", [Undocumented, BandAlone, FoldAlone, DeadParameter, Unsaved])
def test_one_mistake_fails_one_check(alone: type[Scheme]) -> None:
    assert failures(alone) - {"long_path"} == {BROKEN[alone]}  # the fold's path, too


class Gated(Scheme):
    """Keys fade by the forget gates between them and the query: sum of log f_l, j < l <= i.

    After Lin et al. 2025 (arXiv:2503.02130). The one scheme here that has a state, and a fold that
    depends on it.
    """

    enters = "score"
    relative = True

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.gate = torch.nn.Linear(site.d_model, site.n_heads)
        torch.nn.init.constant_(self.gate.bias, 4.0)

    def prepare(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return q, k, v, torch.nn.functional.logsigmoid(self.gate(x))  # (B, T, H)

    def scores(
        self, z: Tensor, q: Tensor, k: Tensor, i: Tensor, j: Tensor, state: Tensor | None
    ) -> Tensor:
        total = self._total(state)  # (B, H, S)
        return z + total[:, :, -z.shape[2] :, None] - total[:, :, None]

    def fold(self, pos: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        key = -self._total(state)[..., None] * self.site.d_head**0.5  # (B, H, T, 1)
        return torch.ones_like(key), key

    def _total(self, state: Tensor | None) -> Tensor:
        assert state is not None
        wide = torch.promote_types(state.dtype, torch.float32)
        return state.cumsum(1, dtype=wide).transpose(1, 2)


def test_a_scheme_with_a_state_and_a_fold_passes() -> None:
    assert failures(Gated) == set()


class Favours(Alibi):
    """ALiBi with the wrong sign in both of its forms: arXiv:0000.00000."""

    def distance_bias(self, d: Tensor) -> Tensor:
        return -super().distance_bias(d)

    def fold(self, pos: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        query, key = super().fold(pos, state)
        return -query, key


def test_a_wrong_formula_is_not_caught() -> None:
    """Conformance knows no paper: a scheme that favours distant keys is sound. That the signs are
    those of the papers rests on the golden values alone (tests/golden, tests/schemes)."""
    assert failures(Favours) == set()


def test_checks_run_on_one_thread_and_leave_the_number_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def check_threads(subject: Subject) -> None:
        """sees the number of threads"""
        seen.append(torch.get_num_threads())

    monkeypatch.setattr(conformance, "CHECKS", (check_threads,))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        conformance.run(subject("nope"))
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)
