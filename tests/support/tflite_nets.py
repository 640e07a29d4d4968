"""Small nets for the conversion to TFLite, as SavedModels with samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

CLASSES = 10
CALIBRATION_SAMPLES, EVALUATION_SAMPLES, TRAINING_SAMPLES = 100, 200, 2000


@dataclass(frozen=True)
class ConvertedNet:
    """A model, its calibration data, and other samples by input name."""

    path: Path
    data: str
    samples: dict[str, Array]
    signatures: tuple[str, ...] = ("serving_default",)


def export_trained(
    model: Any, draw: Callable[[int], tuple[Array, Array]], folder: Path, *, epochs: int = 3
) -> ConvertedNet:
    """Fit a Keras classifier to `draw` and export it with its samples."""
    import tensorflow as tf

    model.compile(tf.keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy")
    model.fit(*draw(TRAINING_SAMPLES), batch_size=50, epochs=epochs, verbose=0)
    model.export(str(folder / "net"), verbose=False)
    (name,) = tf.saved_model.load(str(folder / "net")).signatures["serving_default"].structured_input_signature[1]
    np.savez(folder / "calib.npz", **{name: draw(CALIBRATION_SAMPLES)[0]})
    return ConvertedNet(folder / "net", str(folder / "calib.npz"), {name: draw(EVALUATION_SAMPLES)[0]})


def noisy_prototypes(seed: int, shape: tuple[int, ...]) -> Callable[[int], tuple[Array, Array]]:
    """Return a function that draws samples of classes with smooth prototypes, and their labels."""
    dice = np.random.default_rng(seed)
    prototypes = dice.normal(size=(CLASSES, *shape))

    def draw(count: int) -> tuple[Array, Array]:
        labels = dice.integers(CLASSES, size=count)
        return (prototypes[labels] + dice.normal(scale=0.8, size=(count, *shape))).astype(np.float32), labels

    return draw


def kws(_samples: Path, shared: Path, _folder: Path) -> ConvertedNet:
    """Keyword spotting, a SavedModel that TensorFlow's converter cannot load."""
    return ConvertedNet(
        shared / "kws/saved_model",
        str(shared / "kws/calib.npz"),
        {"input_1": np.load(shared / "kws/eval.npz")["input_1"]},
    )


def digits_cnn(samples: Path, _shared: Path, _folder: Path) -> ConvertedNet:
    """The sample CNN."""
    images = np.load(samples / "digits_cnn_eval.npz")["image"]
    return ConvertedNet(samples / "digits_cnn_saved_model", str(samples / "digits_cnn_calib.npz"), {"image": images})


def digits_rnn(samples: Path, _shared: Path, _folder: Path) -> ConvertedNet:
    """The sample RNN."""
    data = np.load(samples / "digits_rnn_eval.npz")
    return ConvertedNet(
        samples / "digits_rnn_saved_model",
        str(samples / "digits_rnn_calib.npz"),
        {name: values for name, values in data.items() if not name.startswith("label")},
    )


def resnet(_samples: Path, _shared: Path, folder: Path) -> ConvertedNet:
    """Residual blocks with BatchNorms and projections, logits as output."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(11)
    layers = tf.keras.layers

    def block(x: Any, width: int, stride: int) -> Any:
        y = layers.Conv2D(width, 3, strides=stride, padding="same", use_bias=False)(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", use_bias=False)(y))
        if stride > 1 or x.shape[-1] != width:
            x = layers.BatchNormalization()(layers.Conv2D(width, 1, strides=stride, use_bias=False)(x))
        return layers.ReLU()(layers.Add()([x, y]))

    x = tf.keras.Input((16, 16, 3), name="image")
    y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same", use_bias=False)(x)))
    y = layers.MaxPooling2D()(y)
    for width, stride in ((8, 1), (16, 2), (16, 1), (24, 2)):
        y = block(y, width, stride)
    y = layers.Dense(CLASSES, activation="softmax")(layers.GlobalAveragePooling2D()(y))
    return export_trained(tf.keras.Model(x, y), noisy_prototypes(11, (16, 16, 3)), folder)


def mobilenet(_samples: Path, _shared: Path, folder: Path) -> ConvertedNet:
    """MobileNetV2 of Keras with random initial weights, at its smallest width."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(12)
    model = tf.keras.applications.MobileNetV2((32, 32, 3), alpha=0.35, weights=None, classes=CLASSES)
    return export_trained(model, noisy_prototypes(12, (32, 32, 3)), folder)


