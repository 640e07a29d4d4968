"""How a picture becomes the numbers that a model takes: size, layout, channel order, mean and scale."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.data.files import FAILURES, INSTALL
from graphquant.data.fit import kind_of, numpy_dtype, shape_text
from graphquant.errors import DataError, MissingDependencyError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphquant.data.base import Input
    from graphquant.numerics import Array

PRESETS: dict[str, dict[str, str]] = {
    # What the field calls them: Keras' preprocess_input has the modes caffe, tf and torch; the others are models.
    "raw": {},
    "unit": {"scale": "1/255"},
    "tf": {"mean": "127.5", "std": "127.5"},
    "torch": {"scale": "1/255", "mean": "0.485:0.456:0.406", "std": "0.229:0.224:0.225"},
    "caffe": {"order": "bgr", "mean": "103.939:116.779:123.68"},
    "imagenet": {
        "scale": "1/255",
        "mean": "0.485:0.456:0.406",
        "std": "0.229:0.224:0.225",
        "resize": "crop",
        "crop_pct": "0.875",
    },
    "clip": {
        "scale": "1/255",
        "mean": "0.48145466:0.4578275:0.40821073",
        "std": "0.26862954:0.26130258:0.27577711",
        "resize": "crop",
        "filter": "bicubic",
    },
    "yolo": {"scale": "1/255", "resize": "pad", "fill": "114"},
}
"""Sets of keys by name; a key of the spec wins over the preset's."""

CHOICES: dict[str, tuple[str, ...]] = {
    "resize": ("stretch", "crop", "pad", "none"),
    "filter": ("bilinear", "bicubic", "nearest", "lanczos", "box"),
    "layout": ("nchw", "nhwc", "nhw", "chw", "hwc", "hw"),
    "order": ("rgb", "bgr"),
}

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's mode for a number of channels."""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's readers that may be used; others start programs or are hardly ever tried."""

MAX_PIXELS = 1 << 27
"""Largest picture, before and after resizing."""

SMALLEST_CROP = 0.1

WITH_ALPHA = 4
"""Channels of a picture with transparency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """How a picture becomes numbers: value = (pixel * scale - mean) / std, where pixel is 0 to 255.

    Attributes:
        layout: The input's axes, a letter each.
        channels: 1 (grey), 3 or 4 (with alpha).
        dtype: dtype of the input.
        size: Width and height; None to leave them.
        resize: "stretch", "crop" (cover, then cut the middle), "pad" (fit inside, then fill) or "none".
        crop_pct: How much of the covering side a crop keeps.
        filter: How Pillow interpolates.
        fill: Pixel value around a padded picture.
        order: "rgb" or "bgr".
        scale: Factor.
        mean: float64 (1,) or (channels,).
        std: The same.
    """

    layout: str
    channels: int
    dtype: str
    size: tuple[int, int] | None = None
    resize: str = "stretch"
    crop_pct: float = 1.0
    filter: str = "bilinear"
    fill: int = 0
    order: str = "rgb"
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def of(self, content: bytes) -> Array:
        """The numbers of an encoded picture, in the input's layout and dtype; a first axis of 1 for a batch.

        Raises:
            DataError: It is no picture, or none that fits.
        """
        return self.numbers(_decoded(content, self))

    def numbers(self, picture: Array) -> Array:
        """The numbers of `picture`, uint8 (height, width, channels)."""
        values = picture[:, :, ::-1] if self.order == "bgr" else picture
        dtype = numpy_dtype(self.dtype)
        if (self.scale, self.mean, self.std) != (1.0, (0.0,), (1.0,)) or kind_of(dtype) == "float":
            values = (values * np.float64(self.scale) - np.array(self.mean)) / np.array(self.std)
        if kind_of(dtype) == "int":
            values = np.rint(values).astype(np.int64)
        elif kind_of(dtype) == "float":
            values = values.astype(dtype)
        letters = "nhwc" if "c" in self.layout else "nhw"
        whole = values[None] if "c" in self.layout else values[None, :, :, 0]
        if "n" not in self.layout:
            letters, whole = letters[1:], whole[0]
        return np.ascontiguousarray(whole.transpose([letters.index(letter) for letter in self.layout]))


