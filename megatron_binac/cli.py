"""`binac`: the command line. Each command imports what it needs when it runs; help needs no torch.

Exit codes: 0 done, 2 wrong use (one line on stderr, nothing overwritten), 130, 138 and 143
stopped by SIGINT, SIGUSR1 and SIGTERM after a checkpoint was saved, anything else a crash with its
traceback.
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import importlib.util
import json
import os
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_binac import __version__
from megatron_binac.arguments import Parser, positive, whole
from megatron_binac.launch import arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron_binac.config import Config

BENCHMARKS = ("packing", "kernels", "scaling", "train", "rollout", "refit", "step")
LAUNCHING = {
    "launch": "submit a recipe, a sweep or a whole experiment to Slurm, or run it here",
    "status": "stages, jobs, steps, tokens/s and reward of an experiment",
    "logs": "what the jobs of an experiment have printed",
    "cancel": "save, stop and hold an experiment",
    "resume": "go on with an experiment where it was stopped or has failed",
}
_LAYOUT = {
    "tp": ("parallel.tp", "tensor-parallel ranks"),
    "pp": ("parallel.pp", "pipeline stages"),
    "vpp": ("parallel.vpp", "virtual stages of each pipeline rank"),
    "sp": ("parallel.sequence_parallel", "split norms and residuals over the TP ranks"),
}

_ROUND_OPTIONS: dict[str, tuple[str, type, str]] = {
    "--rounds": ("rounds", int, "feedbacks in a row (default 1); 0 only answers"),
    "--samples": ("samples", int, "chains of each problem (default 1), for pass@k and maj@k"),
    "--seed": ("seed", int, "of all samples (default 1)"),
    "--temperature": ("temperature", float, "0 is greedy (default 1, or the run's)"),
    "--top-k": ("top_k", int, "default 0: off"),
    "--top-p": ("top_p", float, "default 1: off"),
    "--max-tokens": ("max_tokens", int, "longest answer (default 1024, or the run's)"),
    "--max-feedback-tokens": ("max_feedback_tokens", int, "default 512, or the run's"),
    "--precision": ("precision", str, "of a Hugging Face model: auto, fp32 or bf16"),
    "--batch": ("batch", int, "chains sampled together (default 64)"),
}
"""Flag -> field of `rollout.rounds.RoundSettings`, its type, help. What is left out keeps its
default."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""

    def command() -> int:
        args = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        return args.command(args)

    code, message = _guarded(command)
    if message:
        print(message, file=sys.stderr)
    return code


def _guarded(action: Callable[[], int]) -> tuple[int, str]:
    """Run `action`; wrong use becomes exit code 2 and one line, a bug keeps its traceback."""
    try:
        return action(), ""
    except KeyboardInterrupt:
        return 130, "binac: interrupted before there was anything to save"
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: its choice, and no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0, ""
    except (
        ValueError,
        FileNotFoundError,
        FileExistsError,
        PermissionError,
        IsADirectoryError,
        NotADirectoryError,
    ) as error:
        return 2, f"binac: error: {error}"
    except ImportError as error:
        if error.name is not None:  # Python's own: something of ours is broken
            raise
        return 2, f"binac: error: {error}"  # ours: it names the extra to install
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return 2, f"binac: error: {error.strerror or error}"


# Commands that need ranks


def _train(args: argparse.Namespace) -> int:
    from megatron_binac import ranks, run_folder

    asked = _world_size(args.nproc)
    config, run_dir = _resumed_run(args) if args.resume is not None else _new_run(args)
    world = asked or config.default_ranks
    config.check_world(world)
    _check_tracking(config)
    _check_task(config)

    ranks_exist = "RANK" in os.environ
    first_rank = int(os.environ.get("RANK", "0")) == 0
    if args.resume is None:
        run_folder.claim(run_dir, config, fresh=args.fresh, first_rank=first_rank)
    # Asked before any rank can have written one, so that all ranks agree.
    resume = run_folder.latest_checkpoint(run_dir) is not None
    if not first_rank:
        return _run_here(run_dir, lambda setup: setup.run_training(config, run_dir, resume=resume))
    with run_folder.locked(run_dir):
        if args.resume is not None:
            run_folder.write_config(run_dir, config)
        print(
            f"binac: {'continuing' if resume else 'starting'} {config.recipe} in {run_dir}",
            flush=True,
        )
        if not ranks_exist and world > 1:
            return ranks.start(world, ["train", str(run_dir), *(["--resume"] if resume else [])])
        if not ranks_exist:
            ranks.become_single(os.environ)
        return _run_here(run_dir, lambda setup: setup.run_training(config, run_dir, resume=resume))


