"""The decoding methods, one per file (Jacobi decoding is in lookahead.py), and what they share:
vocabulary chooses the tokens that heads draft from, adaptive how much to draft. The methods import
only the core (model, cache, sampling, tree, verify), errors and vocabulary. Only hybrid, which
combines other methods, and eagle3, whose head drafts as fastmtp's does, import others. They read no
files, handle no text and measure no time.
"""
