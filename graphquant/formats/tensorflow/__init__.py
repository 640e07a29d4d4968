"""The TensorFlow door: reads, rewrites and writes GraphDef, MetaGraphDef and SavedModel without importing tensorflow.

Only running a model imports it, inside the functions of `run`.
"""