def pixels_for(where: str, taker: Input, keys: Mapping[str, str]) -> Pixels:
    """How pictures become what `taker` takes: as `keys` say, and where they do not, as its shape says.

    Raises:
        DataError: A key's value cannot be, does not fit the input, or something is left open.
    """
    keys = _with_preset(where, taker, keys)
    for key, known in CHOICES.items():
        if key in keys and keys[key] not in known:
            near = did_you_mean(keys[key], known)
            raise DataError(f"{where}: {key}={keys[key]} is unknown. Known are {', '.join(known)}.{near}")
    layout = keys.get("layout") or _layout(where, taker)
    if taker.shape is not None and len(taker.shape) != len(layout):
        raise DataError(
            f"{where}: layout={layout} has {len(layout)} axes, and input {taker.name!r} takes"
            f" {shape_text(taker.shape)}. Give the input's own layout."
        )
    sizes = dict(zip(layout, taker.shape or [None] * len(layout), strict=True))
    channels = 1 if "c" not in layout else sizes["c"] or 3
    if channels not in MODES:
        raise DataError(
            f"{where}: pictures have 1, 3 or 4 channels, and input {taker.name!r} takes {channels}."
            " Say layout= if it is another, or give an .npz file."
        )
    made = Pixels(
        layout=layout,
        channels=channels,
        dtype=taker.dtype,
        size=_size(where, taker, keys, sizes),
        resize=keys.get("resize", "stretch"),
        crop_pct=number(where, "crop_pct", keys.get("crop_pct", "1")),
        filter=keys.get("filter", "bilinear"),
        fill=min(_whole(where, "fill", keys.get("fill", "0"), low=0), 255),
        order=keys.get("order", "rgb"),
        scale=number(where, "scale", keys.get("scale", "1")),
        mean=_numbers(where, "mean", keys.get("mean", "0"), channels),
        std=_numbers(where, "std", keys.get("std", "1"), channels),
    )
    _check(where, taker, made, keys)
    return made


def number(where: str, key: str, text: str) -> float:
    """A number, as in "0.5" or "1/255".

    Raises:
        DataError: It is none, or not finite.
    """
    top, _, bottom = text.partition("/")
    try:
        value = float(top) / float(bottom or "1")
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{where}: {key}={text} is no number. Write it as 0.5 or 1/255.")
    return value


def _with_preset(where: str, taker: Input, keys: Mapping[str, str]) -> dict[str, str]:
    preset = keys.get("preset")
    if preset is not None and preset not in PRESETS:
        near = did_you_mean(preset, PRESETS)
        raise DataError(f"{where}: preset={preset} is unknown. Known are {', '.join(PRESETS)}.{near}")
    said = preset is not None or keys.keys() & {"scale", "mean", "std"}
    if not said and kind_of(numpy_dtype(taker.dtype)) == "float":
        raise DataError(
            f"{where}: input {taker.name!r} takes {taker.dtype}, and nothing says how pixels become that. Say it as in"
            f" training: {where},preset=imagenet (or {', '.join(PRESETS)}), or {where},mean=127,std=128."
        )
    if kind_of(numpy_dtype(taker.dtype)) not in {"int", "float"}:
        raise DataError(f"{where}: input {taker.name!r} takes {taker.dtype}, no numbers. Give an .npz file.")
    return {**(PRESETS[preset] if preset else {}), **{key: text for key, text in keys.items() if key != "preset"}}


def _layout(where: str, taker: Input) -> str:
    """The layout that the input's shape tells, if it tells just one."""
    shape = taker.shape
    if shape is not None and len(shape) == 2:  # noqa: PLR2004  # height and width
        return "hw"
    if shape is not None and len(shape) in {3, 4}:
        last = shape[-1] in MODES
        first = shape[-3] in MODES
        named = {4: ("nchw", "nhwc", ""), 3: ("chw", "hwc", "nhw")}[len(shape)]
        if first != last:
            return named[0] if first else named[1]
        if not first and shape[0] is None and None not in shape[1:] and named[2]:
            return named[2]
    takes = "any shape" if shape is None else shape_text(shape)
    raise DataError(
        f"{where}: input {taker.name!r} takes {takes}, which may be several layouts. Add layout=nchw or nhwc."
    )


def _size(where: str, taker: Input, keys: Mapping[str, str], sizes: Mapping[str, int | None]) -> tuple[int, int] | None:
    """Width and height, as asked for or as the input has them."""
    own = sizes["w"], sizes["h"]
    if "size" in keys:
        width_text, _, height_text = keys["size"].partition("x")
        width, height = (_whole(where, "size", word) for word in (width_text, height_text or width_text))
        for asked, fixed in zip((width, height), own, strict=True):
            if fixed not in {None, asked}:
                raise DataError(
                    f"{where}: size={keys['size']} is {width} wide and {height} high, and input {taker.name!r} takes"
                    f" {shape_text(taker.shape or ())}, {own[0] or '?'} wide and {own[1] or '?'} high. Leave size out."
                )
    elif own[0] is not None and own[1] is not None:
        width, height = own[0], own[1]
    elif keys.get("resize") == "none":
        return None
    else:
        raise DataError(
            f"{where}: input {taker.name!r} takes {shape_text(taker.shape or ())}, which leaves the size open."
            " Add size=WIDTHxHEIGHT, or resize=none to leave pictures as they are."
        )
    if width * height > MAX_PIXELS:
        raise DataError(f"{where}: {width}x{height} is too large. Give a size of at most {MAX_PIXELS} pixels.")
    return width, height


