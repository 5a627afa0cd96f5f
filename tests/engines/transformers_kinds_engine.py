"""transformers' kinds of assisted generation, as black boxes for the certifier (5.24 and 4.44)."""

import functools

from mend import fixed
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers_engine import DTYPE, PRECISION, generate


@functools.cache
def read(checkpoint, **settings):
    """Load a model; `settings` are fields of its generation_config."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **{DTYPE: PRECISION})
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
    model = AutoModelForCausalLM.from_pretrained(f"{checkpoint}/draft", **{DTYPE: PRECISION})
    model.resize_token_embeddings(len(draft), mean_resizing=False)
    return {"assistant_model": model, "tokenizer": target, "assistant_tokenizer": draft}


def speculating(speculate):
    return functools.partial(generate, read, speculate)


def drafting(**settings):
    """Draft with a model that has these fields in its generation_config."""
    return speculating(lambda c, _: {"assistant_model": read(f"{c}/draft", **settings)})


def option(**options):
    return speculating(lambda checkpoint, sampled: options)


SCHEDULE, CONFIDENCE = "num_assistant_tokens_schedule", "assistant_confidence_threshold"
prompt_lookup, early_exit = option(prompt_lookup_num_tokens=3), option(assistant_early_exit=1)
constant, heuristic, transient = (
    drafting(**{SCHEDULE: schedule, CONFIDENCE: 0, "num_assistant_tokens": 2})
    for schedule in ("constant", "heuristic", "heuristic_transient")
)
confidence = drafting(**{SCHEDULE: "constant", CONFIDENCE: 0.4, "num_assistant_tokens": 4})
universal = speculating(read_other)
CANDIDATES = "transformers.generation.candidate_generator"
universal_fixed = fixed(  # the draft's logits have the order of its pruned head
    universal,
    (f"{CANDIDATES}.AssistantToTargetTranslator.get_target_logits",
     ("[..., target_logits_supported_indices] = assistant_logits",
      "[..., self._assistant_to_target_input_ids[self.assistant_overlap_token_ids]] "
      "= assistant_logits")),
)  # fmt: skip
FULL_CANDIDATE = (  # 4.44: a prompt may end with an end token
    "transformers.generation.utils.GenerationMixin._assisted_decoding",
    ("if is_done_candidate and", "if candidate_length and is_done_candidate and"),
)
constant_fixed = fixed(  # 4.44's draft is sampled, too
    constant,
    (f"{CANDIDATES}.AssistedCandidateGenerator.__init__",
     ("self.generation_config.do_sample = False", "pass"),
     ("setattr(self.generation_config, attr, None)", "pass")),
    FULL_CANDIDATE,
)  # fmt: skip


def lookup_with_end(checkpoint, sampled):
    """4.44's prompt lookup needs an end token: one that is never generated if there is none."""
    end = read(checkpoint).generation_config.eos_token_id
    return {"prompt_lookup_num_tokens": 3, "eos_token_id": -1 if end is None else end}


prompt_lookup_with_end = speculating(lookup_with_end)
prompt_lookup_with_end_fixed = fixed(  # no more drafts than tokens that are left
    prompt_lookup_with_end,
    (f"{CANDIDATES}.PromptLookupCandidateGenerator.get_candidates",
     ("input_length, self.max_length)",
      "input_length, start_idx + self.max_length - input_length - 1)")),
    FULL_CANDIDATE,
)  # fmt: skip
