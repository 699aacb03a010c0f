"""Recordings of `benchmarks/sampler_noise.py`: what is written is read again, and the figures are those of the differences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from recorded_noise import COMPLETIONS, FOLDER, load_noise

from benchmarks.sampler_noise import LARGE_GROUP, UNITS, figures_of, write
from paceline.learner.step.sampler_check import difference
from paceline.services.coordinator.exchange.spot_check import SPREAD_LIMITS

PAGE = Path(__file__).parents[2] / "docs" / "operate" / "performance.md"
RECORDINGS = sorted(path.stem for path in FOLDER.glob("*.npz"))
COLUMNS = ("mean", "mean_square", "root_mean_square", "percentile_99.9", "largest_group_mean_square")


def test_a_recording_is_read_again_with_rounding_far_below_the_noise(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    differences = [(2e-5 * rng.standard_t(3, length)).astype(np.float32) for length in (1, 300, 40, 7)]
    write(tmp_path / "trial.npz", differences)
    found = load_noise(str(tmp_path / "trial"))
    assert [(each.dtype, len(each)) for each in found] == [(np.float32, len(each)) for each in differences]
    tokens, rounded = np.concatenate(differences), np.concatenate(found)
    unit = np.sqrt(np.mean(tokens.astype(np.float64) ** 2)) / UNITS
    np.testing.assert_allclose(rounded, tokens, rtol=1e-6, atol=unit / 2)
    assert np.abs(rounded - tokens).max() > unit / 4


def test_a_difference_beyond_the_integers_makes_the_unit_larger(tmp_path: Path) -> None:
    differences = [np.full(3_000_000, 1e-6, np.float32), np.array([-3.0], np.float32)]
    write(tmp_path / "trial.npz", differences)
    assert load_noise(str(tmp_path / "trial"))[1] == pytest.approx(-3.0)


def test_figures_count_large_differences_as_the_learner_does() -> None:
    # Two groups of two completions: 200 tokens of 0.1 with one of -5, counted as -1; and 3 tokens of 0, too few to compare.
    large = [np.full(100, 0.1), np.array([*[0.1] * 100, -5.0])]
    figures = figures_of([*large, np.zeros(2), np.zeros(1)], completions=2)
    assert (figures["groups"], figures["tokens"], figures["largest"]) == (2, 204, 5.0)
    assert figures["mean"] == pytest.approx((20 - 1) / 204)
    assert figures["mean_square"] == pytest.approx((2 + 1) / 204)
    assert figures["root_mean_square"] == pytest.approx((3 / 204) ** 0.5)
    assert figures["largest_group_mean_square"] == pytest.approx(3 / 201)


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_page_has_the_figures_of_each_recording(name: str) -> None:
    differences = load_noise(name)
    assert len(differences) == 40 * COMPLETIONS
    assert np.isfinite(np.concatenate(differences)).all()
    figures = figures_of(differences, COMPLETIONS)
    cells = [f"`{name}`", f"{figures['tokens']:,}", *(f"{figures[column]:.2g}" for column in COLUMNS)]
    assert f"| {' | '.join(cells)} |" in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", RECORDINGS)
def test_wrong_weights_exceed_the_limits_and_correct_engines_do_not(name: str) -> None:
    """A wrong temperature exceeds the limit of float32 alone."""
    differences, number_format = load_noise(name), name.split("-")[1]
    groups = [differences[at : at + COMPLETIONS] for at in range(0, len(differences), COMPLETIONS)]
    found = [difference(0, "", 0, group, number_format) for group in groups]
    squares = [each.mean_square for each in found if each.tokens >= LARGE_GROUP]
    assert len(squares) == 40
    if name.endswith("-layer"):
        assert min(squares) > SPREAD_LIMITS["bfloat16"]
    elif name.endswith("-temperature"):
        assert SPREAD_LIMITS["float32"] < min(squares)
        assert max(squares) < SPREAD_LIMITS["bfloat16"]
    else:
        assert max(squares) < SPREAD_LIMITS[number_format]
