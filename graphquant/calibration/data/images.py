"""Calibration data in image files, and the conversion of an image to model inputs: size, layout, mean and scale."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphquant.calibration.data.files import (
    DATA_EXTRA_INSTALL,
    FILE_READ_ERRORS,
    DataFile,
    error_reason,
    wrap_read_errors,
)
from graphquant.calibration.data.fit import dataset_of_files, dtype_kind, numpy_dtype, sole_input
from graphquant.errors import DataError, MissingDependencyError, did_you_mean
from graphquant.utils.text import format_shape

if TYPE_CHECKING:
    from graphquant.calibration.data.dataset import DataRequest, Dataset
    from graphquant.formats import InputSpec
    from graphquant.numerics import Array

_IMAGENET_STATISTICS = {"scale": "1/255", "mean": "0.485:0.456:0.406", "std": "0.229:0.224:0.225"}

PIXEL_PRESETS: dict[str, dict[str, str]] = {
    # Common names: caffe, tf and torch are modes of preprocess_input of Keras; the others are models.
    "raw": {},
    "unit": {"scale": "1/255"},
    "tf": {"mean": "127.5", "std": "127.5"},
    "torch": _IMAGENET_STATISTICS,
    "caffe": {"order": "bgr", "mean": "103.939:116.779:123.68"},
    "imagenet": {**_IMAGENET_STATISTICS, "resize": "crop", "crop_pct": "0.875"},
    "clip": {
        "scale": "1/255",
        "mean": "0.48145466:0.4578275:0.40821073",
        "std": "0.26862954:0.26130258:0.27577711",
        "resize": "crop",
        "filter": "bicubic",
    },
    "yolo": {"scale": "1/255", "resize": "pad", "fill": "114"},
}
"""Sets of keys by name. A key of the spec overrides the preset."""

PIXEL_CHOICES: dict[str, tuple[str, ...]] = {
    "resize": ("stretch", "crop", "pad", "none"),
    "filter": ("bilinear", "bicubic", "nearest", "lanczos", "box"),
    "layout": ("nchw", "nhwc", "nhw", "chw", "hwc", "hw"),
    "order": ("rgb", "bgr"),
}

PILLOW_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # by number of channels

PILLOW_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow readers that may be used. The others start programs or are hardly tested."""

MAX_PIXELS = 1 << 27  # maximum number of pixels of an image, before and after resizing
MIN_CROP = 0.1


class Pixels(NamedTuple):
    """Conversion of an image to numbers: value = (pixel * scale - mean) / std, where pixel is in [0, 255].

    `layout` has one letter for each axis of the input. `size` is (width, height), or None to keep them. `resize` is
    "stretch", "crop" (cover, then cut the center), "pad" (fit inside, then `fill`) or "none". `crop_pct` is the
    fraction of the covering side that a crop keeps. `mean` and `std` have one value, or one for each channel.
    """

    layout: str
    channels: int
    dtype: str
    size: tuple[int, int] | None
    resize: str
    crop_pct: float
    filter: str
    fill: int
    order: str
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def decode(self, label: str, content: bytes) -> Array:
        """Decode an image to a feed. Raises a DataError if the content is not an image, or the image does not fit."""
        try:
            return self.to_feed(_decode_image(content, self))
        except DataError as error:
            raise DataError(f"{label}: {error}") from error

    def convert(self, label: str, pixels: Array) -> Array:
        """Resize `pixels`, uint8 (height, width) or (height, width, channels), and convert them to a feed.

        Raises a DataError if the size or the number of channels does not fit.
        """
        channels = 1 if pixels.ndim == 2 else pixels.shape[2]  # noqa: PLR2004  # height and width
        if not pixels.size or channels != self.channels:
            raise DataError(
                f"{label} has pictures of {format_shape(pixels.shape)}, but the model takes pictures with"
                f" {self.channels} channels. Convert them, or use other data."
            )
        pixels = pixels.reshape(*pixels.shape[:2], self.channels)
        if self.size is not None and (pixels.shape[1::-1] != self.size or self.crop_pct != 1):
            image_module = _import_pillow()
            image = image_module.fromarray(pixels[:, :, 0] if self.channels == 1 else pixels)
            try:
                image = _resize_image(image, self)
            except DataError as error:
                raise DataError(f"{label}: {error}") from error
            pixels = np.asarray(image).reshape(image.height, image.width, self.channels)
        return self.to_feed(pixels)

    def to_feed(self, image: Array) -> Array:
        """Convert `image`, uint8 (height, width, channels), to a feed."""
        values = image[:, :, ::-1] if self.order == "bgr" else image
        dtype = numpy_dtype(self.dtype)
        if (self.scale, self.mean, self.std) != (1.0, (0.0,), (1.0,)) or dtype_kind(dtype) == "float":
            values = (values * np.float64(self.scale) - np.array(self.mean)) / np.array(self.std)
        if dtype_kind(dtype) == "int":
            values = np.rint(values).astype(np.int64)
        elif dtype_kind(dtype) == "float":
            values = values.astype(dtype)
        letters = "nhwc" if "c" in self.layout else "nhw"
        batched = values[None] if "c" in self.layout else values[None, :, :, 0]
        if "n" not in self.layout:
            letters, batched = letters[1:], batched[0]
        return np.ascontiguousarray(batched.transpose([letters.index(letter) for letter in self.layout]))


