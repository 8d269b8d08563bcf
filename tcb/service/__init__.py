"""The service around an engine: requests in, outputs out, and who drives the loop."""
