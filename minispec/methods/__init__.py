"""The decoding methods, one paper per file. They import only the core (model, cache, sampling,
tree, verify), errors, and vocabulary, which chooses the tokens that heads draft from. Only hybrid
imports other methods, because it combines them. They read no files, handle no text and measure no
time.
"""
