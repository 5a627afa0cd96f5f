"""One paper a file. A method stands on the machine (model, cache, sampling, tree, verify) and on
nothing else: it knows no files, no text and no clock.
"""
