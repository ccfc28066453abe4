"""Kernels: arrays and buffers in, arrays and buffers out; no knowledge of kvd or of an engine."""
