"""Training: a small target model on text files; drafts and heads on the target's own output."""
