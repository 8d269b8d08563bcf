"""Deciding what the next batch is, on plain Python values; knows nothing of tensors or devices."""
