"""The training that `pretrain` and `distill` share: optimisers, the loop, its checkpoint, the card.

A run started again with the same --out goes on from its checkpoint exactly as if it had not
stopped: batches follow from the seed and the number of tokens seen.
"""

import argparse
import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from minispec.checkpoint import pick_device, replacing, write_text
from minispec.errors import UserError, check_writable, number

CHECKPOINT = "training.pt"  # in --out, while a training goes on and after it
Take = Callable[[int, int, int], Tensor]  # tokens seen, rows, tokens of a row -> the next batch


# ---- optimisers ----------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum (Jordan et al. 2024, kellerjordan.github.io/posts/muon), in steps as
    large as AdamW's (Liu et al. 2025, arXiv 2502.16982), so that one learning rate does for both.

    In float32: torch.optim.Muon computes in bfloat16, which many CPUs emulate. On one core of such
    a CPU a small model came to 1.44 bits per byte in two minutes, with AdamW alone to 1.59.
    """

    def __init__(self, parameters, lr: float = 1e-3, momentum: float = 0.95, decay: float = 0.1):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(mean, group["momentum"]))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(update, alpha=-0.2 * math.sqrt(max(p.shape)) * group["lr"])


def orthogonal(x: Tensor) -> Tensor:
    """About UVᵀ of x = USVᵀ: five Newton-Schulz steps with Jordan's quintic polynomial."""
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (2.0315 * a @ a - 4.7750 * a) @ x
    return x


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for embeddings, norms and biases."""
    ends = "embed_tokens.weight", "lm_head.weight"
    inner = {n: p.dim() == 2 and not n.endswith(ends) for n, p in model.named_parameters()}
    matrices = [p for n, p in model.named_parameters() if inner[n]]
    others = [p for n, p in model.named_parameters() if not inner[n]]
    return [Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up in the first tenth, of at most 100 steps; then a cosine to a fiftieth."""
    warmup = min(100, steps // 10 + 1)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


# ---- a run and its checkpoint --------------------------------------------------------------------


@dataclass
class Run:
    """What a checkpoint holds. `what` describes the run: it goes on only as it was begun."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    what: dict[str, str]
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write the checkpoint; on a full disk the one before stays."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
            "what": self.what,
            "counts": [self.step, self.tokens, self.seconds],
        }
        with replacing(path) as part:
            try:
                torch.save(state, part)
            except RuntimeError as error:  # torch's word for a full disk
                said = str(error).partition("\n")[0]
                raise OSError(f"{said}; make room, then start again: it goes on") from None

    def restore(self, state: dict, path: Path) -> None:
        """Become what `read_checkpoint` read."""
        for key, value in self.what.items():
            if state["what"].get(key) != value:
                raise UserError(f"{path} is of another training, with another {key}: give what it "
                                "was begun with, or another --out")  # fmt: skip
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.seconds = state["counts"]


def read_checkpoint(out: Path) -> dict | None:
    """What a training left in --out, if there is one. Never unpickled as code."""
    path = out / CHECKPOINT
    if not path.exists():
        return None
    try:
        state = torch.load(path, "cpu", weights_only=True)
        return {key: state[key] for key in ("model", "optimizers", "what", "counts")}
    except Exception:  # whatever reading a damaged file raises
        raise UserError(f"{path} is damaged, or of another version of this program: delete it to "
                        "begin anew, or give another --out") from None  # fmt: skip


def train(
    run: Run, objective: nn.Module, take: Take, args: argparse.Namespace,
    note: Callable[[], str] | None = None,
) -> None:  # fmt: skip
    """Steps until `args.steps`, from the checkpoint in --out if there is one; `objective` of a
    batch is the loss. Every --save-every steps, and in the end, rank 0 writes the checkpoint and
    shows `note()`. Ctrl-C lets a step end, and writes it too."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    state, rows = read_checkpoint(args.out), args.batch_tokens // args.context
    if state:
        run.restore(state, args.out / CHECKPOINT)
    if world > 1:
        objective = nn.parallel.DistributedDataParallel(objective)
    bar = tqdm(total=args.steps, initial=run.step, unit="step", disable=rank > 0)
    with bar, interruptible() as interrupts:
        while run.step < args.steps:
            start = time.perf_counter()
            batch = take(run.tokens, rows, args.context)[rank::world].to(args.device)
            rate = learning_rate(run.step, args.steps, args.lr)
            loss, stop = one_step(run.optimizers, objective(batch), rate, interrupts)
            run.step += 1
            run.tokens += rows * args.context
            run.seconds += time.perf_counter() - start
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", tok_s=f"{run.tokens / run.seconds:.0f}")
            if rank == 0 and (stop or run.step == args.steps or run.step % args.save_every == 0):
                run.save(args.out / CHECKPOINT)
                if note and not stop:
                    bar.write(f"step {run.step}: {note()}")
            if stop:
                raise KeyboardInterrupt


def one_step(
    optimizers: list[torch.optim.Optimizer], loss: Tensor, rate: float, interrupts: list
) -> tuple[float, bool]:
    """Descend. Returns the loss, and whether to stop now; under torchrun both are all processes'
    together, so that they stop after the same step."""
    both = torch.stack([loss.detach(), loss.new_tensor(len(interrupts))])
    if dist.is_initialized():
        dist.all_reduce(both)
        both /= dist.get_world_size()
    mean, stop = both.tolist()
    if not math.isfinite(mean):
        raise UserError(f"the loss is {mean}: lower --lr")
    loss.backward()
    groups = [group for each in optimizers for group in each.param_groups]
    nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 1.0)
    for group in groups:
        group["lr"] = rate
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return mean, stop > 0


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Ctrl-C goes into the list, and does not end a step in the middle; a second one does."""
    interrupts: list[int] = []

    def note(number: int, frame: object) -> None:
        interrupts.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def processes(args: argparse.Namespace) -> Iterator[int]:
    """This process's rank among those that torchrun has started; on GPUs each takes its own."""
    if "RANK" not in os.environ:
        yield 0
        return
    dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    try:
        if args.device.type == "cuda":
            args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if args.batch_tokens // args.context % dist.get_world_size():
            raise UserError(f"--batch-tokens {args.batch_tokens} must hold rows of --context "
                            f"{args.context} for {dist.get_world_size()} processes")  # fmt: skip
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


