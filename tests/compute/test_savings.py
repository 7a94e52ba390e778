from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bayesattn.compute import blog, cards, schedule
from bayesattn.compute.costs import BlogShare
from bayesattn.compute.flops import HARDWARE, find_hardware, training_memory
from bayesattn.compute.savings import inference, savings, short_saving
from bayesattn.errors import UserError

LLAMA = cards.find("llama-3.1-405b")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.738), ("llama-2-70b", 68.977), ("llama-3-8b", 8.030), ("llama-3-70b", 70.554),
        ("llama-3.1-405b", 405.853), ("llama-3.2-1b", 1.236), ("mistral-7b", 7.242), ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-7b", 7.616), ("qwen3-8b", 8.191), ("gpt2", 0.124), ("gpt2-xl", 1.558), ("bloom-176b", 176.247),
        ("smollm2-135m", 0.135), ("l12", 0.121),
    ],
)  # fmt: skip
def test_cards_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert cards.find(name).parameters / 1e9 == pytest.approx(billions, abs=6e-4)


@pytest.mark.parametrize(
    ("stages", "full", "causal", "blog"),
    [("blog", 1.42, 1.06, 63.054), ("blog-1m", 6.73, 3.91, 99.049), ("llama3", 7.245, 6.24, None)],
)
def test_shares_of_long_stages_are_the_known_ones(stages: str, full: float, causal: float, blog: float | None) -> None:
    result = savings(LLAMA, schedule.find(stages))
    long = [row for row in result.rows if row.length > 8192]
    assert sum(row.share_full for row in long) * 100 == pytest.approx(full, abs=5e-3)
    assert sum(row.share_causal for row in long) * 100 == pytest.approx(causal, abs=5e-3)
    assert result.dropped * 100 == pytest.approx(causal, abs=5e-3)
    assert 0 < result.short < result.dropped
    if blog is not None:
        assert result.blog * 100 == pytest.approx(blog, abs=5e-4)


def test_the_blogs_figures_are_its_own_beside_exact_ones() -> None:
    rows = blog.shares(LLAMA)
    assert [round(100 * row.share_blog, 3) for row in rows] == [63.054, 99.049, 99.940]
    assert [row.factor_blog for row in rows] == pytest.approx([2.71, 105, 1668], rel=2e-3)
    assert [round(100 * row.share, 2) for row in rows[:2]] == [1.06, 3.91]
    assert all(row.factor is not None and 1 < row.factor < 1.05 for row in rows)
    assert BlogShare("all of it", 1.0, 1.0).factor is None


def test_batches_of_falling_contexts_cost_what_the_blog_says_by_its_estimate() -> None:
    near, far, more = blog.gradual(LLAMA)
    assert [row.same_cost for row in (near, far, more)] == pytest.approx([153_447, 910_205, 1_201_115], abs=1)
    assert more.tokens == pytest.approx(1.393e12, rel=1e-3)
    stages = [schedule.Stage(near.tokens, round(near.mean), near.mean), blog.BEFORE]
    assert near.share == pytest.approx(savings(LLAMA, stages).dropped)
    assert near.mean == pytest.approx((128_000 - 8000) / math.log(16), rel=1e-4)


def test_attention_shares_and_where_it_equals_the_rest() -> None:
    short, long = savings(LLAMA, schedule.parse("1T@8K,1T@128K")).rows
    assert short.attention_share_full == pytest.approx(0.077, abs=5e-4)
    assert short.attention_share_causal == pytest.approx(0.040, abs=5e-4)
    assert long.attention_share_full == pytest.approx(0.57, abs=5e-3)
    assert long.attention_share_causal == pytest.approx(0.40, abs=5e-3)
    # For small models short training saves much, for large ones little.
    assert short_saving(cards.find("l12"), 131_072, 512) > 0.9
    assert short_saving(LLAMA, 8192, 512) < 0.05


def test_hours_memory_documents_and_reading() -> None:
    stages = schedule.parse("15.6T@8K")
    result = savings(LLAMA, stages)
    # 30.84M hours of H100 were reported, at a utilisation of 38 to 43%.
    assert 25e6 < result.hours(HARDWARE["h100"], 0.4) < 31e6
    assert savings(LLAMA, stages, document=1000).flops < result.flops
    assert savings(LLAMA, stages, recompute=True).flops == pytest.approx(result.flops * 4 / 3)
    assert training_memory(LLAMA, 8192)["weights"] == 4 * LLAMA.parameters
    row = inference(LLAMA, 131_072, local=0.75, span=1024)
    assert row.kv_full == 131_072 * 2 * 126 * 8 * 128 * 2
    assert row.kv_kept == pytest.approx(row.kv_full * (0.25 + 0.75 / 128))
    assert row.prefill_kept < row.prefill_full
    same = inference(LLAMA, 1000, local=1.0, span=5000)
    assert (same.kv_kept, same.prefill_kept) == pytest.approx((same.kv_full, same.prefill_full))


@pytest.mark.parametrize(
    ("text", "character"),
    [
        ("15T@8K,100X@128K", 11),
        ("15T8K", 4),
        ("", 1),
        ("15T@", 5),
        ("15T@8K,", 8),
        ("-1T@8K", 1),
        ("15T@8Q", 6),
        ("1T@8K;2T@8K", 6),
    ],
)
def test_a_schedule_that_cannot_be_read_is_pointed_at(text: str, character: int) -> None:
    with pytest.raises(ValueError, match=rf"cannot be read from character {character} on") as problem:
        schedule.parse(text)
    assert len(str(problem.value).splitlines()) == 1
    assert f"at {text[character - 1 :]!r}" in str(problem.value)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: schedule.parse("0T@8K"), "the stage '0T@8K' has 0 tokens in contexts of 8192; 1 to 1e"),
        (lambda: schedule.llama(1e20), "1e+20 long tokens; more than 0 and less than 1.56e+13 are allowed"),
        (lambda: schedule.llama(0), "0 long tokens; more than 0 and less than 1.56e+13 are allowed"),
        (lambda: cards.find("llama-3.1-404b"), "no model 'llama-3.1-404b'; the nearest are llama-3.1-405b"),
        (lambda: inference(LLAMA, 100, local=2.0, span=1), "the share of local heads is 2.0; 0 to 1 is allowed"),
        (lambda: inference(LLAMA, 100, local=0.5, span=0), "the span of local heads is 0; 1 to"),
        (lambda: savings(LLAMA, schedule.parse("1T@8K")).hours(HARDWARE["h100"], 0), "the utilisation is 0; it must"),
        (lambda: find_hardware("h10"), "there is no hardware 'h10'; did you mean h100?"),
    ],
)
def test_bad_input_gets_one_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        call()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (json.dumps({"hidden_size": 64}), "has no num_attention_heads; it is needed to count FLOPs"),
        ("{", "config.json is not JSON"),
        ("[]", "config.json is not a configuration"),
    ],
)
def test_a_bad_config_file_gets_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=sentence):
        cards.find(str(tmp_path))
