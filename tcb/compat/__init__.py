"""Doors of transformers' shape: methods in place, paged `generate`, what monitors read."""
