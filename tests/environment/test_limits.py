"""Seconds of user code, and observations that are cut to tokens."""

from __future__ import annotations

import pytest
from episode_world import merged_tokenizer
from tokenizer_kinds import tokenizer_of

from paceline.environment.setting import Stopwatch, cut_to_tokens


def test_only_the_seconds_of_user_code_count() -> None:
    now = [0.0]
    watch = Stopwatch(10.0, lambda: now[0])
    now[0] = 100.0
    assert (watch.used_s, watch.left_s) == (0.0, 10.0)
    with watch.running():
        now[0] = 104.0
        assert watch.left_s == 6.0
    now[0] = 500.0
    assert (watch.used_s, watch.left_s) == (4.0, 6.0)
    watch.start()
    watch.start()
    now[0] = 520.0
    assert watch.left_s == 0.0
    watch.stop()
    watch.stop()
    assert watch.used_s == 24.0


def test_a_text_is_cut_to_its_tokens_and_says_so() -> None:
    tokenizer = merged_tokenizer()
    assert cut_to_tokens("short", 5, tokenizer) == "short"
    fits = "tool call name arguments result error user assistant"
    count = len(tokenizer(fits, add_special_tokens=False)["input_ids"])
    assert count < len(fits)
    assert cut_to_tokens(fits, count, tokenizer) == fits
    cut = cut_to_tokens(fits, 3, tokenizer)
    assert cut.endswith("\n[cut off after 3 tokens]")
    assert fits.startswith(cut.partition("\n")[0])
    assert cut_to_tokens("x" * 10**7, 10, tokenizer).endswith("[cut off after 10 tokens]")


@pytest.mark.parametrize(
    "kind", ["byte_level", "byte_level_prefix", "metaspace_first", "legacy_llama", "unigram", "strips"]
)
@pytest.mark.parametrize("text", ["☃☃☃☃☃☃", "say  é\n42\tyes", " answer: no no no"])
def test_what_is_kept_of_a_text_is_its_beginning(kind: str, text: str) -> None:
    """A decoded beginning may be another text: half a character, no white space in front, unknown letters."""
    for most in range(1, 8):
        kept, _, note = cut_to_tokens(text, most, tokenizer_of(kind)).partition("\n[cut off")
        assert text.startswith(kept)
        assert (kept == text) == (not note)
