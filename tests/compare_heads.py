"""Train Medusa, FastMTP and EAGLE-3 heads on the same batches of the same text.

    python tests/compare_heads.py OUT --model smollm2 --generated weights/smollm2/text/*.xz \\
        --vocabulary vocabulary.json --rows 8 --context 256 --steps 200

The heads are written to OUT/medusa, OUT/mtp and OUT/eagle3 by three commands `minispec distill …`,
which stand in their cards. Here they run in one process, because they need the same hidden states
of the target, which take most of the time; Medusa comes first, and its time includes them. Run it
again to resume. `minispec bench --heads OUT/medusa --mtp OUT/mtp --eagle3 OUT/eagle3 …` measures
the heads.
"""

import sys
from copy import copy

from minispec.distill.__main__ import main
from minispec.distill.documents import Documents
from minispec.methods.eagle3 import default_layers

FLAGS = {
    "medusa": ["--heads", "4", "--layers", "1", "--shared", "--lr", "1e-3"],
    "mtp": ["--k", "3", "--soft", "--lr", "4e-3"],
    "eagle3": ["--k", "3", "--soft", "--lr", "4e-3"],
}


def share_states() -> None:
    """Make all Documents of the same rows share their states. They are computed with those of the
    layers that EAGLE-3 reads; the other heads get the last state only."""
    from_rows, made = Documents.from_rows, {}

    def shared(rows, target, context, dtype, feature_layers=()) -> Documents:
        layers = default_layers(target.config.layers)
        key = dtype, tuple(tuple(row["prompt"] + row["tokens"]) for row in rows)
        if key not in made:
            made[key] = from_rows(rows, target, context, dtype, layers)
        documents, size = copy(made[key]), target.config.hidden_size * (1 + len(feature_layers))
        documents.states = lambda index, n: made[key].states(index, n)[..., :size]
        return documents

    Documents.from_rows = shared


def train_all(out: str, flags: list[str]) -> None:
    share_states()
    for head, its_flags in FLAGS.items():
        main([head, *flags, *its_flags, "--out", f"{out}/{head}"])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    train_all(sys.argv[1], sys.argv[2:])
