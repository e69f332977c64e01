"""Checks: what is known to go wrong with a start, found before anything is loaded."""
