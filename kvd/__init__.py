"""kvd: a per-node daemon that owns KV-cache offloading for LLM engines."""

__version__ = "0.1.0"