def pixel_settings(label: str, model_input: InputSpec, keys: Mapping[str, str]) -> Pixels:
    """Return the conversion of images to `model_input`, from `keys` and, for missing keys, from its shape."""
    keys = _apply_preset(label, model_input, keys)
    for key, choices in PIXEL_CHOICES.items():
        check_choice(label, key, keys.get(key, choices[0]), choices)
    layout = keys.get("layout") or _layout_from_shape(label, model_input)
    if model_input.shape is not None and len(model_input.shape) != len(layout):
        raise DataError(
            f"{label}: layout={layout} has {len(layout)} axes, but input {model_input.name!r} takes"
            f" {format_shape(model_input.shape)}. Use the layout of the input."
        )
    axis_sizes = dict(zip(layout, model_input.shape or [None] * len(layout), strict=True))
    channels = 1 if "c" not in layout else axis_sizes["c"] or 3
    if channels not in PILLOW_MODES:
        raise DataError(
            f"{label}: images have 1, 3 or 4 channels, but input {model_input.name!r} takes {channels}."
            " Set layout= if the layout differs, or use an .npz file."
        )
    settings = Pixels(
        layout=layout,
        channels=channels,
        dtype=model_input.dtype,
        size=_target_size(label, model_input, keys, axis_sizes),
        resize=keys.get("resize", "stretch"),
        crop_pct=parse_number(label, "crop_pct", keys.get("crop_pct", "1")),
        filter=keys.get("filter", "bilinear"),
        fill=min(_parse_whole_number(label, "fill", keys.get("fill", "0"), minimum=0), 255),
        order=keys.get("order", "rgb"),
        scale=parse_number(label, "scale", keys.get("scale", "1")),
        mean=_parse_channel_values(label, "mean", keys.get("mean", "0"), channels),
        std=_parse_channel_values(label, "std", keys.get("std", "1"), channels),
    )
    _check_pixel_settings(label, model_input, settings, keys)
    return settings


def check_choice(label: str, key: str, value: str, choices: Collection[str]) -> None:
    """Raise a DataError if `value` is not one of `choices`."""
    if value not in choices:
        suggestion = did_you_mean(value, choices)
        raise DataError(f"{label}: {key}={value} is unknown. Use one of {', '.join(choices)}.{suggestion}")


def parse_number(label: str, key: str, text: str) -> float:
    """Parse a number such as "0.5" or "1/255". Raises a DataError if `text` is not a finite number."""
    numerator, _, denominator = text.partition("/")
    try:
        value = float(numerator) / float(denominator or "1")
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{label}: {key}={text} is not a number. Write it as 0.5 or 1/255.")
    return value


