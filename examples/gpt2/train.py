"""Trains a GPT-2, sharded over the ranks that run this script.

    hopshard run -n 4 --emulate 2x2 examples/gpt2/train.py      # as `make demo` does
    torchrun --nproc-per-node 4 examples/gpt2/train.py
    mpirun -n 4 python examples/gpt2/train.py
    python examples/gpt2/train.py                               # one rank, the same code

What is hopshard's is in `main`: init, DistributedModel, backward, DistributedOptimizer.
Everything else is what any training script has. Next: model.py, data.py.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import hopshard as hs
import torch
from data import Batches, decode, encode, load_corpus, validation_batches
from hopshard.launch_env import detect_launch
from hopshard.report import format_bytes, write_report
from hopshard.run_log import RunLog
from model import GPT2, SHAPES, generate, num_parameters
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor


def setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """Everything that can be set; each field is an option of the command line."""

    name: str = setting("gpt2-tiny", "the run's folder under --runs")
    runs: str = setting("runs", "where the folders of runs are")
    data: str = setting("", "a text file; empty: the prose that Python itself carries")
    model: str = setting("tiny", f"shape: {', '.join(SHAPES)}")
    context: int = setting(64, "tokens that the model sees")
    dropout: float = setting(0.0, "share of activations dropped while training")

    degree: int = setting(0, "ranks that share one copy of the model; 0: 2 if they are even")
    accumulation: int = setting(2, "micro-steps per step")
    batch_size: int = setting(8, "sequences per rank and micro-step")

    steps: int = setting(640, "optimizer steps")
    max_seconds: float = setting(200.0, "ends training early on a slow machine; 0: no limit")
    learning_rate: float = setting(4e-3, "highest; a cosine leads down to a twentieth of it")
    warm_up_steps: int = setting(40, "steps in which the learning rate rises")
    weight_decay: float = setting(0.1, "of matrices; vectors have none")
    beta_2: float = setting(0.98, "of AdamW; shorter memory than usual, as runs are short")
    clip: float = setting(1.0, "largest norm of the gradient; 0: off")
    seed: int = setting(1234, "of initial values, batches and the sample")

    log_every: int = setting(5, "steps per line of metrics.jsonl")
    eval_every: int = setting(80, "steps between validations")
    eval_batches: int = setting(2, "validation batches per rank on the way")
    final_eval_batches: int = setting(12, "validation batches per rank at the end")
    sample_bytes: int = setting(240, "length of the text written at the end; 0: none")
    prompt: str = setting("The function returns ", "how that text begins")


def parse_settings(arguments: list[str] | None = None) -> Settings:
    """Settings from the command line; an illegal one ends the program with its reason."""
    parser = argparse.ArgumentParser(
        description="Trains a GPT-2, sharded.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for item in fields(Settings):
        parser.add_argument(
            "--" + item.name.replace("_", "-"),
            type=type(item.default),
            default=item.default,
            metavar=type(item.default).__name__.upper(),
            help=item.metadata["help"],
        )
    settings = Settings(**vars(parser.parse_args(arguments)))
    if settings.model not in SHAPES:
        parser.error(f"--model {settings.model} is not one of: {', '.join(SHAPES)}")
    for name in ("accumulation", "batch_size", "steps", "context", "log_every", "eval_every"):
        if getattr(settings, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if settings.data and not Path(settings.data).is_file():
        parser.error(f"--data {settings.data}: no such file")
    return settings


# ---- What every training script has ----------------------------------------------------


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not. Shapes are right while parameters are sharded."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


class Clock:
    """How much of the run is over: by steps, or by time on a machine that is too slow.

    All ranks read rank 0's watch, or one of them would stop while the others wait for it.
    The learning rate follows the same fraction, so a run cut short still ends it low.
    """

    def __init__(self, steps: int, max_seconds: float) -> None:
        self.fraction = 0.0
        self._steps = steps
        self._max_seconds = max_seconds or math.inf
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def advance(self, step: int) -> bool:
        """To be called after each step; true when it was the last. Collective: the world."""
        elapsed = torch.tensor([self.seconds / self._max_seconds if hs.rank() == 0 else 0.0])
        self.fraction = max(step / self._steps, sum_over_ranks(elapsed).item())
        return self.fraction >= 1.0

    def learning_rate_factor(self, step: int, warm_up_steps: int) -> float:
        warm_up = min(1.0, (step + 1) / max(1, warm_up_steps))
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.fraction)))
        return warm_up * (0.05 + 0.95 * cosine)


def sum_over_ranks(values: Tensor) -> Tensor:
    """In place. Collective: the world."""
    hs.current().groups.world.all_reduce(values, tag="script").wait()
    return values


def mean_over_ranks(value: float) -> float:
    return float(sum_over_ranks(torch.tensor([value], dtype=torch.float64)).item()) / hs.size()


@torch.no_grad()
def validate(model: torch.nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Mean loss over all ranks' batches, in nats per byte. Collective: the world."""
    model.eval()
    losses = [model(tokens, targets)[1].item() for tokens, targets in batches]
    model.train()
    return mean_over_ranks(sum(losses) / len(losses))


