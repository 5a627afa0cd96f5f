"""vLLM 0.32.0's methods that need heads, and suffix decoding, as black boxes for the certifier. The
heads are random: new Medusa heads repeat the last token's logits."""

import json
import os
from pathlib import Path

import torch
from batches import batching
from vllm_engine import K, engine

from minispec.certify.toys import random_eagle3_head
from minispec.checkpoints.eagle3 import save_eagle3
from minispec.checkpoints.load import load
from minispec.distill.export import export_medusa, export_mtp
from minispec.methods.fastmtp import MTPHead
from minispec.methods.medusa import new_heads


def in_folder(prepare, **speculation):
    """Make a decoding function that starts the engine in a new folder: prepare(checkpoint, folder)
    writes heads or a draft into it and returns changes of the target's config."""
    decode = engine(**speculation)

    def many(checkpoint: str, requests: list[dict]) -> list:
        folder = Path(checkpoint, f"for-{prepare.__name__}")
        if not folder.exists():
            folder.mkdir()
            config = json.loads(Path(checkpoint, "config.json").read_text())
            config |= prepare(checkpoint, folder)
            (folder / "config.json").write_text(json.dumps(config))
            for file in Path(checkpoint).glob("*.*"):
                if not (folder / file.name).exists():
                    os.symlink(file.resolve(), folder / file.name)
        return decode.many(str(folder), requests)

    return batching(many)


def with_heads(export, **speculation):
    """Make a decoding function that exports heads; the target's config announces an MTP head."""

    def prepare(checkpoint: str, folder: Path) -> dict:
        target, _ = load(Path(checkpoint), "float32", "cpu")
        export(target, folder / "heads")
        return {"num_nextn_predict_layers": 1}

    prepare.__name__ = export.__name__
    return in_folder(prepare, **speculation)


def random_medusa(target, folder: Path) -> None:
    folder.mkdir()
    export_medusa(new_heads(3, 1, target, shared=False), target, folder)


def random_mtp(target, folder: Path) -> None:
    folder.mkdir()
    torch.manual_seed(0)
    export_mtp(MTPHead(target.config), target, folder)


def random_eagle3(target, folder: Path) -> None:
    """A head that drafts two thirds of the tokens."""
    save_eagle3(random_eagle3_head(target, 2), folder, "target", None, torch.float32)


medusa = with_heads(random_medusa, method="medusa", model="{}/heads", **K)
mtp = with_heads(random_mtp, method="mtp", model="{}/heads", **K)
EAGLE3 = {"method": "eagle3", "model": "{}/heads", **K}
eagle3 = with_heads(random_eagle3, **EAGLE3)
suffix = engine(method="suffix", **K)
