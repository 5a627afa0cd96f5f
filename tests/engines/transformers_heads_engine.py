"""transformers 5.24's drafts from the target's hidden states, as black boxes for the certifier.

The drafts have random weights, which is enough to check losslessness. `gemma4` has a random target
too, so compare it with its own plain decoding: `--baseline FILE:gemma4_plain`."""

import functools
import json
from pathlib import Path

import torch
from end_tokens import end_tokens
from mend import fixed
from transformers import (
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)
from transformers.modeling_layers import MtpModel
from transformers_engine import PRECISION, generate


@functools.cache
def read(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=PRECISION)
    model.config.num_mtp_layers = 2
    return model


def with_dflash(checkpoint, sampled):
    """A block-parallel draft: three tokens from one pass over mask tokens."""
    return {"assistant_model": dflash_draft(checkpoint), "speculation_type": "dflash"}


@functools.cache
def dflash_draft(checkpoint):
    torch.manual_seed(0)
    config = MuseGlimmerAssistantConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, block_size=4,
        mask_token_id=0, target_layer_ids=[0, 1], initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})  # fmt: skip
    return MuseGlimmerAssistantModel(config).to(PRECISION).eval()


def with_mtp(checkpoint, sampled):
    """Two MTP layers, loaded by a function that makes random ones: llama has no checkpoints of
    them."""
    MtpModel.from_pretrained = lambda model, **_: mtp_layers(checkpoint)
    return {"use_mtp": True}


@functools.cache
def mtp_layers(checkpoint):
    torch.manual_seed(0)
    return MtpModel(read(checkpoint), 2).to(PRECISION).eval()


@functools.cache
def gemma4_models(checkpoint):
    """A random Gemma 4 and its assistant, with the vocabulary of the checkpoint."""
    torch.manual_seed(0)
    vocab = json.loads(Path(checkpoint, "config.json").read_text())["vocab_size"]
    shape = dict(
        vocab_size=vocab, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, global_head_dim=32,
        sliding_window=64, layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.1, tie_word_embeddings=False, hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0, eos_token_id=None, bos_token_id=None,
        pad_token_id=None)  # fmt: skip
    target = Gemma4ForCausalLM(Gemma4TextConfig(**shape)).to(PRECISION).eval()
    target.generation_config.eos_token_id = end_tokens(checkpoint) or None
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**shape), backbone_hidden_size=64)  # fmt: skip
    draft = Gemma4AssistantForCausalLM(config).to(PRECISION).eval()
    draft.generation_config.num_assistant_tokens = 2
    return target, draft


dflash = functools.partial(generate, read, with_dflash)
mtp = functools.partial(generate, read, with_mtp)
CANDIDATES, LAYERS = "transformers.generation.candidate_generator", "self.num_mtp_layers"
ROWS = f"min({LAYERS}, self.full_seq_last_hidden_states.shape[1] - num_last_main_model_tokens)"
mtp_fixed = fixed(  # it computes as many rows of the MTP layers again as there are
    mtp, (f"{CANDIDATES}.MTPCandidateGenerator.get_candidates",
          (f"-{LAYERS}", f"-{ROWS}"), (f"- {LAYERS} :", f"- {ROWS} :")),
)  # fmt: skip
gemma4_plain = functools.partial(generate, lambda c: gemma4_models(c)[0], lambda c, _: {})
gemma4 = functools.partial(
    generate, lambda c: gemma4_models(c)[0], lambda c, _: {"assistant_model": gemma4_models(c)[1]}
)
gemma4_fixed = fixed(  # its drafts are the best tokens, so they have no distribution
    gemma4, (f"{CANDIDATES}.SinglePositionMultiTokenCandidateGenerator.get_candidates",
             ("return candidate_ids, candidate_logits", "return candidate_ids, None")),
)  # fmt: skip
