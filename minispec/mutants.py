"""Seeded mistakes: each was made by somebody, and each must be caught by `certify`."""
MUTANTS = []
