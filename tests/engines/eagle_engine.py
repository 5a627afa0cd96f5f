"""eagle-llm 1.2.1 (EAGLE) with random draft layers, as black boxes for the certifier."""

import functools
import json
import random
import tempfile
from pathlib import Path

import torch
from eagle.model import cnets, utils, utils_c
from eagle.model.configs import EConfig
from eagle.model.ea_model import EaModel
from end_tokens import until_end
from mend import fixed


def set_tree(branches: list[list[int]]) -> None:
    """Choose a tree for small vocabularies: the default one needs ten tokens."""
    width = 1 + max(max(path) for path in branches)
    cnets.top_k = utils.TOPK = utils_c.TOPK = width
    cnets.mc_sim_7b_63 = branches


@functools.cache
def load(checkpoint: str, branches: str, room: int) -> EaModel:
    """Load a target with a random draft layer, which shares the target's embedding. The cache has
    `room` for more tokens than the context."""
    values = json.loads(Path(checkpoint, "config.json").read_text())
    values |= {"num_hidden_layers": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(values))
        draft = cnets.Model(EConfig.from_pretrained(folder))
        torch.save(draft.state_dict(), f"{folder}/pytorch_model.bin")
        model = EaModel.from_pretrained(
            base_model_path=checkpoint, ea_model_path=folder, torch_dtype=torch.float32
        )
    model.ea_layer.embed_tokens.weight.data = model.base_model.model.embed_tokens.weight.data
    model.base_model.config.max_position_embeddings += room
    return model.eval()


def generate(
    branches, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed, room=0
):  # fmt: skip
    """It checks the length and the tokenizer's end token after each round, so that more tokens are
    returned. They are cut off here."""
    if max_new_tokens == 0:
        return []
    set_tree(branches)
    model = load(checkpoint, str(branches), room)
    torch.manual_seed(seed)
    random.seed(seed)
    tokens = model.eagenerate(
        torch.tensor([prompt]), temperature, top_p, top_k, max_new_tokens, tree_choices=branches
    )[0, len(prompt) :].tolist()
    return until_end(checkpoint, tokens[:max_new_tokens])


CHAIN, TREE = [[0], [0, 0]], [[0], [1], [0, 0], [0, 1], [1, 0]]
chain, tree = (functools.partial(generate, branches) for branches in (CHAIN, TREE))
LAST = (  # the token after accepted drafts needs the temperature, top-k and top-p, too
    "eagle.model.ea_model.evaluate_posterior",
    ("sample_p = torch.softmax(gt_logits, dim=0)",
     "sample_p = torch.softmax(logits_processor(None, gt_logits[None])[0], dim=0)"),
)  # fmt: skip
chain_fixed, tree_fixed = (fixed(functools.partial(f, room=8), LAST) for f in (chain, tree))
