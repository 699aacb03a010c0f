"""Filters of prompts, by hand."""

from paceline.data.preparation.filters import (
    OverlapIndex,
    by_length,
    by_overlap,
    by_pass_rate,
    key_of,
    pass_rates,
)

NAN = float("nan")
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


def test_length() -> None:
    longer = by_length(lambda prompt, row: len(prompt) + row.get("more", 0), 3, "characters")
    assert [longer(prompt, {}) for prompt in ("abc", "abcd")] == ["", "prompt of more than 3 characters"]
    assert longer("abc", {"more": 1})


def test_pass_rates_are_of_all_attempts_whatever_the_system_prompt() -> None:
    rates = pass_rates([("2+2?", [1, 0]), (CHAT, [1, NAN]), ("a", [NAN]), ("b", [0.9])], 1.0)
    assert rates == {key_of("2+2?"): 2 / 3, key_of("b"): 0.0}
    keep = by_pass_rate(rates, 0.1, 0.6)
    assert [keep(prompt, {}) for prompt in (CHAT, "a", "b")] == [
        "pass rate above 0.6",
        "",
        "pass rate below 0.1",
    ]


def test_overlap_names_the_set() -> None:
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    check = by_overlap({"test.jsonl": OverlapIndex([text])}, 0.5)
    assert check(text.upper(), {}) == "prompt that overlaps with test.jsonl"
    assert check([{"role": "user", "content": text}], {}) == "prompt that overlaps with test.jsonl"
    assert check("one two three", {}) == ""
