"""Maintained fakes: tiny models and stand-ins for the other processes, for tests and for trying things by hand."""