def _apply_preset(label: str, model_input: InputSpec, keys: Mapping[str, str]) -> dict[str, str]:
    check_choice(label, "preset", keys.get("preset", "raw"), PIXEL_PRESETS)
    if not keys.keys() & {"preset", "scale", "mean", "std"} and dtype_kind(numpy_dtype(model_input.dtype)) == "float":
        spec = ",".join([label, *(f"{key}={value}" for key, value in keys.items())])
        raise DataError(
            f"{label}: input {model_input.name!r} takes {model_input.dtype}, and the conversion of pixels is not"
            f" defined. Define it as in training: {spec},preset=imagenet (or {', '.join(PIXEL_PRESETS)}), or"
            f" {spec},mean=127,std=128."
        )
    if dtype_kind(numpy_dtype(model_input.dtype)) not in {"int", "float"}:
        raise DataError(
            f"{label}: input {model_input.name!r} takes {model_input.dtype}, which is not numeric. Use an .npz file."
        )
    return {**PIXEL_PRESETS[keys.get("preset", "raw")], **{key: text for key, text in keys.items() if key != "preset"}}


def _layout_from_shape(label: str, model_input: InputSpec) -> str:
    """Return the layout of the input if its shape determines exactly one."""
    shape = model_input.shape
    if shape is not None and len(shape) == 2:  # noqa: PLR2004  # height and width
        return "hw"
    if shape is not None and len(shape) in {3, 4}:
        channels_last = shape[-1] in PILLOW_MODES
        channels_first = shape[-3] in PILLOW_MODES
        layouts = {4: ("nchw", "nhwc", ""), 3: ("chw", "hwc", "nhw")}[len(shape)]
        if channels_first != channels_last:
            return layouts[0] if channels_first else layouts[1]
        if not channels_first and shape[0] is None and None not in shape[1:] and layouts[2]:
            return layouts[2]
    accepted = "any shape" if shape is None else format_shape(shape)
    raise DataError(
        f"{label}: input {model_input.name!r} takes {accepted}, which matches several layouts. Add layout=nchw or nhwc."
    )


def _target_size(
    label: str, model_input: InputSpec, keys: Mapping[str, str], axis_sizes: Mapping[str, int | None]
) -> tuple[int, int] | None:
    """Return width and height, from the keys or from the shape of the input."""
    input_size, accepted = (axis_sizes["w"], axis_sizes["h"]), format_shape(model_input.shape or ())
    if "size" in keys:
        width_text, _, height_text = keys["size"].partition("x")
        width, height = (_parse_whole_number(label, "size", word) for word in (width_text, height_text or width_text))
        for requested, input_extent in zip((width, height), input_size, strict=True):
            if input_extent not in {None, requested}:
                raise DataError(
                    f"{label}: size={keys['size']} is {width} wide and {height} high, but input {model_input.name!r}"
                    f" takes {accepted}, {input_size[0] or '?'} wide and {input_size[1] or '?'} high. Remove size."
                )
    elif input_size[0] is not None and input_size[1] is not None:
        width, height = input_size[0], input_size[1]
    elif keys.get("resize") == "none":
        return None
    else:
        raise DataError(
            f"{label}: input {model_input.name!r} takes {accepted}, which leaves the size open."
            " Add size=WIDTHxHEIGHT, or resize=none to keep the size of the images."
        )
    if width * height > MAX_PIXELS:
        raise DataError(f"{label}: {width}x{height} is too large. Use a size of at most {MAX_PIXELS} pixels.")
    return width, height


def _check_pixel_settings(label: str, model_input: InputSpec, settings: Pixels, keys: Mapping[str, str]) -> None:
    """Reject settings that are certainly a mistake."""
    if 0.0 in settings.std:
        raise DataError(f"{label}: std={keys['std']} divides by zero. Use the value from training.")
    if dtype_kind(numpy_dtype(model_input.dtype)) == "int" and (settings.scale != 1 or settings.std != (1.0,)):
        raise DataError(
            f"{label}: input {model_input.name!r} takes {model_input.dtype}, so pixels stay integers. Remove preset,"
            " scale and std; mean=128 shifts pixels to -128 to 127."
        )
    if settings.scale == 1 and max(settings.std) < 1 and max(settings.mean) <= 1 and "std" in keys:
        raise DataError(
            f"{label}: mean={keys.get('mean', '0')} and std={keys['std']} are for pixels from 0 to 1, but these are 0"
            " to 255. Add scale=1/255."
        )
    if settings.order == "bgr" and settings.channels != 3:  # noqa: PLR2004  # red, green, blue
        raise DataError(
            f"{label}: order=bgr needs 3 channels, and input {model_input.name!r} takes {settings.channels}."
        )
    if "crop_pct" in keys and (settings.resize != "crop" or not MIN_CROP <= settings.crop_pct <= 1):
        raise DataError(
            f"{label}: crop_pct={keys['crop_pct']} is the fraction that resize=crop keeps, {MIN_CROP} to 1."
            " Remove it, or add resize=crop."
        )


