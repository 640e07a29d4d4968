"""Conversion of images to numbers, compared with Pillow and computed values."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.data_files import float_input

from graphquant.calibration.data import open_data
from graphquant.calibration.data.images import PIXEL_PRESETS, pixel_settings
from graphquant.errors import DataError
from graphquant.formats import InputSpec

if TYPE_CHECKING:
    from pathlib import Path

PHOTO = np.random.default_rng(1).integers(0, 256, (6, 10, 3), np.uint8)  # 10 wide, 6 high


def encoded(pixels, form: str = "PNG", **options) -> bytes:
    """Encode an image."""
    held = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(held, form, **options)
    return held.getvalue()


def pixel_values(one: InputSpec, picture: bytes | None = None, **keys: str):
    """Return the values that an input receives from an image."""
    return pixel_settings("photos", one, keys).decode("photo", picture or encoded(PHOTO))


def resized(width: int, height: int, how=Image.Resampling.BILINEAR) -> np.ndarray:
    """Resize the photo with Pillow."""
    return np.asarray(Image.fromarray(PHOTO).resize((width, height), how))


def test_layouts() -> None:
    """Size and layout come from the input, for each layout with and without a batch axis."""
    plain = PHOTO.astype(np.float32)
    np.testing.assert_array_equal(pixel_values(float_input(None, 6, 10, 3), preset="raw"), plain[None])
    np.testing.assert_array_equal(pixel_values(float_input(1, 3, 6, 10), preset="raw"), plain.transpose(2, 0, 1)[None])
    np.testing.assert_array_equal(pixel_values(float_input(3, 6, 10), preset="raw"), plain.transpose(2, 0, 1))
    np.testing.assert_array_equal(pixel_values(float_input(6, 10, 3), preset="raw"), plain)
    grey = np.asarray(Image.fromarray(PHOTO).convert("L")).astype(np.float32)
    np.testing.assert_array_equal(pixel_values(float_input(None, 6, 10), preset="raw"), grey[None])
    np.testing.assert_array_equal(pixel_values(float_input(6, 10), preset="raw"), grey)
    np.testing.assert_array_equal(pixel_values(float_input(1, 1, 6, 10), preset="raw"), grey[None, None])
    np.testing.assert_array_equal(
        pixel_values(float_input(1, 6, 10, 4), preset="raw")[0, :, :, 3], np.full((6, 10), 255, np.float32)
    )
    named = pixel_values(float_input(None, None, None, None), preset="raw", layout="nchw", size="10x6")
    np.testing.assert_array_equal(named, plain.transpose(2, 0, 1)[None])
    np.testing.assert_array_equal(
        pixel_values(InputSpec(name="x", dtype="float32", shape=None), preset="raw", layout="hwc", resize="none"), plain
    )


def test_resizing() -> None:
    """Images are stretched, cropped or padded with the filters of Pillow."""
    square = float_input(1, 5, 5, 3, dtype="uint8")
    np.testing.assert_array_equal(pixel_values(square)[0], resized(5, 5))
    np.testing.assert_array_equal(pixel_values(square, filter="nearest")[0], resized(5, 5, Image.Resampling.NEAREST))
    np.testing.assert_array_equal(pixel_values(square, resize="crop")[0], resized(8, 5)[:, 2:7])
    np.testing.assert_array_equal(pixel_values(square, resize="crop", crop_pct="0.8")[0], PHOTO[0:5, 2:7])
    padded = pixel_values(square, resize="pad", fill="114")[0]
    np.testing.assert_array_equal(padded[1:4], resized(5, 3))
    assert set(padded[[0, 4]].ravel().tolist()) == {114}
    np.testing.assert_array_equal(pixel_values(float_input(1, 6, 10, 3, dtype="uint8"), resize="none")[0], PHOTO)
    with pytest.raises(DataError, match="it is 10x6, but 5x5 is required"):
        pixel_values(square, resize="none")


def test_normalization() -> None:
    """Value = (pixel * scale - mean) / std, in the channel order of the model."""
    one = float_input(1, 6, 10, 3)
    plain = PHOTO.astype(np.float64)
    np.testing.assert_array_equal(pixel_values(one, mean="127", std="128")[0], ((plain - 127) / 128).astype(np.float32))
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    torch = ((plain / 255 - mean) / std).astype(np.float32)
    np.testing.assert_allclose(pixel_values(one, preset="torch")[0], torch, rtol=1e-6)
    caffe = plain[:, :, ::-1] - [103.939, 116.779, 123.68]
    np.testing.assert_allclose(pixel_values(one, preset="caffe")[0], caffe, rtol=1e-6)
    tf = pixel_values(one, preset="tf")
    assert -1 <= tf.min() < -0.9
    assert 0.9 < tf.max() <= 1
    np.testing.assert_array_equal(pixel_values(one, preset="tf", mean="0", std="1")[0], plain.astype(np.float32))
    half = pixel_values(float_input(1, 6, 10, 3, dtype="float16"), preset="unit")
    assert (half.dtype, float(half.max())) == (np.dtype("float16"), 1.0)


def test_imagenet_preset() -> None:
    """The preset resizes the shorter side to 256 and crops 224, as torchvision does."""
    photo = Image.fromarray(np.random.default_rng(2).integers(0, 256, (300, 400, 3), np.uint8))
    resized_ = photo.resize((341, 256), Image.Resampling.BILINEAR)
    cut = np.asarray(resized_)[16:240, 58:282].astype(np.float64)  # round((341 - 224) / 2) is 58
    wanted = (cut / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    got = pixel_values(float_input(1, 3, 224, 224), encoded(photo), preset="imagenet")
    np.testing.assert_allclose(got[0].transpose(1, 2, 0), wanted, rtol=1e-4, atol=1e-6)


def test_integer_inputs() -> None:
    """uint8 inputs receive pixels unchanged; int8 inputs need a mean of 128."""
    np.testing.assert_array_equal(pixel_values(float_input(1, 6, 10, 3, dtype="uint8"))[0], PHOTO)
    signed = pixel_values(float_input(1, 6, 10, 3, dtype="int8"), mean="128")
    np.testing.assert_array_equal(signed[0], PHOTO.astype(np.int64) - 128)


@pytest.mark.parametrize("preset", PIXEL_PRESETS)
def test_presets(preset: str) -> None:
    """Each preset gives finite numbers for a color input."""
    values = pixel_values(float_input(1, 3, 5, 7), preset=preset)
    assert (values.shape, values.dtype) == ((1, 3, 5, 7), np.dtype("float32"))
    assert np.isfinite(values).all()


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(["stretch", "crop", "pad"]), st.floats(0.1, 1))
def test_any_size(width: int, height: int, resize: str, pct: float) -> None:
    """Any image is resized to the size of the input."""
    keys = {"resize": resize} | ({"crop_pct": str(pct)} if resize == "crop" else {})
    picture = encoded(np.zeros((height, width, 3), np.uint8))
    assert pixel_values(float_input(1, 9, 5, 3), picture, preset="raw", **keys).shape == (1, 9, 5, 3)


@pytest.mark.parametrize(
    ("one", "keys", "message"),
    [
        (float_input(1, 3, 5, 5), {}, r"photos,preset=imagenet.* photos,mean=127,std=128"),
        (float_input(1, 3, 5, 5), {"size": "4"}, r"photos,size=4,preset=imagenet.* photos,size=4,mean=127"),
        (float_input(1, 3, 5, 5), {"preset": "imagnet"}, "Did you mean 'imagenet'"),
        (
            float_input(1, 3, 5, 5),
            {"preset": "raw", "resize": "cover"},
            "resize=cover .* stretch, crop",
        ),
        (float_input(1, 3, 5, 5), {"mean": "a"}, "mean=a .*number"),
        (float_input(1, 3, 5, 5), {"mean": "1/0"}, "mean=1/0 .*number"),
        (float_input(1, 3, 5, 5), {"mean": "nan"}, "mean=nan .*number"),
        (float_input(1, 3, 5, 5), {"mean": "1:2"}, "2 numbers .* 3 channels"),
        (float_input(1, 3, 5, 5), {"mean": "1", "std": "0"}, "std=0 divides by zero"),
        (float_input(1, 3, 5, 5), {"mean": "0.485", "std": "0.229"}, "mean=0.485 .*std=0.229 .* scale=1/255"),
        (float_input(1, 3, 5, 5), {"preset": "raw", "size": "6x5"}, "size=6x5 .*Remove size"),
        (float_input(1, 3, 5, 5), {"preset": "raw", "size": "axb"}, "size=a .*integer"),
        (float_input(1, 3, None, None), {"preset": "raw"}, r"\[1, 3, \?, \?\],.* size="),
        (float_input(1, 3, None, None), {"preset": "raw", "size": "99999"}, "99999x99999 is too large"),
        (float_input(1, None, None, None), {"preset": "raw"}, "'x' .* layout=nchw"),
        (float_input(1, 3, 9, 3), {"preset": "raw"}, "matches several layouts"),
        (
            InputSpec(name="x", dtype="float32", shape=None),
            {"preset": "raw"},
            "'x' .*any shape,.* layout=nchw",
        ),
        (float_input(1, 3, 5, 5), {"preset": "raw", "layout": "chw"}, "layout=chw has 3 axes,.*'x' "),
        (
            float_input(1, 5, 4, 4),
            {"preset": "raw", "layout": "nchw"},
            "4 channels,.*'x' takes 5",
        ),
        (float_input(1, 1, 5, 5), {"preset": "raw", "order": "bgr"}, "order=bgr needs 3 channels"),
        (
            float_input(1, 3, 5, 5),
            {"preset": "raw", "crop_pct": "0.5"},
            "crop_pct=0.5 .*resize=crop",
        ),
        (float_input(1, 3, 5, 5, dtype="uint8"), {"preset": "imagenet"}, "'x' takes uint8,.* mean=128"),
        (float_input(1, 3, 5, 5, dtype="bool"), {}, "'x' takes bool,.*numeric"),
        (float_input(1, 3, 5, 5, dtype="string"), {}, "'x' takes string,.*numeric"),
    ],
)
def test_invalid_settings(one: InputSpec, keys: dict[str, str], message: str) -> None:
    """Ambiguous, unfitting and mistaken settings are reported before an image is read."""
    with pytest.raises(DataError, match=message):
        pixel_settings("photos", one, keys)


def test_rejected_images(tmp_path: Path, monkeypatch) -> None:
    """Broken, deep and huge images are rejected with a fix. No external program is started."""
    monkeypatch.setattr("graphquant.calibration.data.images.MAX_PIXELS", 100)
    one = float_input(1, 5, 5, 3, dtype="uint8")
    for content, message in (
        (b"no picture", "it cannot be read as an image"),
        (encoded(PHOTO)[:60], "it cannot be read as an image"),
        (encoded(np.zeros((20, 20), np.uint8)), "it has 20x20 pixels. Make it smaller"),
        (encoded(np.zeros((2, 2), np.uint16)), r"it has more than 8 bits per channel \(I;16\). Save it as an .npy"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 2 2\n", "it cannot be read as an image"),
    ):
        (tmp_path / "a.png").write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.png: {message}"):
            open_data(str(tmp_path), [one])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    (tmp_path / "a.png").write_bytes(encoded(np.zeros((8, 8), np.uint8)))
    with pytest.raises(DataError, match=r"decompression bomb.* Make it smaller"):
        open_data(str(tmp_path), [one])


def test_single_input_required(tmp_path: Path) -> None:
    """Images feed models with one input only."""
    (tmp_path / "a.png").write_bytes(encoded(PHOTO))
    other = InputSpec(name="y", dtype="float32", shape=())
    with pytest.raises(DataError, match=r"one input,.* 'x', 'y'"):
        open_data(str(tmp_path), [float_input(1, 6, 10, 3), other])


def test_photographs(model_folder: Path, tmp_path: Path) -> None:
    """Photographs for the face detector give exactly the values of its authors' formula."""
    photos = np.load(model_folder / "ultraface/images.npz")["rgb"][:4]
    for number, photo in enumerate(photos):
        (tmp_path / f"{number}.png").write_bytes(encoded(photo))
    wanted = ((photos.astype(np.float32) - 127) / 128).transpose(0, 3, 1, 2)
    batches = open_data(f"{tmp_path},mean=127,std=128", [InputSpec(name="x", dtype="float32", shape=wanted[:1].shape)])
    np.testing.assert_array_equal(np.concatenate([feed["x"] for feed in batches]), wanted)


