"""Command lines: the daemon `kvd` and its control tool `kvctl`."""
