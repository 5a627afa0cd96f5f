"""Generate text with a target model, and train drafts and heads on it.

    python -m minispec.distill generate --model weights/target --data stories.txt --out own.jsonl
    python -m minispec.distill mtp --model weights/target --generated own.jsonl --out weights/mtp

A draft should predict the target's tokens, so the target's own output is the best training text.
Generation and training resume where they stopped when restarted.
"""

from minispec.distill.batch import sample_batch
from minispec.distill.documents import Documents, hidden_states
from minispec.distill.generated import Duplicates
from minispec.distill.medusa import HeadsLoss, labels_of
from minispec.distill.mtp import AllSteps, MTPLoss, step_accuracy, step_weights

__all__ = [
    "AllSteps", "Documents", "Duplicates", "HeadsLoss", "MTPLoss", "hidden_states", "labels_of",
    "sample_batch", "step_accuracy", "step_weights",
]  # fmt: skip