def _new_run(args: argparse.Namespace) -> tuple[Config, Path]:
    from megatron_binac import config as configs
    from megatron_binac import recipes

    if args.recipe is None:
        raise ValueError("got no recipe; `binac recipes` lists them, --resume DIR continues a run")
    base = recipes.get(args.recipe)
    config = configs.override(base, [*_layout_assignments(args, base), *args.set])
    return config, args.run_dir or _default_run_dir(config.recipe)


def _resumed_run(args: argparse.Namespace) -> tuple[Config, Path]:
    from megatron_binac import run_folder

    run_dir: Path = args.resume
    held = run_folder.load_config(run_dir)
    if args.recipe not in (None, held.recipe):
        raise ValueError(
            f"{run_dir} holds a run of recipe {held.recipe!r}, got {args.recipe!r}; "
            "leave the name out"
        )
    if args.run_dir not in (None, run_dir):
        raise ValueError(
            f"got --resume {run_dir} and --run-dir {args.run_dir}; give one of the two"
        )
    return run_folder.resumed(run_dir, [*_layout_assignments(args, held), *args.set]), run_dir


def _layout_assignments(args: argparse.Namespace, config: Config) -> list[str]:
    """The layout flags as `--set` would have them; a flag of one role beats the flag of both."""
    found: list[str] = []
    for role in ("actor", "critic"):
        for flag, (key, _) in _LAYOUT.items():
            own = getattr(args, f"{role}_{flag}")
            if own is not None and role == "critic" and config.critic is None:
                raise ValueError(
                    f"got --critic-{flag}, but {config.recipe} has no critic; leave it out"
                )
            value = own if own is not None else getattr(args, flag)
            if value is not None and not (role == "critic" and config.critic is None):
                found.append(f"{role}.{key}={str(value).lower()}")
    return found


def _eval(args: argparse.Namespace) -> int:
    from megatron_binac import ranks, run_folder

    if args.task is not None:
        return _eval_task(args)
    given = [
        flag for flag, (name, _, _) in _ROUND_OPTIONS.items() if getattr(args, name) is not None
    ]
    given += [
        f"--{name}" for name in ("critic", "data", "out", "json", "set") if getattr(args, name)
    ]
    if given:
        raise ValueError(
            f"got {given[0]} without --task; give --task NAME (the run's own, or another), or "
            "leave it out for the measurement of the training loop"
        )
    run_dir = Path(args.model)
    config = run_folder.load_config(run_dir)
    world = _world_size(args.nproc) or config.default_ranks
    config.check_world(world)
    if run_folder.latest_checkpoint(run_dir) is None:
        raise ValueError(
            f"{run_dir} has no checkpoint yet; go on with binac train --resume {run_dir}"
        )
    if args.output is not None and args.output.exists():
        raise ValueError(f"{args.output} exists already; pass a new --output")
    if "RANK" not in os.environ and world > 1:
        worker = ["eval", str(run_dir)]
        worker += ["--num-prompts", str(args.num_prompts)] if args.num_prompts else []
        worker += ["--output", str(args.output)] if args.output else []
        return ranks.start(world, worker)
    if "RANK" not in os.environ:
        ranks.become_single(os.environ)
    return _run_here(run_dir, _evaluation(args, config, run_dir))


def _evaluation(args: argparse.Namespace, config: Config, run_dir: Path) -> Callable[[Any], int]:
    return lambda setup: setup.run_eval(
        config, run_dir, num_prompts=args.num_prompts, output=args.output
    )


