"""`paceline spec`: keys explained, another library's name answered, a spec checked."""

from __future__ import annotations

from command_line import paceline


def test_a_key_is_explained_with_type_and_default() -> None:
    assert paceline("spec", "--explain", "grpo.seed").stdout == (
        "grpo.seed (integer ≥ 0, default 42)\n    Seeds the order of the data, the sampling and the initialisation.\n"
    )


def test_a_section_lists_its_keys() -> None:
    shown = paceline("spec", "--explain", "rewards").stdout.splitlines()
    assert shown[0] == "rewards (list of sections)"
    assert "rewards.N.weight (number, default 1.0)" in shown


def test_a_last_part_is_enough() -> None:
    shown = paceline("spec", "--explain", "max_new_tokens").stdout
    assert shown.startswith("policy.generation.max_new_tokens (integer > 0, default 256)\n")


def test_a_foreign_name_is_answered() -> None:
    result = paceline("spec", "--explain", "report_to")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: report_to: unknown key; there is none, because TensorBoard")


def test_the_sections_are_listed() -> None:
    shown = paceline("spec").stdout
    assert "\npolicy (section, required)\n" in shown
    assert "\nalgorithm (`grpo`" not in shown


def test_json_has_one_line_for_each_key() -> None:
    assert paceline("spec", "--explain", "name", "--json").stdout.startswith('{"key": "')
