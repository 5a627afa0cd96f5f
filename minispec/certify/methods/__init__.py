"""Checks of the methods in this package, and mutants that the checks must catch."""
