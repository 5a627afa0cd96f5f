"""Proofs about the methods of this package, and mutants that each proof must catch."""