def _parse_whole_number(label: str, key: str, text: str, *, minimum: int = 1) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text) >= minimum):  # noqa: PLR2004  # a million
        raise DataError(
            f"{label}: {key}={text} is not an integer of at least {minimum}. Write size as 320x240, other keys as 256."
        )
    return int(text)


def _parse_channel_values(label: str, key: str, text: str, channels: int) -> tuple[float, ...]:
    values = tuple(parse_number(label, key, word) for word in text.split(":"))
    if len(values) not in {1, channels}:
        raise DataError(
            f"{label}: {key}={text} has {len(values)} numbers for {channels} channels. Use one, or one per channel."
        )
    return values


def _import_pillow() -> Any:
    """Return the module of images."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError(f"Images need the package pillow. Install it: {DATA_EXTRA_INSTALL}") from error
    return Image


def _decode_image(content: bytes, settings: Pixels) -> Array:
    """Decode and resize an image to uint8 (height, width, channels)."""
    image_module = _import_pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata; large images are rejected by size
            image = image_module.open(BytesIO(content), formats=PILLOW_FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"it has {image.width}x{image.height} pixels. Make it smaller.")
            if image.mode.startswith(("I", "F")):
                raise DataError(f"it has more than 8 bits per channel ({image.mode}). Save it as an .npy file.")
            image = _resize_image(image.convert(PILLOW_MODES[settings.channels]), settings)
    except image_module.DecompressionBombError as error:
        raise DataError(f"{error}. Make it smaller.") from error
    except FILE_READ_ERRORS as error:
        raise DataError(
            f"it cannot be read as an image: {error_reason(error)}. Save it again as PNG or JPEG."
        ) from error
    return np.asarray(image).reshape(image.height, image.width, settings.channels)


def _resize_image(image: Any, settings: Pixels) -> Any:
    """Resize `image` to the size that the model takes."""
    from PIL import Image

    if settings.size is None or (image.size == settings.size and settings.crop_pct == 1):
        return image
    if settings.resize == "none":
        width, height = settings.size
        raise DataError(f"it is {image.width}x{image.height}, but {width}x{height} is required. Remove resize=none.")
    resampling = Image.Resampling[settings.filter.upper()]
    if settings.resize == "stretch":
        return image.resize(settings.size, resampling)
    (width, height), (old_width, old_height) = settings.size, image.size
    ratios = width / old_width, height / old_height
    ratio = min(ratios) if settings.resize == "pad" else max(ratios) / settings.crop_pct
    scaled = max(1, round(old_width * ratio)), max(1, round(old_height * ratio))
    if scaled[0] * scaled[1] > MAX_PIXELS:
        raise DataError(
            f"it is {old_width}x{old_height}, and would become {scaled[0]}x{scaled[1]} before cropping or padding."
            " Crop it first."
        )
    image = image.resize(scaled, resampling)
    left, top = round((scaled[0] - width) / 2), round((scaled[1] - height) / 2)
    if settings.resize == "crop":
        return image.crop((left, top, left + width, top + height))
    fill = (settings.fill, settings.fill, settings.fill, 255)[: settings.channels]  # opaque
    canvas = Image.new(image.mode, settings.size, fill if settings.channels > 1 else settings.fill)
    canvas.paste(image, (-left, -top))
    return canvas


def open_images(request: DataRequest) -> Dataset:
    """Open image files in the order of their names. The digest covers the files and the settings."""
    model_input = sole_input(request)
    settings = pixel_settings(request.source.spec, model_input, request.source.keys)

    def read_file(file: DataFile) -> Array:
        with wrap_read_errors(file):
            content = file.read()
        return settings.decode(file.name, content)

    return dataset_of_files(request, f"{settings} {model_input.name} {model_input.shape}", read_file)
