"""Compare a FastMTP head's chains with its trees when sampling: tokens per pass, if the children of
a node are its best tokens and if they are drawn without replacement. Run by hand:

    python tests/compare_trees.py smollm2 weights/smollm2/prompts.jsonl --temperature 0.7
"""

import json

from compare_rules import mean, parser

from minispec import Sampling, load
from minispec.generate import decode

DRAFTS = {
    "chain of 3": {"k": 3},
    "tree of 8, best tokens": {"tree": 8, "draft_sampling": Sampling()},
    "tree of 8, drawn": {"tree": 8},
}


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--prompts", type=int, default=40)
    args = p.parse_args()
    model, tokenizer = load(args.model)
    lines = args.questions.read_text(encoding="utf-8").splitlines()
    per_pass = {name: [] for name in DRAFTS}
    for seed, line in enumerate(lines[:: max(1, len(lines) // args.prompts)][: args.prompts]):
        prompt = tokenizer.chat([{"role": "user", "content": json.loads(line)["turns"][0]}])
        for name, options in DRAFTS.items():
            run = decode(model, tokenizer, prompt, "fastmtp", seed=seed, ignore_eos=True,
                         temperature=args.temperature, max_new_tokens=args.tokens,
                         **options)  # fmt: skip
            per_pass[name].append(run.stats["tokens_per_pass"])
    for name, values in per_pass.items():
        print(f"{name}: {mean(values)} tokens per pass ({len(values)} prompts)")


if __name__ == "__main__":
    main()
