import pytest

from posx.errors import UserError
from posx.lengths import DEFAULT, parse


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("512,2048", [512, 2048]),
        ("512, 2048", [512, 2048]),
        (" 2048 ,512,512", [512, 2048]),
        ("64..512", [64, 128, 256, 512]),
        ("64..500", [64, 128, 256]),
        ("7..7", [7]),
        ("8x", [320]),
        ("1.5x,0.5x", [20, 60]),
        ("1x,40,10..20", [10, 20, 40]),
        ("1000000000", [10**9]),
    ],
)
def test_lengths_at_train_len_40(text: str, tokens: list[int]) -> None:
    assert parse(text).of(40) == tokens


def test_default_is_dense_where_the_fall_is() -> None:
    assert DEFAULT.of(64) == [64, 72, 80, 96, 128, 256, 512, 2048, 8192]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("512,abc", "'abc' is not a length"),
        ("-5", "'-5' is not a length"),
        ("1e9", "'1e9' is not a length"),
        ("5.5", "'5.5' is not a length"),
        ("x", "'x' is not a length"),
        ("64...128", "'64...128' is not a length"),
        ("64..128..256", "is not a length"),
        ("64 128", "'64 128' is not a length"),
        ("\u0663", "is not a length"),  # an Arabic three: a digit to Python, not to the user
        ("", "a length is missing"),
        ("8x,", "a length is missing"),
        (",8", "in quotes"),
        ("0", "0 is not above 0"),
        ("0x", "0x is not above 0"),
        ("0..8", "0..8 is not above 0"),
        ("64..8", "write the smaller one first"),
        ("9" * 30, "is above"),
        ("1.." + "9" * 5000, "is above"),
        ("9" * 400 + "x", "is above"),
    ],
)
def test_what_is_no_length_is_said(text: str, said: str) -> None:
    with pytest.raises(UserError, match="--lengths") as refused:
        parse(text)
    assert said in str(refused.value)
    assert "such as 512,2048" in str(refused.value)
    assert len(str(refused.value)) < 300 or len(text) > 1000
