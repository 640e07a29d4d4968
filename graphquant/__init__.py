"""A tool that rewrites trained TensorFlow and ONNX graphs into low precision, and shows what it did."""
