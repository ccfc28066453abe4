"""kvd inside vLLM: the one part of the shim that imports vLLM, and torch with it."""
