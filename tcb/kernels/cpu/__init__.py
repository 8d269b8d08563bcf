"""The operations for CPU tensors, on torch operations, as fast as these allow."""
