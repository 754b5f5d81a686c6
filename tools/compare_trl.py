"""One GRPO step here and one of TRL's GRPOTrainer, side by side on this CPU.

Both train the same Llama-shaped model (quickstart's actor, 2 layers of 128) from fresh weights, on
the same prompts as token ids, with the same group size, a KL to a frozen reference, Adam, and
completions of exactly --tokens tokens each; one optimizer step a batch. A useful token is a sampled
token that was trained on. Both sides have the same number of threads, and each its own process, one
after the other; a ratio is of one run to the other side's run of the same number. Rates are by
wall-clock time and by the process's CPU time: on one thread of a busy machine the second is what an
idle one shows.

Needs beside this package: pip install trl==1.16.0 transformers datasets accelerate tokenizers

    python tools/compare_trl.py --runs 5 --threads 1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 7
VOCAB = 283  # pieces of the quickstart's tokenizer
SIDES = ("binac", "trl")


def now() -> tuple[float, float]:
    """Wall-clock and CPU seconds."""
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> tuple[float, float]:
    """Seconds of both clocks since `now()`."""
    end = now()
    return end[0] - start[0], end[1] - start[1]


class Stopwatch:
    """Wraps methods of an object and adds up the CPU time inside them, without what they call of
    each other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[float] = []

    def wrap(self, owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)
        setattr(owner, name, self.timed(inner, label))

    def timed(self, inner: Callable[..., Any], label: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._open.append(0.0)
            start = time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                spent = time.process_time() - start
                self.seconds[label] = self.seconds.get(label, 0.0) + spent - self._open.pop()
                if self._open:
                    self._open[-1] += spent

        return call


def run_binac(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step, and of its phases, of this package."""
    import torch

    torch.set_num_threads(args.threads)
    from megatron_binac.benchmark import workload
    from megatron_binac.models.parallel import start_distributed
    from megatron_binac.rollout.batch import actor_turns, sequences
    from megatron_binac.rollout.play import play

    start_distributed()
    config = workload.workload_config(
        "quickstart_grpo",
        [
            f"rollout.prompts_per_step={args.prompts}",
            f"rollout.attempts={args.group}",
            f"rollout.max_attempt_tokens={args.tokens}",
            f"actor.model.max_sequence_length={PROMPT_TOKENS + args.tokens + 16}",
            f"critic.model.max_sequence_length={PROMPT_TOKENS + args.tokens + 16}",
            *(["actor.share_prefixes=false"] if args.plain_rows else []),
        ],
    )
    with tempfile.TemporaryDirectory() as folder:
        load = workload.build("quickstart_grpo", config, Path(folder))
    load.players.actor.lengths = {"attempt": [args.tokens]}  # type: ignore[attr-defined]
    learner = load.learners["actor"]
    asked: list[list[int]] = []
    watch = Stopwatch()
    grow = watch.timed(play, "sample and grade")
    credit = watch.timed(actor_turns, "credit and packing")
    pack = watch.timed(sequences, "credit and packing")
    update = watch.timed(learner.update, "reference, forward, backward, Adam")
    steps: list[tuple[float, float]] = []
    for step in range(args.warmup + args.steps):
        if step == args.warmup:
            watch.seconds.clear()
            steps.clear()
        start = now()
        prompts = load.cursor.take(args.prompts)
        trees = grow(load.players, prompts, config.rollout, step)
        turns, _ = credit(trees, config.bilevel)
        for i, turn in enumerate(turns):
            turn.trainable, turn.advantage = True, 1.0 if i % 2 else -1.0
        update(pack(turns), config.actor.loss)
        steps.append(since(start))
        lengths = {len(turn.ids) for turn in turns}
        assert lengths == {args.tokens}, f"completions of {lengths} tokens"
        assert len(turns[0].prompt_ids) == PROMPT_TOKENS, len(turns[0].prompt_ids)
        asked += [tree.attempts[0].prompt_ids.tolist() for tree in trees]
    assert learner.vocab_size == VOCAB, learner.vocab_size
    return {"steps": steps, "seconds": watch.seconds, "prompts": asked}


def run_trl(args: argparse.Namespace) -> dict[str, Any]:
    """The same of TRL."""
    import torch

    torch.set_num_threads(args.threads)
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    words = {f"w{i}": i for i in range(VOCAB)}
    words |= {"<pad>": VOCAB, "<eos>": VOCAB + 1, "<unk>": VOCAB + 2}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    asked = json.loads(args.asked.read_text(encoding="utf-8"))
    rows = [{"prompt": " ".join(f"w{i}" for i in ids)} for ids in asked]
    watch = Stopwatch()
    steps: list[tuple[float, float]] = []

    class Timer(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if len(steps) == args.warmup:
                watch.seconds.clear()
            self.start = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.append(since(self.start))

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text) % 2) for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(words),
                hidden_size=128,
                intermediate_size=336,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=PROMPT_TOKENS + args.tokens + 16,
                tie_word_embeddings=False,
                pad_token_id=VOCAB,
                eos_token_id=VOCAB + 1,
                bos_token_id=None,
            )
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=args.prompts * args.group,
            num_generations=args.group,
            max_completion_length=args.tokens,
            generation_kwargs={"min_new_tokens": args.tokens},
            beta=1e-3,
            temperature=1.0,
            learning_rate=2e-4,
            max_steps=args.warmup + args.steps,
            save_strategy="no",
            logging_steps=1000,
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        trainer = GRPOTrainer(
            model=folder,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Timer()],
        )
        watch.wrap(trainer, "_generate", "sample")
        watch.wrap(trainer, "_calculate_rewards", "grade")
        watch.wrap(trainer, "_get_per_token_logps_and_entropies", "forward, with the reference's")
        watch.wrap(trainer.accelerator, "backward", "backward")
        watch.wrap(trainer, "_prepare_inputs", "data, padding, credit")
        watch.wrap(trainer, "compute_loss", "loss beside the forward")
        created = trainer.create_optimizer

        def create(*a: Any, **k: Any) -> Any:
            optimizer = created(*a, **k)
            watch.wrap(optimizer, "step", "Adam")
            return optimizer

        trainer.create_optimizer = create  # type: ignore[method-assign]
        counted: list[int] = []
        calculate = trainer._calculate_rewards

        def check(inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
            counted.extend(len(row) for row in ids)
            return calculate(inputs, prompts, completions, ids)

        trainer._calculate_rewards = check
        trainer.train()
        assert set(counted) == {args.tokens}, f"completions of {set(counted)} tokens"
    return {"steps": steps[args.warmup :], "seconds": watch.seconds}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Useful tokens a second of every run of both sides, and the ratio of one to the other."""
    own = ["--tokens", args.tokens, "--prompts", args.prompts, "--group", args.group]
    own += ["--threads", args.threads, "--steps", args.steps, "--warmup", args.warmup]
    own += ["--runs", args.runs, *(["--plain-rows"] if args.plain_rows else [])]
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    root = str(Path(__file__).resolve().parents[1])
    env["PYTHONPATH"] = os.pathsep.join([root, env.get("PYTHONPATH", "")])
    useful = args.tokens * args.prompts * args.group
    found: dict[str, Any] = {}
    for side in SIDES:
        runs = _run_side(side, own, env, found)
        rates = [
            [useful / statistics.median(step[clock] for step in run["steps"]) for run in runs]
            for clock in (0, 1)
        ]
        shares = []
        for run in runs:
            whole = sum(step[1] for step in run["steps"])
            shares.append({k: v / whole for k, v in run["seconds"].items()})
        labels = dict.fromkeys(label for share in shares for label in share)
        share = {k: statistics.median(one.get(k, 0.0) for one in shares) for k in labels}
        share["everything else"] = 1.0 - sum(share.values())
        found[side] = {"wall": rates[0], "cpu": rates[1], "share_of_cpu_time": share}
        if "prompts" in runs[0]:
            found[side]["prompts"] = runs[0]["prompts"]
    result: dict[str, Any] = {key: getattr(args, key) for key in ("prompts", "group", "tokens")}
    result |= {"threads": args.threads, "useful_tokens_per_second": found}
    for clock in ("wall", "cpu"):
        ratios = [
            ours / theirs
            for ours, theirs in zip(found["binac"][clock], found["trl"][clock], strict=True)
        ]
        result[f"ratio_{clock}"] = {
            "median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)
        }  # fmt: skip
    return result


def _run_side(
    side: str, own: list[Any], env: dict[str, str], found: dict[str, Any]
) -> list[dict[str, Any]]:
    """The runs of one side in a process of its own; the second is asked what the first was."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--side", side, *map(str, own)]
        if found:
            asked = Path(folder) / "asked.json"
            asked.write_text(json.dumps(found[SIDES[0]].pop("prompts")), encoding="utf-8")
            command += ["--asked", str(asked)]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=SIDES, help="one side alone, its result as JSON")
    parser.add_argument("--asked", type=Path, help="JSON with prompts as ids, for the side trl")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2)
    text = "compute every turn alone, as if none shared its prompt (share_prefixes=false)"
    parser.add_argument("--plain-rows", action="store_true", help=text)
    args = parser.parse_args()
    if args.side is None:
        print(json.dumps(compare(args), indent=2))
    else:
        run = {"binac": run_binac, "trl": run_trl}[args.side]
        print(json.dumps([run(args) for _ in range(args.runs)]))


if __name__ == "__main__":
    main()
