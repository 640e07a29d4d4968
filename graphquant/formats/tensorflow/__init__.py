"""The TensorFlow door: reads, rewrites and writes GraphDef and SavedModel without importing tensorflow."""