# ---- What goes into metrics.jsonl ------------------------------------------------------


LINKS = ("intra_node", "inter_node")


@dataclass(frozen=True)
class Counters:
    """Sums since the start of the run, of this rank; the difference of two is an interval."""

    time_s: float
    sent_bytes: dict[str, int]
    part_s: dict[str, float]

    @classmethod
    def read(cls, model: hs.DistributedModel) -> Counters:
        meter = hs.current().meter
        return cls(
            time_s=time.perf_counter(),
            sent_bytes={link: meter.value(f"comm/sent_{link}_bytes") for link in LINKS},
            part_s=dict(model.statistics()["seconds"]),
        )

    def per_step(self, earlier: Counters, num_steps: int) -> dict[str, Any]:
        """Means over the steps since `earlier`."""
        step_ms = 1e3 * (self.time_s - earlier.time_s) / num_steps
        split_ms = {
            part: 1e3 * (now - earlier.part_s.get(part, 0.0)) / num_steps
            for part, now in self.part_s.items()
        }
        split_ms["compute"] = max(0.0, step_ms - sum(split_ms.values()))
        return {
            "step_ms": step_ms,
            "split_ms": split_ms,
            "bytes_sent": {
                link: (now - earlier.sent_bytes[link]) // num_steps
                for link, now in self.sent_bytes.items()
            },
        }


class Display:
    """What rank 0 shows: a bar in a terminal, plain lines in a file."""

    def __init__(self, settings: Settings, enabled: bool) -> None:
        self._console = Console(quiet=not enabled, highlight=False, soft_wrap=True)
        self._steps = settings.steps
        self._bar: Progress | None = None
        if enabled and self._console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=24), TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=1.0, text="")

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def frame(self, title: str, text: str) -> None:
        self._console.rule(title)
        self.say(text)
        self._console.rule()

    def begin(self, val_loss: float) -> None:
        self.say(f"{self._of(0)} · validation {val_loss:.3f} nats per byte")

    def step(self, record: Mapping[str, Any], fraction: float) -> None:
        """Shows a record; `fraction` says how much of the run is over, by steps or by time."""
        step = self._of(record["step"])
        text = (
            f"loss {record['loss']:.3f} · {record['tokens_per_s']:,.0f} tokens/s · "
            f"{format_bytes(record['peak_bytes'])} per rank"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=fraction, text=f"{step} · {text}")
        if "val_loss" in record:
            self.say(f"{step} · validation {record['val_loss']:.3f} · {text}")
        elif self._bar is None and record["step"] % 40 == 0:
            self.say(f"{step} · {text}")

    def _of(self, step: int) -> str:
        return f"step {step:>{len(str(self._steps))}}/{self._steps}"


# ---- The run ---------------------------------------------------------------------------


