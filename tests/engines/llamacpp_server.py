"""llama.cpp's server, from the package xllamacpp, with llama-server's flags."""

import re
import sys
import time

import xllamacpp

PARTS = "draft", "ngram_simple", "ngram_map_k4v", "ngram_map_k", "ngram_mod"
NAMES = {  # settings with other names than their flags
    "m": "model.path", "port": "port", "c": "n_ctx", "np": "n_parallel", "t": "cpuparams.n_threads",
    "fa": "flash_attn_type", "ctk": "cache_type_k", "ctv": "cache_type_v",
    "md": "speculative.draft.mparams.path", "spec_type": "speculative.types",
    "ctkd": "speculative.draft.cache_type_k", "ctvd": "speculative.draft.cache_type_v",
    "spec_draft_sampling": "speculative.draft.probabilistic",
}  # fmt: skip
VALUES = {
    "off": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    "f32": xllamacpp.ggml_type.GGML_TYPE_F32, "bf16": xllamacpp.ggml_type.GGML_TYPE_BF16,
    "probabilistic": True,
}  # fmt: skip


def setting_of(flag: str) -> str:
    """Return the name of a flag's setting, for example speculative.ngram_mod.n_min."""
    name = flag.lstrip("-").replace("-", "_")
    part = re.sub(rf"spec_({'|'.join(PARTS)})_", r"speculative.\1.", name)
    return NAMES.get(name, part)


def value_of(text: str):
    types = xllamacpp.common_speculative_type
    names = [f"COMMON_SPECULATIVE_TYPE_{x.upper().replace('-', '_')}" for x in text.split(",")]
    if hasattr(types, names[0]):
        return [getattr(types, name) for name in names]
    return VALUES.get(text, int(text) if text.isdigit() else text)


def start(flags: list[str]) -> xllamacpp.Server:
    """Start a server, which runs until it is deleted. Flags and their values alternate."""
    params = xllamacpp.CommonParams()
    params.ui, params.verbosity = False, 1
    for flag, text in zip(flags[::2], flags[1::2], strict=True):
        *path, name = setting_of(flag).split(".")
        place = params
        for part in path:
            place = getattr(place, part)
        if not hasattr(place, name):
            raise ValueError(f"{flag} is not known")
        setattr(place, name, value_of(text))
    return xllamacpp.Server(params)


if __name__ == "__main__":
    server = start(sys.argv[1:])
    while True:
        time.sleep(3600)
