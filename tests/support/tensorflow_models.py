"""Write small TensorFlow models with seeded weights, and run frozen graphs. The first call imports TensorFlow."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

TEXT_SIZE, IMAGE_SIZE, CLASSES = 6, 8, 3  # sizes of the nets of `write_signature_models`


def read_graph_def(path: Path) -> Any:
    """Return the GraphDef in a `.pb` file."""
    import tensorflow as tf

    return tf.compat.v1.GraphDef.FromString(path.read_bytes())


@contextmanager
def graph_session(source: Any) -> Iterator[Any]:
    """Open a TF1 session with the graph of a GraphDef, or of the `.pb` file at a path."""
    import tensorflow as tf

    v1 = tf.compat.v1
    message = read_graph_def(source) if hasattr(source, "read_bytes") else source
    with v1.Graph().as_default() as graph:
        v1.import_graph_def(message, name="")
        with v1.Session(graph=graph) as session:
            yield session


def run_graph(source: Any, fetches: str | Sequence[str], feeds: Mapping[str, Any]) -> Any:
    """Return the values of `fetches` in the graph of a GraphDef, or of the `.pb` file at a path."""
    with graph_session(source) as session:
        return session.run(fetches, dict(feeds))


def write_signature_models(folder: Path) -> None:
    """Write SavedModels with several signatures, or with sparse and ragged inputs.

    `shared` has two signatures that take the same `x`, `towers` has two that take other inputs under one key, and
    `sparse` and `flattened` take a sparse tensor, which TensorFlow 1 and 2 save in different ways. `ragged` takes a
    ragged tensor as TensorFlow 2 saves it.
    """
    import tensorflow as tf

    random = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        return tf.Variable(random.normal(0, 0.4, shape).astype(np.float32))

    class Net(tf.Module):  # type: ignore[misc]  # tensorflow has no types
        def __init__(self) -> None:
            super().__init__()
            self.text, self.image, self.head = weight(TEXT_SIZE, 5), weight(IMAGE_SIZE, 5), weight(5, CLASSES)

        def embed_text(self, x: Any) -> Any:
            return {"scores": tf.matmul(tf.nn.relu(tf.matmul(x, self.text)), self.head)}

        def embed_image(self, x: Any) -> Any:
            return {"scores": tf.matmul(tf.nn.relu(tf.matmul(x, self.image)), self.head)}

        def hidden(self, x: Any) -> Any:
            return {"hidden": tf.nn.relu(tf.matmul(x, self.text))}

    def traced(method: Any, spec: Any) -> Any:
        return tf.function(method).get_concrete_function(spec)

    net = Net()
    texts, images = (tf.TensorSpec([None, size], tf.float32, "x") for size in (TEXT_SIZE, IMAGE_SIZE))
    shared = {"serving_default": traced(net.embed_text, texts), "hidden": traced(net.hidden, texts)}
    tf.saved_model.save(net, str(folder / "shared"), signatures=shared)
    towers = {"text": traced(net.embed_text, texts), "image": traced(net.embed_image, images)}
    tf.saved_model.save(net, str(folder / "towers"), signatures=towers)
    sparse = traced(lambda sp: net.embed_text(tf.sparse.to_dense(sp)), tf.SparseTensorSpec([None, TEXT_SIZE]))
    tf.saved_model.save(net, str(folder / "flattened"), signatures={"serving_default": sparse})
    spec = tf.RaggedTensorSpec([None, None], tf.float32, ragged_rank=1)
    ragged_rows = traced(lambda rows: net.embed_text(rows.to_tensor(shape=[None, TEXT_SIZE])), spec)
    tf.saved_model.save(net, str(folder / "ragged"), signatures={"serving_default": ragged_rows})
    v1, initial_kernel = tf.compat.v1, net.text.numpy()
    with v1.Graph().as_default(), v1.Session() as session:
        sp = v1.sparse_placeholder(tf.float32, [None, TEXT_SIZE], name="sp")
        ragged = v1.ragged.placeholder(tf.float32, 1)
        kernel = v1.get_variable("kernel", initializer=initial_kernel, use_resource=True)
        y = tf.matmul(tf.sparse.to_dense(sp), kernel)
        z = tf.matmul(ragged.to_tensor(shape=[None, TEXT_SIZE]), kernel)
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(folder / "sparse"), {"sp": sp, "rows": ragged}, {"y": y, "z": z})


def write_module_with_clones(folder: Path) -> None:
    """Write a SavedModel with separate functions for the signature, other shapes and training."""
    import tensorflow as tf

    random = np.random.default_rng(0)

    class Net(tf.Module):  # type: ignore[misc]  # TensorFlow has no types
        def __init__(self) -> None:
            super().__init__()
            self.k = tf.Variable(random.normal(0, 0.3, (3, 3, 3, 4)).astype(np.float32), name="k")
            self.w = tf.Variable(random.normal(0, 0.3, (4, 2)).astype(np.float32), name="w")

        @tf.function  # type: ignore[untyped-decorator]
        def __call__(self, x: Any, training: bool = False) -> Any:
            y = tf.nn.relu(tf.nn.conv2d(x, self.k, 1, "SAME"))
            if training:
                y = tf.nn.dropout(y, 0.1, seed=1)
            return tf.reduce_mean(y, [1, 2]) @ self.w

        @tf.function(input_signature=[tf.TensorSpec([None, 5])])  # type: ignore[untyped-decorator]
        def other(self, x: Any) -> Any:
            return x @ tf.ones([5, 2])

        @tf.function(input_signature=[tf.TensorSpec([None, 8, 8, 3])])  # type: ignore[untyped-decorator]
        def elsewhere(self, x: Any) -> Any:
            with tf.name_scope("before"):
                x = tf.nn.relu(100.0 * x)  # called as what follows the convolution is
            return tf.nn.conv2d(x, self.k, 1, "SAME")

    net = Net()
    net(tf.zeros([2, 8, 8, 3]))
    net(tf.zeros([2, 8, 8, 3]), training=True)
    serve = net.__call__.get_concrete_function(tf.TensorSpec([None, 8, 8, 3]), training=False)
    tf.saved_model.save(net, str(folder), signatures=serve)


def write_branching_module(folder: Path, *, activation: str = "relu", calls: int = 1) -> None:
    """Write a SavedModel whose functions `head` and `serve` branch on the result of the function that both call."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    weights = [tf.Variable(random.normal(0, 0.4, shape).astype(np.float32)) for shape in ((8, 8), (8, 4), (8, 4))]
    function = tf.nn.relu if activation == "relu" else tf.math.sin

    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = weights

        # One trace for all shapes: the copies of `head` call the function that the signature runs.
        @tf.function(input_signature=[tf.TensorSpec([None, 8])])
        def body(self, x):
            return function(tf.matmul(x, weights[0]))

        @tf.function
        def head(self, x):
            for _ in range(calls):
                x = self.body(x)
            return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.matmul(x, weights[1]), lambda: tf.matmul(x, weights[2]))

        @tf.function(input_signature=[tf.TensorSpec([None, 8], name="x")])
        def serve(self, x):
            return {"y": self.head(x)}

    net = Net()
    net.head.get_concrete_function(tf.TensorSpec([5, 8], tf.float32))
    tf.saved_model.save(net, str(folder), signatures=net.serve)