PICTURES = np.random.default_rng(2).integers(0, 256, (5, 6, 10, 3), np.uint8)


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
@pytest.mark.parametrize(
    ("shape", "keys"),
    [
        ((None, 3, 6, 10), "mean=1:2:3,std=4"),
        ((None, 6, 10, 3), "preset=imagenet"),
        ((1, 3, 5, 7), "scale=1/255,order=bgr,resize=crop"),
        ((None, None, None, None), "scale=1/255,layout=nchw,size=4x8"),
        ((None, 1, 6, 10), "scale=1/255"),
        ((3, 6, 10), "mean=127"),
    ],
)
def test_arrays_of_pictures(tmp_path: Path, shape: tuple[int | None, ...], keys: str, suffix: str) -> None:
    """Pictures in an array give the same feeds as a folder of the same pictures."""
    gray = shape[1] == 1
    pictures = PICTURES[..., 0] if gray else PICTURES
    (tmp_path / "photos").mkdir()
    for index, picture in enumerate(pictures):
        tmp_path.joinpath("photos", f"{index}.png").write_bytes(encoded(picture))
    save = np.savez if suffix == ".npz" else np.save
    save(tmp_path / f"data{suffix}", **({"x": pictures} if suffix == ".npz" else {"arr": pictures}))
    expected, actual = (
        list(open_data(f"{tmp_path / name},{keys}", [float_input(*shape)])) for name in ("photos", f"data{suffix}")
    )
    assert len(actual) == len(expected) == 5
    for first, second in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(first["x"], second["x"])


