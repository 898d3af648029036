"""Pictures of schemes against what their formulas say."""

import math

import pytest
import torch
from oracles import SITE, D, H

from posx import portrait
from posx.errors import UserError
from posx.schemes.base import Nope
from posx.schemes.bias import Alibi, alibi_slopes
from posx.schemes.mask import Window
from posx.schemes.rotary import Rope

N = 21


def test_alibi_is_drawn_as_its_slopes() -> None:
    picture = portrait.portray(Alibi(SITE), N)
    assert list(picture.curves) == [f"head {h}" for h in range(1, H + 1)]
    for row, slope in zip(picture.curves.values(), alibi_slopes(H), strict=True):
        assert row.tolist() == pytest.approx([-slope * d for d in range(N)], abs=1e-6)
    assert picture.masks == {}


def test_rope_is_drawn_as_a_sum_of_cosines() -> None:
    """Ones turned by an angle: every pair gives 2 cos, over sqrt(D); the own key at zero."""
    (row,) = portrait.portray(Rope(SITE), N).curves.values()
    theta = [1e4 ** (-2 * c / D) for c in range(D // 2)]
    for d in range(N):
        want = sum(2 * math.cos(d * w) - 2 for w in theta) / math.sqrt(D)
        assert row[d].item() == pytest.approx(want, abs=1e-5)


def test_a_mask_is_drawn_as_visible_keys() -> None:
    picture = portrait.portray(Window(SITE, window=3), N)
    assert picture.curves == {}
    (mask,) = picture.masks.values()
    i, j = torch.arange(N)[:, None], torch.arange(N)
    assert torch.equal(mask, (j <= i) & (i - j < 3))
    lines = portrait.as_text(picture, 80, ascii_only=False, color=False).splitlines()
    assert lines[4] == ".###" + "." * (N - 4)


def test_nothing_is_drawn_where_nothing_changes() -> None:
    picture = portrait.portray(Nope(SITE), N)
    assert portrait.as_text(picture, 80, ascii_only=False, color=False) == ""


@pytest.mark.parametrize("width", [60, 80, 200])
def test_text_fits_the_terminal_and_its_characters(width: int) -> None:
    picture = portrait.portray(Alibi(SITE), N)
    for ascii_only in (False, True):
        text = portrait.as_text(picture, width, ascii_only, color=False)
        assert text.isascii() == ascii_only
        assert "\x1b" not in text
        assert 40 < max(map(len, text.splitlines())) <= width


def test_ascii_locale() -> None:
    assert portrait.ascii_locale("ascii")
    assert portrait.ascii_locale("latin-1")
    assert portrait.ascii_locale(None)


def test_dumb_terminal_is_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert not portrait.ascii_locale("utf-8")
    monkeypatch.setenv("TERM", "dumb")
    assert portrait.ascii_locale("utf-8")


def test_file_is_drawn_or_refused(tmp_path) -> None:
    picture = portrait.portray(Alibi(SITE), N)
    portrait.save(picture, tmp_path / "alibi.svg", "scheme=alibi")
    text = (tmp_path / "alibi.svg").read_text()
    assert text.startswith("<?xml")
    with pytest.raises(UserError, match=r"must end in \.png, \.svg, \.pdf"):
        portrait.save(picture, tmp_path / "alibi.txt", "scheme=alibi")
    nothing = portrait.portray(Nope(SITE), N)
    with pytest.raises(UserError, match="scheme=nope has nothing to draw"):
        portrait.save(nothing, tmp_path / "nope.png", "scheme=nope")