def _check(where: str, taker: Input, made: Pixels, keys: Mapping[str, str]) -> None:
    """Refuses what is surely not meant."""
    if 0.0 in made.std:
        raise DataError(f"{where}: std={keys['std']} divides by zero. Give what the model was trained with.")
    if kind_of(numpy_dtype(taker.dtype)) == "int" and (made.scale != 1 or made.std != (1.0,)):
        raise DataError(
            f"{where}: input {taker.name!r} takes {taker.dtype}, so pixels stay whole numbers. Leave preset, scale and"
            " std out; mean=128 makes -128 to 127 of them."
        )
    if made.scale == 1 and max(made.std) < 1 and max(made.mean) <= 1 and "std" in keys:
        raise DataError(
            f"{where}: mean={keys.get('mean', '0')} and std={keys['std']} are for pixels of 0 to 1, and these are 0 to"
            " 255. Add scale=1/255."
        )
    if made.order == "bgr" and made.channels != 3:  # noqa: PLR2004  # red, green, blue
        raise DataError(f"{where}: order=bgr needs 3 channels, and input {taker.name!r} takes {made.channels}.")
    if "crop_pct" in keys and (made.resize != "crop" or not SMALLEST_CROP <= made.crop_pct <= 1):
        raise DataError(
            f"{where}: crop_pct={keys['crop_pct']} is the part that resize=crop keeps, {SMALLEST_CROP} to 1."
            " Leave it out, or add resize=crop."
        )


def _whole(where: str, key: str, text: str, *, low: int = 1) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text) >= low):  # noqa: PLR2004  # a million
        raise DataError(f"{where}: {key}={text} is no whole number from {low}. Write size as 320x240, others as 256.")
    return int(text)


def _numbers(where: str, key: str, text: str, channels: int) -> tuple[float, ...]:
    values = tuple(number(where, key, word) for word in text.split(":"))
    if len(values) not in {1, channels}:
        raise DataError(
            f"{where}: {key}={text} has {len(values)} numbers for {channels} channels. Give one, or as many."
        )
    return values


def _decoded(content: bytes, pixels: Pixels) -> Array:
    """The picture in its size, uint8 (height, width, channels)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError(f"Pictures need the package pillow. Install it: {INSTALL}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata; large pictures are refused by size
            image = Image.open(BytesIO(content), formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"it has {image.width}x{image.height} pixels. Make it smaller.")
            if image.mode.startswith(("I", "F")):
                raise DataError(f"it has more than 8 bits for a pixel ({image.mode}). Save it as an .npy file.")
            image = _sized(image.convert(MODES[pixels.channels]), pixels)
    except Image.DecompressionBombError as error:
        raise DataError(f"{error}. Make it smaller.") from error
    except FAILURES as error:
        said = str(error).strip().rstrip(".") or type(error).__name__
        raise DataError(f"it is no picture that can be read: {said}. Save it again as PNG or JPEG.") from error
    return np.asarray(image).reshape(image.height, image.width, pixels.channels)


def _sized(image: Any, pixels: Pixels) -> Any:
    """`image` in the size that the model takes."""
    from PIL import Image

    if pixels.size is None or (image.size == pixels.size and pixels.crop_pct == 1):
        return image
    if pixels.resize == "none":
        width, height = pixels.size
        raise DataError(f"it is {image.width}x{image.height}, and {width}x{height} is wanted. Leave resize=none out.")
    how = Image.Resampling[pixels.filter.upper()]
    if pixels.resize == "stretch":
        return image.resize(pixels.size, how)
    (width, height), (old_width, old_height) = pixels.size, image.size
    ratios = width / old_width, height / old_height
    ratio = min(ratios) if pixels.resize == "pad" else max(ratios) / pixels.crop_pct
    scaled = max(1, round(old_width * ratio)), max(1, round(old_height * ratio))
    if scaled[0] * scaled[1] > MAX_PIXELS:
        raise DataError(f"it is {old_width}x{old_height}, and would become {scaled[0]}x{scaled[1]} on the way. Cut it.")
    image = image.resize(scaled, how)
    left, top = (scaled[0] - width) / 2, (scaled[1] - height) / 2
    if pixels.resize == "crop":
        left, top = round(left), round(top)
        return image.crop((left, top, left + width, top + height))
    fill = (pixels.fill,) * min(pixels.channels, 3) + (255,) * (pixels.channels == WITH_ALPHA)
    canvas = Image.new(image.mode, pixels.size, fill if pixels.channels > 1 else pixels.fill)
    canvas.paste(image, (round(-left), round(-top)))
    return canvas
