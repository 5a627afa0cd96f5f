"""eagle-llm 1.2.1 (EAGLE) with random draft layers, as black boxes for the certifier."""

import functools
import json
import random
import tempfile
from pathlib import Path

import torch
from eagle.model import cnets, ea_model, utils, utils_c
from eagle.model.configs import EConfig
from eagle.model.ea_model import EaModel
from mend import mend


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
    end = model.base_model.generation_config.eos_token_id
    end = end if isinstance(end, list) else [end]
    stop = next((i + 1 for i, token in enumerate(tokens) if token in end), len(tokens))
    return tokens[: min(stop, max_new_tokens)]


@functools.cache
def mend_last():
    """The token after accepted drafts needs the temperature, top-k and top-p, too."""
    processed = "logits_processor(None, gt_logits[None])[0]"
    drawn = tuple(f"sample_p = torch.softmax({x}, dim=0)" for x in ("gt_logits", processed))
    ea_model.evaluate_posterior = mend(utils.evaluate_posterior, drawn)


def generate_fixed(branches, checkpoint, prompt, **request):
    mend_last()
    return generate(branches, checkpoint, prompt, room=8, **request)


CHAIN, TREE = [[0], [0, 0]], [[0], [1], [0, 0], [0, 1], [1, 0]]
chain, chain_fixed = (functools.partial(f, CHAIN) for f in (generate, generate_fixed))
tree, tree_fixed = (functools.partial(f, TREE) for f in (generate, generate_fixed))
