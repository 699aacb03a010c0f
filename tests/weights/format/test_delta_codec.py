"""Changed elements in few bytes: round trips, known sizes, and input that no encoder has made."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import WireError
from paceline.weights.format import delta_codec

SIZE = 200_000


def encode(base_N: np.ndarray, new_N: np.ndarray) -> bytes:
    data = delta_codec.encode(base_N, new_N)
    assert data is not None
    return data


def round_trip(base_N: np.ndarray, new_N: np.ndarray) -> int:
    """Decode an encoded change, apply it twice, compare; return the size in bytes."""
    data = encode(base_N, new_N)
    positions_K, values_K = delta_codec.decode(data, base_N)
    np.testing.assert_array_equal(np.sort(positions_K), np.flatnonzero(base_N != new_N))
    applied_N = base_N.copy()
    for _ in range(2):
        applied_N[positions_K] = values_K
        np.testing.assert_array_equal(applied_N, new_N)
    return len(data)


def some_bits(dtype: str, size: int = SIZE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8"])
@pytest.mark.parametrize("fraction", [1e-5, 1e-3, 0.01, 0.2, 0.6, 1.0])
def test_any_density_and_width_comes_back(dtype: str, fraction: float) -> None:
    base_N, new_N = some_bits(dtype), some_bits(dtype)
    count = max(1, int(SIZE * fraction))
    where_K = np.random.default_rng(1).choice(SIZE, count, replace=False)
    new_N[where_K] += 1  # wraps around at the largest value
    round_trip(base_N, new_N)


@pytest.mark.parametrize("positions", [[0], [SIZE - 1], [0, SIZE - 1], [254], [255], [256], [65535], [65536, 199_000]])
def test_gaps_around_the_escapes_come_back(positions: list[int]) -> None:
    base_N = some_bits("u2")
    new_N = base_N.copy()
    new_N[positions] ^= 0x8000
    assert round_trip(base_N, new_N) < 900


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_values_come_back(data: st.DataObject) -> None:
    base = data.draw(st.lists(st.integers(0, 65535), min_size=1, max_size=600))
    new = data.draw(st.lists(st.integers(0, 65535), min_size=len(base), max_size=len(base)))
    base_N, new_N = np.array(base, "u2"), np.array(new, "u2")
    if (base_N != new_N).any():
        round_trip(base_N, new_N)


def test_one_percent_of_single_units_costs_less_than_eleven_bits_each() -> None:
    """Entropy of a gap at density p = 0.01 is H(p)/p = 8.08 bits, a sign is 1 bit: 9.08 at best."""
    generator = np.random.default_rng(0)
    base_N = some_bits("u2")
    new_N = base_N.copy()
    where_K = np.flatnonzero(generator.random(SIZE) < 0.01)
    new_N[where_K] += np.where(generator.random(len(where_K)) < 0.5, 1, 65535).astype("u2")
    assert 9.0 < round_trip(base_N, new_N) * 8 / len(where_K) < 11.0


def adam_like(lr: float, size: int = 400_000) -> tuple[np.ndarray, np.ndarray]:
    """Bits of bfloat16 weights of standard deviation 0.02 before and after a step of about a quarter of `lr`."""
    generator = np.random.default_rng(0)
    weights_N = generator.normal(0.0, 0.02, size).astype(np.float32)
    steps_N = generator.normal(0.0, 0.23 * lr, size).astype(np.float32)

    def bits(values_N: np.ndarray) -> np.ndarray:
        return ((values_N.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)

    return bits(weights_N), bits(weights_N + steps_N)


def entropy_bits(values_N: np.ndarray) -> float:
    """Shannon's bound for independent values of this distribution."""
    counts = np.unique(values_N, return_counts=True)[1]
    return float((counts * np.log2(len(values_N) / counts)).sum())


@pytest.mark.parametrize("lr", [1e-6, 3e-6, 1e-5])
def test_a_step_costs_little_more_than_the_entropy_of_its_differences_by_exponent(lr: float) -> None:
    base_N, new_N = adam_like(lr)
    exponents_N = base_N >> 7 & 0xFF
    bound = sum(entropy_bits((new_N - base_N)[exponents_N == e]) for e in np.unique(exponents_N))
    all_alike = entropy_bits(new_N - base_N)
    found = 8 * round_trip(base_N, new_N)
    assert found < 1.15 * bound
    assert found < all_alike


def test_an_outlier_does_not_take_the_classes_from_the_others() -> None:
    base_N, new_N = adam_like(3e-6)
    undisturbed = round_trip(base_N, new_N)
    base_N[7] = new_N[7] = 0x7F00  # 1.7e38
    assert round_trip(base_N, new_N) <= undisturbed + 8


def test_a_byte_that_is_cut_or_added_is_refused() -> None:
    base_N = some_bits("u2")
    new_N = base_N.copy()
    new_N[::100] += 1
    data = encode(base_N, new_N)
    for broken in (
        b"",
        data[:5],
        data[:-1],
        data + b"\0",
        b"\x09" + data[1:],
        data[:1] + b"\xff" * 8 + data[9:],
    ):
        with pytest.raises(WireError, match="cannot be decoded"):
            delta_codec.decode(broken, base_N)
    with pytest.raises(WireError):
        delta_codec.decode(data, base_N[:1000])


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bytes_never_do_worse_than_wrong_values(seed: int) -> None:
    base_N = some_bits("u2", 5000)
    new_N = base_N.copy()
    new_N[::37] += 1
    data = bytearray(encode(base_N, new_N))
    generator = np.random.default_rng(seed)
    for _ in range(50):
        broken = bytearray(data)
        broken[generator.integers(len(data))] ^= 1 << int(generator.integers(8))
        try:
            positions_K, values_K = delta_codec.decode(bytes(broken), base_N)
        except WireError:
            continue
        assert len(positions_K) == len(values_K)
        assert 0 <= positions_K.min() <= positions_K.max() < len(base_N)