def swish_net(_samples: Path, _shared: Path, folder: Path) -> ConvertedNet:
    """Convolutions with swish."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(13)
    layers = tf.keras.layers
    x = y = tf.keras.Input((16, 16, 3), name="image")
    for width, stride in ((12, 1), (16, 2), (24, 2)):
        y = layers.Conv2D(width, 3, strides=stride, padding="same")(y)
        y = layers.Activation("swish")(layers.BatchNormalization()(y))
    y = layers.Dense(32, activation="swish")(layers.Flatten()(y))
    y = layers.Dense(CLASSES, activation="softmax")(y)
    return export_trained(tf.keras.Model(x, y), noisy_prototypes(13, (16, 16, 3)), folder)


def lstm(_samples: Path, _shared: Path, folder: Path) -> ConvertedNet:
    """An LSTM of Keras behind a dense layer. Its batch size is free, which TFLite refuses."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(14)
    layers = tf.keras.layers
    x = tf.keras.Input((12, 8), name="frames")
    y = layers.LSTM(24)(layers.Dense(16, activation="relu")(x))
    y = layers.Dense(CLASSES, activation="softmax")(y)
    return export_trained(tf.keras.Model(x, y), noisy_prototypes(14, (12, 8)), folder, epochs=5)


def two_signatures(_samples: Path, _shared: Path, folder: Path) -> ConvertedNet:
    """A trunk with two signatures: the class probabilities, and the features of the same image."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(15)
    layers = tf.keras.layers
    x = tf.keras.Input((16, 16, 3), name="image")
    y = layers.Conv2D(12, 3, strides=2, padding="same", activation="relu")(x)
    y = layers.Conv2D(16, 3, strides=2, padding="same", activation="relu")(y)
    features = layers.Dense(24, activation="relu", name="features")(layers.Flatten()(y))
    model = tf.keras.Model(x, layers.Dense(CLASSES, activation="softmax")(features))
    draw = noisy_prototypes(15, (16, 16, 3))
    model.compile(tf.keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy")
    model.fit(*draw(TRAINING_SAMPLES), batch_size=50, epochs=3, verbose=0)
    embedding = tf.keras.Model(x, features)
    spec = tf.TensorSpec((None, 16, 16, 3), tf.float32, name="image")
    module = tf.Module()
    module.model = model
    serve = tf.function(lambda image: {"probabilities": model(image, training=False)}, input_signature=[spec])
    embed = tf.function(lambda image: {"features": embedding(image, training=False)}, input_signature=[spec])
    tf.saved_model.save(module, str(folder / "net"), signatures={"serving_default": serve, "embed": embed})
    np.savez(folder / "calib.npz", image=draw(CALIBRATION_SAMPLES)[0])
    images = draw(EVALUATION_SAMPLES)[0]
    return ConvertedNet(folder / "net", str(folder / "calib.npz"), {"image": images}, ("serving_default", "embed"))


def unet(_samples: Path, _shared: Path, folder: Path) -> ConvertedNet:
    """A U-Net with a transposed convolution, whose weight has its channels on an inner axis."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(21)
    layers = tf.keras.layers

    def block(x: Any, width: int) -> Any:
        return layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", use_bias=False)(x)))

    x = tf.keras.Input((16, 16, 3), name="image")
    outer = block(x, 8)
    inner = block(layers.MaxPooling2D()(outer), 16)
    y = layers.Conv2DTranspose(16, 2, strides=2, padding="same")(block(layers.MaxPooling2D()(inner), 24))
    y = layers.UpSampling2D()(block(layers.Concatenate()([y, inner]), 16))
    y = layers.Conv2D(CLASSES, 1, activation="sigmoid")(block(layers.Concatenate()([y, outer]), 8))
    y = layers.Dense(CLASSES, activation="softmax")(layers.GlobalMaxPooling2D()(y))
    return export_trained(tf.keras.Model(x, y), noisy_prototypes(21, (16, 16, 3)), folder)


NETS = (kws, digits_cnn, digits_rnn, resnet, mobilenet, swish_net, lstm, two_signatures, unet)
