"""Overlap by n-grams: whole texts, parts of texts, short texts, and prompts that are chats."""

from __future__ import annotations

from paceline.data.preparation.filters import OverlapIndex, text_of


def test_the_share_of_a_texts_ngrams() -> None:
    index = OverlapIndex(["One two, three four five!"], words=3)
    assert index.share("one TWO three four five") == 1.0
    assert index.share("zero one two three") == 0.5  # (zero one two) and (one two three)
    assert index.share("five four three two one") == 0.0
    assert index.share("?!") == 0.0


def test_a_short_text_is_one_ngram() -> None:
    index = OverlapIndex(["2 + 2 = ?"], words=13)
    assert index.share("2+2=") == 1.0
    assert index.share("2+2=4") == 0.0


def test_of_a_chat_the_users_words_count() -> None:
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": "2+2?"}]
    assert text_of(chat) == "2+2?"
    assert text_of("2+2?") == "2+2?"
