from __future__ import annotations

from typing import Any

import pytest

from bayesattn.data.mixture import Mixture
from bayesattn.errors import UserError


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"context": 1}, "context is 1; at least 2 tokens are needed"),
        ({"novel_share": 1.5}, "novel_share is 1.5; a share from 0 to 1 is needed"),
        ({"early_share": float("nan")}, "early_share is nan; a share from 0 to 1 is needed"),
        ({"hard_share": 0.7}, "hard_share is 0.7; a share from 0 to 0.5 is needed"),
        ({"hay_weight": -1}, "hay_weight is -1; a number of at least 0 is needed"),
        ({"facts": (0,)}, r"facts is \[0\]; whole numbers from 1 to 20 are needed$"),
        ({"questions": (0, 0)}, r"questions is \[0, 0\]; whole numbers from 0 to 20 are needed, not all of them 0"),
        ({"context": 64}, "context is 64 and retrieval_share 0.6; facts and questions need a context of more than 64"),
    ],
)
def test_settings_out_of_range_get_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Mixture(**settings)


def test_a_share_may_be_a_whole_number() -> None:
    assert Mixture(retrieval_share=1) == Mixture(retrieval_share=1.0)
