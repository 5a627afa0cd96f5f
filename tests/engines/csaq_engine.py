"""csaq-quant 0.6.0's self-speculative decoding, as black boxes for the certifier. The target is the
model in 8 bits, so compare with `plain`, or, as the pass that verifies rounds some rows to float16,
with `plain_verifying` (--baseline). It needs transformers 4: 5.24's caches have another `crop`."""

import functools
import warnings

import torch
from csaq import CSAQConfig, CSAQInferenceEngine, quantize
from end_tokens import end_tokens, until_end
from mend import mend
from transformers import AutoModelForCausalLM, logging

warnings.simplefilter("ignore")
logging.set_verbosity_error()


class VerifyingEngine(CSAQInferenceEngine):
    """Plain decoding with the weights of the pass that verifies."""

    _ensure_draft_state = CSAQInferenceEngine._swap_to_verify


class MendedEngine(CSAQInferenceEngine):
    _generate_speculative = mend(
        CSAQInferenceEngine._generate_speculative,
        ("past_key_values: Optional[Any] = None", "past_key_values = self.prefill(generated)"),
        ("token, _ = self._sample", "token, logits = self._sample"),
        ("v_logits[:, k + 1, :]", "v_logits[:, k, :]"),
        ("F.softmax(d_logit / max(temperature, 1e-8), dim=-1)", "d_logit"),
        ("F.softmax(v_logit / max(temperature, 1e-8), dim=-1)",
         "self.distribution(v_logit, temperature, top_p, greedy)[1]"),
        ("kv_len_before + n_accepted + 1", "kv_len_before + n_accepted"),
        ("n_accepted > 0 and eos_id is not None", "n_accepted > 0"),
        ("accepted[:, -1].item() == eos_id", "torch.isin(accepted, self.ends).any()"),
    )  # fmt: skip
    distribution = mend(CSAQInferenceEngine._sample, ("torch.multinomial(probs, 1)", "None"))

    def prefill(self, tokens):
        """Return the cache of all tokens but the last."""
        if tokens.shape[1] == 1:
            return None
        self._swap_to_verify()
        past = self.model(tokens[:, :-1], use_cache=True).past_key_values
        self._swap_to_draft()
        return past


@functools.cache
def load(checkpoint: str, kind: type = CSAQInferenceEngine) -> CSAQInferenceEngine:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    vocab = model.config.vocab_size
    texts = [{"input_ids": torch.arange(8 * i, 8 * i + 8)[None] % vocab} for i in range(4)]
    config = CSAQConfig(target_bits=8, bit_options=[8])  # it cannot pack 16 bits
    model, info = quantize(model, texts, config, verbose=False)
    engine = kind(model, info["causal_map"], verbose=False)
    engine.ends = torch.tensor(end_tokens(checkpoint))  # the package does not read them
    return engine


def generate(
    speculate, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed,
    kind=CSAQInferenceEngine,
):  # fmt: skip
    if top_k > 1:
        raise NotImplementedError("top-k")
    if max_new_tokens == 0:  # transformers does not accept 0
        return []
    torch.manual_seed(seed)
    rest = {"top_k": 0, "attention_mask": torch.ones(1, len(prompt))}
    output, report = load(checkpoint, kind).generate(
        torch.tensor([prompt]), speculative=speculate, lookahead=3,
        temperature=0.0 if top_k else temperature, top_p=top_p, max_new_tokens=max_new_tokens,
        **({} if speculate else rest))  # fmt: skip
    if report.error_log:
        raise RuntimeError(report.error_log)
    tokens = output[0, len(prompt) :].tolist()
    if kind is MendedEngine:
        tokens = until_end(checkpoint, tokens)
    return (tokens, report.draft_calls, report.tokens_accepted) if speculate else tokens


plain, speculative = functools.partial(generate, False), functools.partial(generate, True)
plain_verifying = functools.partial(plain, kind=VerifyingEngine)
speculative_fixed = functools.partial(speculative, kind=MendedEngine)
