"""Read and run frozen TensorFlow graphs. TensorFlow is imported by the caller's first call."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


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