def _eval_task(args: argparse.Namespace) -> int:
    """Rounds of feedback on any task: a folder is claimed for the settings, then every rank reads
    them from there."""
    from megatron_binac import ranks

    if args.output is not None:
        raise ValueError("--output is for evaluations without --task; pass --out DIR or --json")
    world = _world_size(args.nproc) or 1
    model, critic = (_run_config(name) for name in (args.model, args.critic))
    for config in (model, critic):
        if config is not None:
            config.check_world(world)
    name = Path(args.model).resolve().name if Path(args.model).exists() else args.model
    folder = args.out or Path("runs") / f"eval-{name.replace('/', '-')}-{args.task}"
    if int(os.environ.get("RANK", "0")) == 0:
        # Imports numpy and torch, so only here.
        rounds = importlib.import_module("megatron_binac.rollout.rounds")
        rounds.claim(folder, rounds.RoundSettings(**_round_settings(args, model)))
    if "RANK" not in os.environ and world > 1:
        return ranks.start(world, ["rounds", str(folder), *(["--json"] if args.json else [])])
    if "RANK" not in os.environ:
        ranks.become_single(os.environ)
    return _run_here(folder, lambda _: _rounds(folder, as_json=args.json))


def _rounds(folder: Path, *, as_json: bool) -> int:
    evaluation = importlib.import_module("megatron_binac.training.evaluation")
    return evaluation.run_evaluation(folder, as_json=as_json)


def _round_settings(args: argparse.Namespace, model: Config | None) -> dict[str, Any]:
    """What the flags say; a run folder brings its own lengths and temperature, and the options of
    its own task."""
    from megatron_binac.tasks import check_task, grading

    found: dict[str, Any] = {"model": args.model, "critic": args.critic, "task": args.task}
    found["stamps"] = [_stamp(name) for name in (args.model, args.critic) if name is not None]
    options = dict(_task_option(text) for text in args.set)
    if model is not None:
        r = model.rollout
        found |= {"temperature": r.temperature, "max_feedback_tokens": r.max_feedback_tokens}
        found["max_tokens"] = max(r.max_attempt_tokens, r.max_revision_tokens)
        if model.critic is None and args.critic is None:
            found["rounds"] = 0
        if args.task == model.task.name and args.data is None:
            options = {**model.task.options, **options}
    found["task_options"] = grading.task_options_with_data(args.task, args.data, options)
    check_task(args.task, found["task_options"])
    for name, _, _ in _ROUND_OPTIONS.values():
        if getattr(args, name) is not None:
            found[name] = getattr(args, name)
    if args.num_prompts is not None:
        found["num_prompts"] = args.num_prompts
    return found


def _run_config(model: str | None) -> Config | None:
    """The config of a run folder, None for any other model."""
    from megatron_binac import run_folder

    path = Path(model or "") / "config.json"
    if model is None or not path.is_file():
        return None
    try:
        is_run = "recipe" in json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        is_run = True
    return run_folder.load_config(Path(model)) if is_run else None


def _stamp(model: str) -> str:
    """Which weights these are: the newest checkpoint of a run, the age of a folder's files."""
    from megatron_binac import run_folder

    folder = Path(model)
    if _run_config(model) is not None:
        path = run_folder.latest_checkpoint(folder)
        if path is None:
            raise ValueError(
                f"{model} has no checkpoint yet; go on with binac train --resume {model}"
            )
        return path.name
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(
            f"{model} holds neither a run nor a Hugging Face model (no config.json); give a run "
            "folder, a model folder, or a name on the hub"
        )
    return str(max((p.stat().st_mtime_ns for p in folder.glob("*.safetensors")), default=""))


def _worker(args: argparse.Namespace) -> int:
    """One rank that `ranks.start` has started; the run folder says everything else."""
    from megatron_binac import ranks, run_folder

    ranks.die_with_parent()
    run_dir: Path = args.run_dir
    if args.job == "rounds":
        return _run_here(run_dir, lambda _: _rounds(run_dir, as_json=args.json))
    config = run_folder.load_config(run_dir)
    if args.job == "train":
        return _run_here(
            run_dir, lambda setup: setup.run_training(config, run_dir, resume=args.resume)
        )
    if args.job == "warm-start":
        return _run_here(run_dir, lambda setup: setup.run_warm_start(config, run_dir, args.role))
    return _run_here(run_dir, _evaluation(args, config, run_dir))