# ---- the card ------------------------------------------------------------------------------------

CARD = """\
# {title}

{about}

    python -m minispec.{line}

{run.step:,} steps, {run.tokens:,} tokens, {minutes:.1f} minutes, {threads} thread(s), {device}.

{measured}
"""


def write_card(
    args: argparse.Namespace, run: Run, title: str, about: str, measured: str
) -> None:  # fmt: skip
    """The README.md beside the weights: what they are, how they were made, what they reach."""
    text = CARD.format(
        title=title, about=about, line=args.line, run=run, minutes=run.seconds / 60,
        threads=torch.get_num_threads(), device=args.device.type, measured=measured,
    )  # fmt: skip
    write_text(args.out / "README.md", text)


def markdown(corner: str, columns: list[str], rows: dict[object, list[float]]) -> str:
    """A table of rates."""
    lines = [f"| {' | '.join([corner, *columns])} |", "|---" * len(columns) + "|---|"]
    for name, rates in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{rate:.3f}" for rate in rates) + " |")
    return "\n".join(lines)


# ---- command lines -------------------------------------------------------------------------------


def training_arguments(
    p: argparse.ArgumentParser, steps: int, batch_tokens: int, context: int, least_context: int,
    lr: float = 4e-3,
) -> None:  # fmt: skip
    """The flags of every training."""
    p.add_argument("--out", type=Path, required=True, help="the directory to write")
    for name, least, value, text in (
        ("steps", 1, steps, "steps"),
        ("batch-tokens", 1, batch_tokens, "tokens of a step"),
        ("context", least_context, context, "tokens of a row"),
        ("save-every", 1, 200, "steps between checkpoints"),
        ("seed", 0, 0, "of all that is random"),
    ):
        p.add_argument(f"--{name}", type=number(least), default=value,
                       help=f"{text} (default: {value})")  # fmt: skip
    p.add_argument("--lr", type=number(1e-12, 1e3, float), default=lr, help="default: %(default)s")
    p.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32",
        help="of the matrix products (bfloat16 is ten times faster where AMX or a GPU is)",
    )  # fmt: skip
    p.add_argument("--device", default="auto")


def size_arguments(p: argparse.ArgumentParser, **sizes: int) -> None:
    """The sizes of a new model, and what it begins with."""
    p.add_argument("--init", help="begin with the weights of this checkpoint, of the same sizes")
    for name, size in {**sizes, "kv-heads": 1}.items():
        most = 1000 if name == "layers" else 2**16
        p.add_argument(f"--{name}", type=number(1, most), default=size, help="default: %(default)s")


def prepare(args: argparse.Namespace, line: list[str]) -> None:
    """Complain of what does not go together, and of an --out that cannot be written; dtype and
    device become torch's. `args.line` is the command line without this machine's folders. A
    training that goes on needs no --init any more."""
    if args.batch_tokens < args.context:
        raise UserError(
            f"--batch-tokens {args.batch_tokens} must hold a row of --context {args.context}"
        )
    if "width" in args and (
        args.width % args.heads or args.heads % args.kv_heads or args.width // args.heads % 2
    ):
        raise UserError(
            f"--width {args.width} must be an even multiple of --heads {args.heads}, "
            f"and those a multiple of --kv-heads {args.kv_heads}"
        )
    args.dtype, args.device = getattr(torch, args.dtype), pick_device(args.device)
    args.line = " ".join(Path(word).name if Path(word).is_absolute() else word for word in line)
    check_writable(args.out / CHECKPOINT, "--out")
    if (args.out / CHECKPOINT).exists():
        args.init = None
