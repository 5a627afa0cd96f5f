"""One paper a file. A method stands on the machine (model, cache, sampling, tree, verify) and on
errors.UserError alone, and those with heads on vocabulary, the words that they draft from: it knows
no files, no text and no clock.
"""
