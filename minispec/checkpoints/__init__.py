"""Read and write checkpoints of models and heads in the layouts that their ecosystems use."""
