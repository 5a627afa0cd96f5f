"""Checkpoints of models and heads, read and written in the layouts that their ecosystems use."""
