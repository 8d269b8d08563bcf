"""The operations as Triton kernels, and how they are launched and tuned."""
