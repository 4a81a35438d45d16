"""Text from a model: a static cache of keys and values, sampling, int8 weights."""
