"""The pure core: state machines without I/O, clock, randomness or logging."""