def _run_here(run_dir: Path, job: Callable[[Any], int]) -> int:
    """Run `job(megatron_binac.training.setup)` in this process, which is one rank."""
    from megatron_binac import ranks

    ranks.children_die_too()
    ranks.set_defaults(os.environ, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if not sys.warnoptions:
        # What is not installed is the doctor's to say; what will be renamed is for maintainers, who
        # run the tests with all warnings on.
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron_binac\.")

    def logged() -> int:
        setup = importlib.import_module("megatron_binac.training.setup")
        gc.freeze()  # Megatron-Core collects at every save: leave out what imports have made
        try:
            return job(setup)
        except ValueError as error:
            # A line on the screen is enough for wrong use; for a bug the way to it is kept.
            with open(run_dir / "log.txt", "a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
            raise ValueError(f"{error} (traceback in {run_dir / 'log.txt'})") from error

    try:
        return ranks.leave(*_guarded(logged))
    except Exception as error:
        ranks.crashed(error)
        raise


def _world_size(nproc: int | None) -> int | None:
    """Ranks of the job: what the environment says, else --nproc; None where neither does."""
    from megatron_binac import ranks

    world = ranks.existing(os.environ)
    if world is not None and nproc not in (None, world):
        raise ValueError(
            f"--nproc is {nproc}, but torchrun or srun has started {world} ranks; leave --nproc out"
        )
    return world or nproc


def _default_run_dir(recipe: str) -> Path:
    """runs/RECIPE-TIME; ranks that somebody else has started must come to the same name."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    if "SLURM_JOB_ID" in os.environ:
        return Path("runs") / f"{recipe}-job{os.environ['SLURM_JOB_ID']}"
    if os.environ.get("LOCAL_WORLD_SIZE") != str(world):
        raise ValueError("ranks on several machines need one folder that all see; pass --run-dir")
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(_start_time(os.getppid())))
    return Path("runs") / f"{recipe}-{stamp}"


def _start_time(pid: int) -> float:
    """Seconds since the epoch at which a process began; the ranks of one torchrun share it."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    lines = Path("/proc/stat").read_text().splitlines()
    boot = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def _check_tracking(config: Config) -> None:
    if config.track.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"track.wandb_project is {config.track.wandb_project!r} but wandb is not installed; "
            "pip install 'megatron_binac[track]', or --set track.wandb_project=null"
        )


def _check_task(config: Config) -> None:
    """ValueError for what a task cannot be built or started with, before a folder is made."""
    from megatron_binac.tasks import check_task, task_class

    name, options = config.task.name, config.task.options
    try:
        check_task(name, options)
    except ValueError as error:
        hint = "; a recipe's options are those of its own task: --set 'task.options={}' drops them"
        raise ValueError(f"{error}{hint if options else ''}") from error
    warm = [role for role in ("actor", "critic") if getattr(config.warm_start, role).steps]
    made = task_class(name)
    if warm and made is not None and not hasattr(made, "supervised"):
        mend = " ".join(f"--set warm_start.{role}.steps=0" for role in warm)
        raise ValueError(
            f"{config.recipe} warm-starts the {' and the '.join(warm)}, but task {name} offers no "
            f"supervised examples; {mend}"
        )


def _warm_start(args: argparse.Namespace) -> int:
    from megatron_binac import ranks, run_folder

    if args.run_dir is None:
        raise ValueError("--run-dir is missing: a warm start keeps its tokenizer and log there")
    world = _world_size(args.nproc) or 1
    config, run_dir = _new_run(args)
    config.check_world(world)
    if not getattr(config.warm_start, args.role).steps:
        raise ValueError(f"{config.recipe} has no warm start of the {args.role}; leave it out")
    _check_task(config)
    ranks_exist = "RANK" in os.environ
    first_rank = int(os.environ.get("RANK", "0")) == 0
    run_folder.claim(run_dir, config, fresh=False, first_rank=first_rank)
    if not ranks_exist and world > 1:
        return ranks.start(world, ["warm-start", str(run_dir), "--role", args.role])
    if not ranks_exist:
        ranks.become_single(os.environ)
    return _run_here(run_dir, lambda setup: setup.run_warm_start(config, run_dir, args.role))


def _launch(args: argparse.Namespace) -> int:
    from megatron_binac.launch import command

    return command.main(args.name_of_command, args, _layout_assignments)


# Commands that read


def _report(args: argparse.Namespace) -> int:
    from megatron_binac import report

    for run_dir in args.run_dirs:
        if not (run_dir / "metrics.jsonl").is_file():
            raise ValueError(f"{run_dir} has no metrics.jsonl; expected the folder of a run")
    print(report.results_table(args.run_dirs))
    parents = {run_dir.resolve().parent for run_dir in args.run_dirs}
    if args.out is None and len(parents) > 1:
        raise ValueError("the runs lie in several folders; pass --out DIR for what compares them")
    out = args.out or (args.run_dirs[0].parent if len(args.run_dirs) > 1 else None)
    split = {run_dir: found for run_dir in args.run_dirs if (found := _splitter(run_dir))}
    for path in report.write_report(args.run_dirs, out, split):
        print(path)
    return 0


def _splitter(run_dir: Path) -> Callable[[Any], list[str]] | None:
    """The tokens of a turn's record by the run's own tokenizer, None where it is not there."""
    from megatron_binac.tokenizer import load_tokenizer

    path = run_dir / "tokenizer" / "tokenizer.model"
    if not path.is_file():
        return None
    tokenizer = load_tokenizer(path)

    def split(turn: Any) -> list[str]:
        # Records of older runs have no ids: there the text is split anew.
        ids = turn.get("ids") or tokenizer.encode(turn["text"])
        ids = [i for i in ids if i != tokenizer.end_id]
        text = tokenizer.decode(ids)
        return [text[start:end] for start, end in tokenizer.offsets(ids)]

    return split


def _compare(args: argparse.Namespace) -> int:
    from megatron_binac.benchmark import compare, compare_show

    # A name that was meant for something else (a run's file) is not written over.
    for flag, path, endings in (
        ("--markdown", args.markdown, (".md",)),
        ("--plot", args.plot, (".png", ".svg", ".pdf")),
    ):
        if path is not None and path.suffix not in endings:
            raise ValueError(f"{flag} is {path}, expected a name that ends in {endings}")
    found = compare.compare(
        args.runs, by=args.by, at=args.at, baseline=args.baseline, decoding=args.decoding,
        metrics=args.metric, interval=args.interval, finished_only=args.finished_only,
    )  # fmt: skip
    print(compare_show.as_json(found) if args.json else compare_show.table(found))
    for path in (args.markdown, args.plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if args.markdown is not None:
        args.markdown.write_text(compare_show.table(found, markdown=True) + "\n", encoding="utf-8")
    if args.plot is not None:
        compare_show.plot(found, args.plot)
    return 0


def _convert(args: argparse.Namespace) -> int:
    command = importlib.import_module("megatron_binac.models.convert.command")
    done = command.convert(
        args.source,
        args.target,
        role=args.role,
        dtype=args.dtype,
        shard_bytes=round(args.shard_gb * 1e9),
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{done.target}: {done.family}, {done.direction}, {done.num_tensors} tensors, "
        f"{done.num_bytes / 1e9:.2f} GB, {done.seconds:.1f} s, peak memory {peak / 1e9:.2f} GB"
    )
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from megatron_binac import doctor

    return doctor.main(as_json=args.json)


def _recipes(args: argparse.Namespace) -> int:
    from megatron_binac import config as configs
    from megatron_binac import recipes

    if args.keys:
        print("\n".join(configs.keys()))
    elif args.name is not None:
        print(configs.to_json(recipes.get(args.name)))
    else:
        width = max(len(name) for name in recipes.RECIPES)
        for name, build in recipes.RECIPES.items():
            print(f"{name:{width}}  {(build.__doc__ or '').strip().splitlines()[0]}")
    return 0


def _grade(args: argparse.Namespace) -> int:
    from megatron_binac.tasks import grading

    options = dict(_task_option(text) for text in args.set)
    task = grading.build_for_grading(args.task, args.data, options)
    for row in grading.grade_file(task, args.file):
        if args.json:
            print(json.dumps(row))
        elif "summary" not in row:
            print(f"{'failed' if row['failed'] else row['score']}\t{row['id']}\t{row['reason']}")
        else:
            print("\n".join(f"{key}: {value}" for key, value in row.items()))
    return 0


def _task_option(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"--set {text} has no '='; expected KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _plan(args: argparse.Namespace) -> int:
    from megatron_binac import config as configs
    from megatron_binac import recipes
    from megatron_binac.planner import command

    if args.recipe is None:
        return command.run(args, None)
    command.check(args)
    return command.run(args, configs.override(recipes.get(args.recipe), args.set), _shape_of)


def _shape_of(model: str) -> Any:
    """The shape of FAMILY:SIZE, or of a Hugging Face config; ValueError for what is neither."""
    from megatron_binac.planner import shapes

    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.is_file():
        return shapes.named(model)
    from megatron_binac.models.convert import families

    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        own = families.of_config(facts).read(facts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no config of a model that is known: {error}") from error
    return shapes.Shape.of(own, own.vocab_size)


def _bench(args: argparse.Namespace) -> int:
    if args.name in ("packing", "kernels", "scaling", "refit"):
        benchmark = importlib.import_module(f"megatron_binac.benchmark.{args.name}")
        return benchmark.main(args.arguments) or 0
    speed = importlib.import_module("megatron_binac.benchmark.speed")
    return speed.main([args.name, *args.arguments])


# Parser


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="binac",
        description="Train an actor and a critic that writes feedback, on Megatron-Core.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megatron_binac {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    train = _command(commands, "train", _train, "run a recipe, or continue a run")
    train.add_argument("recipe", nargs="?", metavar="RECIPE", help="see `binac recipes`")
    _add_nproc(train)
    text = "change one setting (repeatable); see `binac recipes --keys`"
    train.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = "default runs/RECIPE-TIME; a run that is there is continued"
    train.add_argument("--run-dir", type=Path, metavar="DIR", help=text)
    start = train.add_mutually_exclusive_group()
    start.add_argument("--resume", type=Path, metavar="DIR", help="continue the run in DIR")
    start.add_argument("--fresh", action="store_true", help="refuse a folder that holds a run")
    _add_layout(train)

    evaluate = _command(commands, "eval", _eval, "measure a run, or any model on a task")
    text = "a run folder; with --task also a Hugging Face model, as a folder or a name on the hub"
    evaluate.add_argument("model", metavar="MODEL", help=text)
    _add_nproc(evaluate)
    _add_eval_options(evaluate)
    text = "rounds of feedback on a task, into a folder that a second call continues"
    group = evaluate.add_argument_group(text)
    group.add_argument("--task", metavar="NAME", help="math500, mbpp, gpqa, ...")
    group.add_argument("--data", metavar="PATH", help="the task's held-out problems")
    text = "an option of the task (repeatable)"
    group.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = "default: the run's own critic, or the same model"
    group.add_argument("--critic", metavar="MODEL", help=text)
    for flag, (name, kind, text) in _ROUND_OPTIONS.items():
        group.add_argument(flag, dest=name, type=kind, metavar=kind.__name__.upper(), help=text)
    group.add_argument("--out", type=Path, metavar="DIR", help="default runs/eval-MODEL-TASK")
    group.add_argument("--json", action="store_true", help="the numbers as one object")

    report = _command(commands, "report", _report, "results table, curves and an HTML page")
    report.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    text = (
        "where tables, curves and page of all runs together go (default for several: the folder "
        "that holds them)"
    )
    report.add_argument("--out", type=Path, metavar="DIR", help=text)

    compare = _command(commands, "compare", _compare, "runs at equal cost, with seeds pooled")
    _add_compare_options(compare)

    text = "Hugging Face weights to a checkpoint of ours, or back"
    convert = _command(commands, "convert", _convert, text)
    text = "a Hugging Face folder, a .gguf file, package:NAME, a converted folder, or a run"
    convert.add_argument("source", metavar="SRC", help=text)
    convert.add_argument("target", type=Path, metavar="DST", help="a new folder")
    text = "which model of a run (default actor)"
    convert.add_argument("--role", choices=("actor", "critic"), default="actor", help=text)
    text = "default: as it is stored"
    convert.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help=text)
    text = "largest safetensors file, where the source does not say (default 5)"
    convert.add_argument("--shard-gb", type=positive, default=5.0, metavar="GB", help=text)

    doctor = _command(commands, "doctor", _doctor, "what is installed here and what is chosen")
    doctor.add_argument("--json", action="store_true")

    recipes = _command(commands, "recipes", _recipes, "list the recipes, or print one resolved")
    recipes.add_argument("name", nargs="?", metavar="NAME")
    recipes.add_argument("--keys", action="store_true", help="every key that --set takes")

    grade = _command(commands, "grade", _grade, "grade completions that somebody has sampled")
    text = 'JSONL with rows {"id": ..., "completion": ...}'
    grade.add_argument("file", type=Path, metavar="FILE", help=text)
    grade.add_argument("--task", required=True, metavar="NAME", help="math500, mbpp, gpqa, ...")
    grade.add_argument("--data", metavar="PATH", help="the task's held-out problems")
    grade.add_argument("--json", action="store_true", help="one graded row a line, then a summary")
    text = "an option of the task (repeatable)"
    grade.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)

    from megatron_binac.planner import command as planner

    plan = _command(commands, "plan", _plan, "does it fit, how fast, and why this layout")
    planner.add_arguments(plan)

    bench = _command(commands, "bench", _bench, "measure a component against its alternatives")
    bench.add_argument("name", choices=BENCHMARKS)
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="see `binac bench NAME --help`")

    warm = _command(commands, "warm-start", _warm_start, "make one role's warm start for its runs")
    warm.add_argument("recipe", metavar="RECIPE")
    warm.add_argument("--role", choices=("actor", "critic"), required=True)
    warm.add_argument("--run-dir", type=Path, metavar="DIR", help="its tokenizer and its log")
    _add_nproc(warm)
    text = "change one setting (repeatable)"
    warm.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    _add_layout(warm)

    for name, text in LAUNCHING.items():
        launching = _command(commands, name, _launch, text)
        launching.set_defaults(name_of_command=name)
        arguments.add_arguments(name, launching)
        if name == "launch":
            _add_layout(launching)

    # Not for people: what torchrun starts. Without a help text argparse leaves it out of the list.
    worker = commands.add_parser("worker", allow_abbrev=False)
    worker.set_defaults(command=_worker)
    worker.add_argument("job", choices=("train", "eval", "rounds", "warm-start"))
    worker.add_argument("run_dir", type=Path)
    worker.add_argument("--role")
    worker.add_argument("--resume", action="store_true")
    worker.add_argument("--json", action="store_true")
    _add_eval_options(worker)
    return parser


def _command(
    commands: Any, name: str, action: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(command=action)
    return parser


def _add_nproc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc", type=whole(1), metavar="N", help="ranks on this machine (default 1)"
    )


def _add_layout(parser: argparse.ArgumentParser) -> None:
    for prefix, whose in (("", "both roles"), ("actor-", "the actor"), ("critic-", "the critic")):
        group = parser.add_argument_group(f"layout of {whose}")
        for flag, (_, what) in _LAYOUT.items():
            if flag == "sp":
                group.add_argument(f"--{prefix}sp", action="store_true", default=None, help=what)
            else:
                group.add_argument(f"--{prefix}{flag}", type=whole(1), metavar="N", help=what)


def _add_compare_options(parser: argparse.ArgumentParser) -> None:
    text = "folders of runs, or quoted patterns such as 'runs/seeds/*'"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=text)
    text = "what the runs are equal in (default tokens: those that were generated)"
    axes = ("tokens", "flops", "steps", "time")
    parser.add_argument("--by", choices=axes, default="tokens", help=text)
    text = "so many tokens, FLOPs, steps or seconds (default: as many as all runs have)"
    parser.add_argument("--at", type=positive, metavar="N", help=text)
    text = "the recipe that the others are set against, paired by seed (default: the first)"
    parser.add_argument("--baseline", metavar="RECIPE", help=text)
    parser.add_argument("--decoding", choices=("sampled", "greedy"), default="sampled")
    text = "of the evaluation (repeatable; default acc_t1, acc_t2 and its controls)"
    parser.add_argument("--metric", action="append", default=[], metavar="NAME", help=text)
    text = "95 %% over seeds by bootstrap (default), or by Student's t"
    parser.add_argument("--interval", choices=("bootstrap", "t"), default="bootstrap", help=text)
    text = "leave out runs that have not come to their end"
    parser.add_argument("--finished-only", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="with every run's own numbers")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw learning curves")


def _add_eval_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-prompts", type=whole(1), metavar="N", help="default: as in the config"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the numbers as JSON"
    )
