"""A kvd of its own for a bench or a test."""

from engine_shim.reference.demo.processes import OwnDaemon, pause

select_pause = pause

__all__ = ["OwnDaemon", "select_pause"]
