"""transformers' kinds of assisted generation, as black boxes for the certifier (5.24 and 4.44)."""

import functools

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

transformers.logging.set_verbosity_error()
DTYPE = "dtype" if transformers.__version__ >= "5" else "torch_dtype"


@functools.cache
def read(checkpoint, **settings):
    """Load a model; `settings` are fields of its generation_config."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **{DTYPE: torch.float32})
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


@functools.cache
def read_other(checkpoint, sampled):
    """Load a draft with two more tokens, and both tokenizers. The new tokens are unknown to the
    target: one is a pair of letters. Sampling removes the draft's tokens that the target lacks, so
    a draft cannot be used for greedy decoding afterwards."""
    file = f"{checkpoint}/tokenizer.json"
    target, draft = (PreTrainedTokenizerFast(tokenizer_file=file) for _ in range(2))
    draft.add_tokens(["ab", "?"])
    model = AutoModelForCausalLM.from_pretrained(f"{checkpoint}/draft", **{DTYPE: torch.float32})
    model.resize_token_embeddings(len(draft), mean_resizing=False)
    return {"assistant_model": model, "tokenizer": target, "assistant_tokenizer": draft}


def generate(speculate, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if max_new_tokens == 0:  # it does not accept 0
        return []
    options = speculate(checkpoint, temperature > 0)  # may use random numbers
    torch.manual_seed(seed)
    sampling = dict(do_sample=False)
    if temperature:
        sampling = dict(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        output = read(checkpoint).generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_new_tokens,
            pad_token_id=0, **sampling, **options,
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()


def drafting(**settings):
    """Draft with a model that has these fields in its generation_config."""
    return functools.partial(
        generate, lambda c, _: {"assistant_model": read(f"{c}/draft", **settings)}
    )


def option(**options):
    return functools.partial(generate, lambda checkpoint, sampled: options)


SCHEDULE, CONFIDENCE = "num_assistant_tokens_schedule", "assistant_confidence_threshold"
plain, prompt_lookup, early_exit = (
    option(), option(prompt_lookup_num_tokens=3), option(assistant_early_exit=1)
)  # fmt: skip
constant, heuristic, transient = (
    drafting(**{SCHEDULE: schedule, CONFIDENCE: 0, "num_assistant_tokens": 2})
    for schedule in ("constant", "heuristic", "heuristic_transient")
)
confidence = drafting(**{SCHEDULE: "constant", CONFIDENCE: 0.4, "num_assistant_tokens": 4})
universal = functools.partial(generate, read_other)
ensemble = functools.partial(  # lossy by design
    generate, lambda c, _: {"assistant_model": read(f"{c}/draft"), "assistant_ensemble_weight": 0.5}
)


def lookup_with_end(checkpoint, sampled):
    """4.44's prompt lookup needs an end token: one that is never generated if there is none."""
    end = read(checkpoint).generation_config.eos_token_id
    return {"prompt_lookup_num_tokens": 3, "eos_token_id": -1 if end is None else end}


prompt_lookup_with_end = functools.partial(generate, lookup_with_end)
