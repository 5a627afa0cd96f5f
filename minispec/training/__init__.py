"""Training: a small target from text; drafts and heads from the target's own text."""
