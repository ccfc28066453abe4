"""Exhaustive exploration of one slot against an oracle that knows only the rules."""