def write_gate(folder: Path) -> None:
    """Export a Keras 3 model with a branch in a tf.function."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1)

    class Gate(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
        def build(self, shape: Any) -> None:
            self.a = self.add_weight(shape=(shape[-1], 6), name="a")
            self.b = self.add_weight(shape=(shape[-1], 6), name="b")

        @tf.function  # type: ignore[untyped-decorator]
        def inner(self, x: Any) -> Any:
            positive = tf.reduce_mean(x) > 0.1
            return tf.cond(
                positive,
                lambda: tf.nn.relu(tf.matmul(x, self.a)),
                lambda: tf.matmul(x, self.b),
            )

        def call(self, x: Any) -> Any:
            return self.inner(x)

    x = keras.Input((8, 8, 3))
    y = keras.layers.Conv2D(4, 3, padding="same", activation="relu", name="c")(x)
    y = Gate(name="gate")(keras.layers.GlobalAveragePooling2D(name="mean")(y))
    model = keras.Model(x, keras.layers.Dense(2, name="d")(y), name="net")
    model.export(str(folder), verbose=False)


def write_tensorflow_1_net(folder: Path) -> None:
    """Write a TensorFlow 1 net into a folder, as `saved_model` and as `net.meta` with its checkpoint."""
    import tensorflow as tf

    v1, random = tf.compat.v1, np.random.default_rng(0)
    with v1.Session(graph=tf.Graph()) as session, session.graph.as_default():
        x = v1.placeholder("float32", [None, 8, 8, 3], name="image")
        kernel = random.normal(0, 0.3, (3, 3, 3, 4)).astype(np.float32)
        kernel = v1.get_variable("conv/kernel", initializer=kernel, use_resource=False)
        weight = random.normal(0, 0.3, (4, 2)).astype(np.float32)
        weight = v1.get_variable("dense/kernel", initializer=weight, use_resource=True)
        y = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME", name="conv/Conv2D"), name="relu")
        y = tf.matmul(tf.reduce_mean(y, [1, 2], name="mean"), weight, name="logits")
        session.run(v1.global_variables_initializer())
        builder = v1.saved_model.builder.SavedModelBuilder(str(folder / "saved_model"))
        signature = v1.saved_model.predict_signature_def({"image": x}, {"logits": y})
        builder.add_meta_graph_and_variables(session, ["serve"], {"serving_default": signature})
        builder.save()
        v1.train.Saver().save(session, str(folder / "net"))


def keras_network() -> Any:
    """Return a small convolutional network."""
    import keras

    keras.utils.set_random_seed(4)
    image = keras.Input((8, 8, 1), name="image")
    hidden = keras.layers.Conv2D(4, 3, activation="relu", name="conv")(image)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    hidden = keras.layers.Flatten(name="flat")(hidden)
    return keras.Model(image, keras.layers.Dense(3, name="logits")(hidden), name="net")


def write_training_graph(folder: Path) -> None:
    """Write a SavedModel with the input `x` and the output `pred` that still has its loss, label and gradients."""
    import tensorflow as tf

    v1, random = tf.compat.v1, np.random.default_rng(0)
    with v1.Graph().as_default(), v1.Session() as session:
        x, label = (v1.placeholder(tf.float32, [None, size], name=name) for name, size in (("x", 8), ("label", 3)))
        weight = v1.Variable(random.normal(0, 0.3, (8, 3)).astype(np.float32), name="W", use_resource=False)
        pred = tf.nn.relu(tf.matmul(x, weight, name="product"), name="pred")
        loss = tf.reduce_mean(tf.square(pred - label), name="loss")
        v1.train.GradientDescentOptimizer(0.3).minimize(loss, name="train")
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(folder), {"x": x}, {"pred": pred})


def half_precision_network(policy: str, path: Path) -> None:
    """Write a network whose weights are equal for each policy, except for their rounding."""
    import keras

    keras.utils.set_random_seed(1)
    stack = [
        keras.layers.Conv2D(8, 3, activation="relu", dtype=policy),
        keras.layers.Flatten(dtype=policy),
        keras.layers.Dense(4, dtype=policy),
    ]
    network = keras.Sequential([keras.Input((8, 8, 3), name="x"), *stack])
    values = np.random.default_rng(2)
    network.set_weights([values.normal(size=weight.shape) * 0.2 for weight in network.get_weights()])
    network.save(path)
