"""vLLM 0.32.0's further modes that need no heads, as black boxes for the certifier."""

import json
import os
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import models
from vllm_engine import DRAFT, K, engine
from vllm_heads_engine import EAGLE3, in_folder, random_eagle3, with_heads

from minispec.checkpoints.load import load, save
from minispec.checkpoints.tokenizer import Tokenizer

LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 3, **K}


class LastTokens:
    """A drafter of one's own: it repeats the last three tokens."""

    def __init__(self, config):
        pass

    def load_model(self, target):
        pass

    def propose(self, sampled, lengths, tokens, slot_mappings=None):
        return [tokens[i, n - 3 : n].tolist() if new and n >= 3 else []
                for i, (new, n) in enumerate(zip(sampled, lengths))]  # fmt: skip


def parallel_draft(checkpoint: str, folder: Path) -> dict:
    """A draft whose config has the token that stands for tokens that are still unknown."""
    (folder / "draft").mkdir()
    for file in Path(checkpoint, "draft").iterdir():
        os.symlink(file.resolve(), folder / "draft" / file.name)
    config = json.loads((folder / "draft" / "config.json").read_text())
    (folder / "draft" / "config.json").unlink()
    (folder / "draft" / "config.json").write_text(json.dumps(config | {"pard_token": 1}))
    return {}


def other_vocabulary(checkpoint: str, folder: Path) -> dict:
    """A draft with the tokens in reverse order, and another one in place of the target's last."""
    draft, _ = load(Path(checkpoint, "draft"), "float32", "cpu")
    for name, parameter in draft.named_parameters():
        if "embed_tokens" in name or "lm_head" in name:
            parameter.copy_(parameter.flip(0))
    letters = [chr(97 + i) for i in reversed(range(draft.config.vocab_size))]
    backend = Backend(models.BPE({x: i for i, x in enumerate(["?", *letters[1:]])}, merges=[]))
    save(draft, Tokenizer(backend), folder / "draft")
    for place, unknown in (folder / "draft", "?"), (folder, "a"):
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": unknown}
        (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return {}


BLOCK = {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}
ngram_gpu = engine(method="ngram_gpu", **LOOKUP)
own_class = engine(method="custom_class", model="vllm_modes_engine.LastTokens", **K)
draft_block = engine(**DRAFT, **BLOCK)
draft_by_batch = engine(
    **DRAFT, num_speculative_tokens_per_batch_size=[(1, 2, 3), (3, 8, 1), (9, 512, 0)]
)
draft_parallel = in_folder(parallel_draft, **DRAFT, parallel_drafting=True)
draft_other = in_folder(other_vocabulary, **DRAFT, use_heterogeneous_vocab=True)
eagle3_unpadded = with_heads(random_eagle3, **EAGLE3, disable_padded_drafter_batch=True)
