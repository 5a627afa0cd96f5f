"""The decoding methods, one per file (Jacobi decoding is in lookahead.py), and what they share:
vocabulary chooses the tokens that heads draft from, adaptive how much to draft. The methods import
only the core (model, cache, sampling, tree, verify), errors and vocabulary. Only hybrid imports
other methods, because it combines them. They read no files, handle no text and measure no time.
"""
