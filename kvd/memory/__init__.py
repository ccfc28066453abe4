"""Host memory and the runtime directory: what the daemon owns on its node."""