def test_arrays_of_pictures_in_batches(tmp_path: Path) -> None:
    """A model with a fixed batch takes that many pictures at a time, and other arrays stay as they are."""
    np.savez(tmp_path / "data.npz", x=PICTURES[:4, ..., :1], scale=np.float32(3))
    inputs = [float_input(2, 1, 6, 10), float_input(name="scale")]
    feeds = list(open_data(f"{tmp_path / 'data.npz'},mean=127,std=2", inputs))
    assert [feed["scale"].item() for feed in feeds] == [3, 3]
    actual = np.concatenate([feed["x"] for feed in feeds])[:, 0]
    np.testing.assert_array_equal(actual, (PICTURES[:4, ..., 0].astype(np.float32) - 127) / 2)


@pytest.mark.parametrize("pictures", [PICTURES, PICTURES[:, :0, :, :1]])
def test_pictures_of_other_channels(tmp_path: Path, pictures: np.ndarray) -> None:
    """Pictures in color for a model of one channel, and pictures without pixels, are data errors."""
    np.save(tmp_path / "data.npy", pictures)
    with pytest.raises(DataError, match="with 1 channels"):
        list(open_data(f"{tmp_path / 'data.npy'},mean=127", [float_input(None, 1, 6, 10)]))


def test_pictures_in_arrays_need_a_conversion(tmp_path: Path) -> None:
    """Pixels for a float input need settings, settings need pixels, and the digest depends on the settings."""
    np.savez(tmp_path / "data.npz", x=PICTURES)
    np.savez(tmp_path / "float.npz", x=PICTURES.astype(np.float32))
    one = float_input(None, 6, 10, 3)
    with pytest.raises(DataError, match="preset=imagenet"):
        open_data(str(tmp_path / "data.npz"), [one])
    with pytest.raises(DataError, match=r"data\.npz,inputs\.x=x,mean=127"):  # the keys in the spec stay in the advice
        open_data(f"{tmp_path / 'data.npz'},inputs.x=x", [one])
    with pytest.raises(DataError, match="mean="):
        open_data(f"{tmp_path / 'float.npz'},mean=3", [one])
    with pytest.raises(DataError, match="10x6"):
        list(open_data(f"{tmp_path / 'data.npz'},mean=3,resize=none", [float_input(None, 10, 6, 3)]))
    digests = {open_data(f"{tmp_path / 'data.npz'},mean={mean}", [one]).final_digest() for mean in (1, 2)}
    assert len(digests) == 2


def test_the_key_of_an_array_is_suggested(tmp_path: Path) -> None:
    """If one array is left for an input, the error has the setting that assigns it."""
    np.savez(tmp_path / "data.npz", pixels=np.zeros((4, 3), np.float32), labels=np.zeros(4))
    with pytest.raises(DataError, match=r",inputs\.x=pixels'"):
        open_data(str(tmp_path / "data.npz"), [float_input(None, 3)])
