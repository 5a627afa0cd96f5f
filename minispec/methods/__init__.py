"""The decoding methods, one per file (Jacobi decoding is in lookahead.py), and what they share:
vocabulary chooses the tokens that heads draft from, adaptive how much to draft. The methods import
only the core (model, cache, sampling, tree, verify), errors and vocabulary. Only hybrid and eagle3
import other methods, on which they build. They read no files, handle no text and measure no time.
"""
