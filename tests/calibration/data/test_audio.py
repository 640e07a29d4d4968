"""Wav files as calibration data: sample widths, channels, length, rate and invalid files."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.data_files import float_input, write_wav

from graphquant.calibration.data import open_data
from graphquant.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.formats import InputSpec

WAVE = np.array([0, 1, -1, 100, -128, 127, 64, -64])


def wave_values(spec: object, one: InputSpec) -> list[np.ndarray]:
    """Return the values that an input receives from each file."""
    return [feed["x"] for feed in open_data(str(spec), [one])]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_sample_widths(tmp_path, width: int) -> None:
    """Integers of each width become exactly -1 up to 1. Integer inputs receive their full range."""
    values = WAVE * 256 ** (width - 1)
    write_wav(tmp_path / "a.wav", values, width=width)
    (wave,) = wave_values(tmp_path, float_input(None, None))
    np.testing.assert_array_equal(wave, (WAVE / 128).astype(np.float32)[None])
    (whole,) = wave_values(tmp_path, float_input(1, 8, dtype="int16"))
    np.testing.assert_array_equal(whole, (WAVE * 256).astype(np.int16)[None])


def riff(form: int, bits: int, data: bytes, *, channels: int = 1, extra: bytes = b"", size: int | None = None) -> bytes:
    """Write a wav file of any format."""
    head = struct.pack("<HHIIHH", form, channels, 8000, 0, channels * bits // 8, bits) + extra
    body = b"fmt " + struct.pack("<I", len(head)) + head + b"LIST\x03\0\0\0abc\0"
    body += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WAVE" + body


def test_floats_and_extensible(tmp_path) -> None:
    """Floats are unchanged. An extensible header is resolved. An open data size extends to the end."""
    values = np.array([0.5, -0.25, 1.5])
    extensible = struct.pack("<HHIH14s", 22, 32, 0, 3, b"")
    for name, content in {
        "a": riff(3, 32, values.astype("<f4").tobytes()),
        "b": riff(3, 64, values.astype("<f8").tobytes()),
        "c": riff(0xFFFE, 32, values.astype("<f4").tobytes(), extra=extensible),
        "d": riff(3, 32, values.astype("<f4").tobytes(), size=0xFFFFFFFF),
    }.items():
        (tmp_path / f"{name}.wav").write_bytes(content)
    for wave in wave_values(tmp_path, float_input(None)):
        np.testing.assert_array_equal(wave, values.astype(np.float32))


def test_channels_length_and_scale(tmp_path) -> None:
    """Channels are averaged, long waves cut, and short ones padded. The only open axis is time."""
    write_wav(tmp_path / "a.wav", np.stack([WAVE // 2, 2 - WAVE // 2], 1) * 256)
    np.testing.assert_array_equal(
        wave_values(tmp_path, float_input(1, 1, None))[0], np.full((1, 1, 8), 1 / 128, np.float32)
    )
    write_wav(tmp_path / "a.wav", WAVE * 256)
    plain = (WAVE / 128).astype(np.float32)
    np.testing.assert_array_equal(wave_values(tmp_path, float_input(None, 5, 1))[0][0, :, 0], plain[:5])
    np.testing.assert_array_equal(wave_values(tmp_path, float_input(10))[0], np.append(plain, [0, 0]))
    np.testing.assert_array_equal(wave_values(f"{tmp_path},pad=repeat", float_input(20))[0], np.tile(plain, 3)[:20])
    np.testing.assert_array_equal(wave_values(f"{tmp_path},length=3", float_input(1, None))[0][0], plain[:3])
    np.testing.assert_array_equal(wave_values(f"{tmp_path},scale=32768", float_input(1, 8))[0][0], plain * 32768)
    with pytest.raises(DataError, match=r"a\.wav has 8 values,.* 20 .* pad=end"):
        wave_values(f"{tmp_path},pad=none", float_input(20))


def test_rates(tmp_path) -> None:
    """All files need the rate of the first file, or the requested one. The error contains the conversion command."""
    write_wav(tmp_path / "a.wav", WAVE)
    write_wav(tmp_path / "b.wav", WAVE, rate=8000)
    with pytest.raises(DataError, match=r"b\.wav .* 8000 Hz,.* 16000 Hz .*a\.wav.*-ar 16000"):
        wave_values(tmp_path, float_input(8))
    with pytest.raises(DataError, match=r"a\.wav .* 16000 Hz,.* 44100 Hz"):
        wave_values(f"{tmp_path},rate=44100", float_input(8))
    assert len(wave_values(tmp_path / "a.wav", float_input(8))) == 1


@pytest.mark.parametrize(
    ("keys", "one", "message"),
    [
        ("", float_input(1, None, None), r"'x' takes \[1, \?, \?\],.*time axis"),
        ("", float_input(1, 8, dtype="uint8"), r"'x' takes uint8,.*\.npz"),
        ("", float_input(1, 8, dtype="string"), r"'x' takes string,.*\.npz"),
        (",length=9", float_input(1, 8), "length=9,.*'x' takes 8.* Omit length"),
        (",length=x", float_input(1, None), "length=x .*integer"),
        (",pad=start", float_input(1, 8), "pad=start .* end, repeat, none"),
        (",scale=x", float_input(1, 8), "scale=x .*number"),
        (",rate=0", float_input(1, 8), "rate=0 .*integer"),
    ],
)
def test_invalid_settings(tmp_path, keys: str, one: InputSpec, message: str) -> None:
    """Settings that do not fit the input are reported."""
    write_wav(tmp_path / "a.wav", WAVE)
    with pytest.raises(DataError, match=message):
        wave_values(f"{tmp_path}{keys}", one)


def test_unsupported_formats(tmp_path) -> None:
    """Compressed and unusual waves are rejected with the conversion command."""
    path = tmp_path / "a.wav"
    for content, message in (
        (riff(6, 8, b"abcd"), "its format 6 with 8 bits is not supported"),
        (riff(1, 12, b"abcd"), "12 bits, 1 bytes"),
        (riff(1, 16, b"abcd", channels=0), "0 channels"),
        (riff(1, 16, b"abcd", size=99), "the file ends early"),
        (b"RIFF\0\0\0\0WAVE", "no format chunk"),
        (b"ID3", "it is not a wav file"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.wav cannot be read: .*{message}.* ffmpeg -i"):
            wave_values(path, float_input(4))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(position=st.integers(0, 70), byte=st.integers(0, 255), end=st.integers(0, 70))
def test_broken_files(tmp_path: Path, position: int, byte: int, end: int) -> None:
    """A file with one changed byte, or truncated anywhere, gives its feed or a DataError."""
    content = bytearray(riff(1, 16, bytes(range(16))))
    content[position % len(content)] = byte
    for broken in (bytes(content), bytes(content[:end])):
        (tmp_path / "a.wav").write_bytes(broken)
        try:
            assert wave_values(tmp_path, float_input(4))[0].shape == (4,)
        except DataError as error:
            assert "a.wav" in str(error)  # noqa: PT017  # either end is right
