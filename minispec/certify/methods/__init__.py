"""Checks of the methods in this package."""