def train(
    model: hs.DistributedModel,
    optimizer: hs.DistributedOptimizer,
    batches: Batches,
    val_batches: list[tuple[Tensor, Tensor]],
    clock: Clock,
    settings: Settings,
) -> Iterator[dict[str, Any]]:
    """Trains until the clock is out; yields a record every `log_every` steps. Collective."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: clock.learning_rate_factor(step, settings.warm_up_steps)
    )
    tokens_per_step = settings.batch_size * settings.context * settings.accumulation * hs.dp_size()
    model.train()
    step, is_last = 0, False
    before, last_logged, losses = Counters.read(model), 0, []
    while not is_last:
        optimizer.zero_grad()
        for _ in range(settings.accumulation):
            tokens, targets = batches.next()
            _, loss = model(tokens, targets)
            # hopshard averages over the ranks; the mean over micro-steps is the script's.
            model.backward(loss / settings.accumulation)
            losses.append(loss.item())
        if settings.clip > 0:
            optimizer.clip_grad_norm(settings.clip)
        optimizer.step()
        scheduler.step()
        step += 1
        is_last = clock.advance(step)

        is_eval = is_last or step % settings.eval_every == 0
        if not (is_eval or step == 1 or step % settings.log_every == 0):
            continue
        now = Counters.read(model)
        record: dict[str, Any] = {
            "step": step,
            "loss": mean_over_ranks(sum(losses) / len(losses)),
            "learning_rate": optimizer.param_groups[0]["lr"],
            **now.per_step(before, step - last_logged),
        }
        record["tokens_per_s"] = 1e3 * tokens_per_step / record["step_ms"]
        statistics = model.statistics()
        record["peak_bytes"] = statistics["peak_bytes"]
        record["persistent_bytes"] = statistics["persistent_bytes"] + statistics["optimizer_bytes"]
        if is_eval:
            chosen = val_batches if is_last else val_batches[: settings.eval_batches]
            record["val_loss"] = validate(model, chosen)
        yield record
        # Read again: validation is not part of a step.
        before, last_logged, losses = Counters.read(model), step, []


def write_sample(model: torch.nn.Module, settings: Settings) -> str:
    """The same text on all ranks. Collective: each forward gathers the parameters."""
    tokens = generate(
        model, encode(settings.prompt), settings.sample_bytes, context=settings.context,
        temperature=0.7, top_k=40, seed=settings.seed,
    )  # fmt: skip
    return decode(tokens[0])


def main(arguments: list[str] | None = None) -> None:
    settings = parse_settings(arguments)
    launch = detect_launch(os.environ)
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it; mpirun leaves it to us.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, launch.local_size)))

    degree = settings.degree or (2 if launch.size % 2 == 0 else 1)
    world = hs.init(sharded_data_parallel_degree=degree)
    is_main = hs.rank() == 0

    corpus = load_corpus(settings.data or None, min_bytes=settings.context + 1)
    config = SHAPES[settings.model].with_options(
        vocabulary_size=256, context=settings.context, dropout=settings.dropout
    )
    torch.manual_seed(settings.seed)
    model = hs.DistributedModel(GPT2(config), backward_passes_per_step=settings.accumulation)
    optimizer = hs.DistributedOptimizer(
        torch.optim.AdamW(
            parameter_groups(model, settings.weight_decay),
            lr=settings.learning_rate,
            betas=(0.9, settings.beta_2),
        )
    )
    torch.manual_seed(settings.seed + 1 + hs.rank())  # Each rank drops its own activations.
    batches = Batches(
        corpus.train, settings.batch_size, settings.context, settings.seed + hs.dp_rank()
    )
    val_batches = validation_batches(
        corpus.val, 4 * settings.batch_size, settings.context, settings.final_eval_batches,
        hs.dp_rank(), hs.dp_size(),
    )  # fmt: skip

    folder = Path(settings.runs) / settings.name
    facts = {
        "name": settings.name,
        "model": f"GPT-2 {settings.model}",
        "num_parameters": num_parameters(config),
        "unsharded_bytes": 16 * num_parameters(config),  # fp32: weight, gradient, two moments.
        "world_size": hs.size(),
        "ranks_per_node": world.layout.ranks_per_node,
        "degree": degree,
        "backend": str(world.groups.world.backend),
        "data": settings.data or "Python's own prose: " + corpus.describe(),
        "data_sha256": corpus.sha256,
        "started": time.strftime("%Y-%m-%d %H:%M"),
        "command": shlex.join(sys.argv),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "settings": asdict(settings),
    }
    with (
        RunLog(folder, facts, enabled=is_main) as log,
        Display(settings, enabled=is_main) as display,
    ):
        display.say(f"data   {corpus.describe()}")
        display.say(
            f"model  {facts['model']}, {facts['num_parameters']:,} parameters, "
            f"each rank keeps 1/{degree} of them"
        )
        first_val_loss = validate(model, val_batches[: settings.eval_batches])
        log.add_facts(first_val_loss=first_val_loss)
        display.begin(first_val_loss)
        clock = Clock(settings.steps, settings.max_seconds)
        record: dict[str, Any] = {}
        for record in train(model, optimizer, batches, val_batches, clock, settings):
            log.write(record)
            display.step(record, clock.fraction)
        log.add_facts(
            val_loss=record["val_loss"],
            seconds=clock.seconds,
            hidden_share=model.statistics()["hidden_share"],
        )

    if settings.sample_bytes > 0:
        sample = write_sample(model, settings)
        log.add_facts(sample=sample, prompt=settings.prompt)
        display.frame("sample", sample)
    if is_main:
        write_report(folder)
    display.say(
        f"validation loss {record['val_loss']:.3f} nats per byte, from {first_val_loss:.3f}, "
        f"after {record['step']} steps in {clock.seconds:.0f} s"
    )
    display.say(f"report: {folder / 'report.html'}")
    hs.shutdown()


if __name__ == "__main__":
    main()
