"""The command line: what it refuses, what it starts, and what its ranks are told."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import megatron_binac
from megatron_binac import cli, ranks
from megatron_binac import config as configs
from megatron_binac.config import Config, ModelConfig, RoleConfig, RolloutConfig

ROOT = Path(__file__).resolve().parents[1]
RANK_NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "BINAC_EXIT_FILE",
)  # fmt: skip


def make_toy() -> Config:
    """A small run."""
    role = RoleConfig(model=ModelConfig(num_attention_heads=4, num_query_groups=4))
    return Config(recipe="toy", num_steps=4, actor=role, critic=role)


def make_lone() -> Config:
    """No critic."""
    return Config(recipe="lone", critic=None, rollout=RolloutConfig(criticised=0))


def get_recipe(name: str) -> Config:
    if name not in ("toy", "lone"):
        raise ValueError(f"unknown recipe {name!r}; the closest is 'toy'")
    return {"toy": make_toy, "lone": make_lone}[name]()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple]:
    """Puts two recipes and a trainer that only notes its calls in place; works in tmp_path."""
    noted: list[tuple] = []
    recipes = types.ModuleType("megatron_binac.recipes")
    recipes.RECIPES = {"toy": make_toy, "lone": make_lone}
    recipes.get = get_recipe
    setup = types.ModuleType("megatron_binac.training.setup")

    def run_training(config: Config, run_dir: Path, *, resume: bool) -> int:
        noted.append(("train", config, run_dir, resume))
        return 0

    def run_eval(config: Config, run_dir: Path, *, num_prompts: int | None, output: Path | None):
        noted.append(("eval", config, run_dir, num_prompts, output))
        return 0

    setup.run_training, setup.run_eval = run_training, run_eval
    monkeypatch.setitem(sys.modules, recipes.__name__, recipes)
    monkeypatch.setattr(megatron_binac, "recipes", recipes, raising=False)
    monkeypatch.setitem(sys.modules, setup.__name__, setup)
    # The CLI edits os.environ of its own process, on purpose; here each test gets a copy.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in RANK_NAMES:
        os.environ.pop(name, None)
    monkeypatch.chdir(tmp_path)
    return noted


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def finished_run(run_dir: Path, name: str = "toy") -> None:
    """A run folder as `train` leaves it, with one checkpoint."""
    assert cli.main(["train", name, "--run-dir", str(run_dir)]) == 0
    (run_dir / "checkpoints" / "step_000004").mkdir(parents=True)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom megatron_binac import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'megatron', 'matplotlib', 'rich', 'tensorboard'}\n"
        "sys.exit(f'imported {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in ("train", "eval", "report", "doctor", "recipes", "bench"):
        assert f"  {command} " in done.stdout
    assert "worker" not in done.stdout


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["train"], "got no recipe"),
        (["train", "tpy"], "closest is 'toy'"),
        (["train", "toy", "--set", "actor.optimiser.lr=1"], "closest is 'actor.optimizer.lr'"),
        (["train", "toy", "--set", "num_steps"], "expected key=value"),
        (["train", "toy", "--set", "num_steps=many"], "num_steps is 'many'"),
        (["train", "toy", "--nproc", "3", "--tp", "3"], "tp 3 does not divide"),
        (["train", "toy", "--tp", "2"], "does not divide the 1 ranks of the job"),
        (["train", "toy", "--nproc", "4", "--actor-pp", "3"], "change parallel.pp"),
        (["train", "toy", "--vpp", "2"], "set pp above 1"),
        (["train", "toy", "--sp"], "set tp above 1"),
        (["train", "toy", "--nproc", "0"], "--nproc: got '0', expected an integer of 1 or more"),
        (["train", "lone", "--critic-tp", "2"], "lone has no critic"),
        (["train", "toy", "--resume", "absent"], "absent is not a run folder"),
        (["eval", "absent"], "absent is not a run folder"),
        (["report", "absent"], "absent has no metrics.jsonl"),
        (["recipes", "tpy"], "closest is 'toy'"),
    ],
)
def test_wrong_use_is_one_line_and_starts_nothing(
    argv: list[str],
    expected: str,
    calls: list[tuple],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("binac: error: ")
    assert expected in error
    assert error.count("\n") == 1
    assert calls == []
    assert list(tmp_path.iterdir()) == []


def test_train_writes_the_resolved_config_and_runs_once(calls: list[tuple], tmp_path: Path) -> None:
    assert cli.main(["train", "toy", "--set", "seed=7", "--run-dir", "a"]) == 0
    ((kind, config, run_dir, resume),) = calls
    assert (kind, run_dir, resume) == ("train", Path("a"), False)
    assert config.seed == 7
    assert configs.from_json((tmp_path / "a" / "config.json").read_text()) == config
    assert os.environ["RANK"] == "0"
    assert os.environ["WORLD_SIZE"] == "1"


def test_default_run_dir_has_recipe_and_time(calls: list[tuple]) -> None:
    assert cli.main(["train", "toy"]) == 0
    run_dir = calls[0][2]
    assert run_dir.parent == Path("runs")
    time.strptime(run_dir.name, "toy-%Y%m%d-%H%M%S")


def test_layout_flags_reach_both_roles_and_one_role_beats_both(calls: list[tuple]) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="4")
    flags = ["--tp", "2", "--critic-tp", "1", "--critic-pp", "2", "--critic-vpp", "2", "--actor-sp"]
    assert cli.main(["train", "toy", "--run-dir", "a", *flags]) == 0
    config = calls[0][1]
    actor, critic = config.actor.parallel, config.critic.parallel
    assert (actor.tp, actor.pp, actor.vpp, actor.sequence_parallel) == (2, 1, 1, True)
    assert (critic.tp, critic.pp, critic.vpp, critic.sequence_parallel) == (1, 2, 2, False)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["lone"], "holds a run of recipe 'toy', got 'lone'"),
        (["toy", "--set", "seed=9"], "seed is 1, got 9"),
        (["toy", "--fresh"], "--fresh, but"),
    ],
)
def test_folder_of_another_run_is_left_alone(
    argv: list[str],
    expected: str,
    calls: list[tuple],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finished_run(Path("a"))
    before = contents(tmp_path)
    assert cli.main(["train", *argv, "--run-dir", "a"]) == 2
    assert expected in capsys.readouterr().err
    assert len(calls) == 1
    assert contents(tmp_path) == before


def test_a_crash_leaves_word_for_the_batch_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(cli.importlib, "import_module", broken)
    monkeypatch.setattr(ranks, "children_die_too", lambda: None)
    monkeypatch.setattr(ranks, "set_defaults", lambda env, ranks_here: None)
    monkeypatch.setattr(sys, "warnoptions", ["default"])
    for under_torchrun in (False, True):
        path = tmp_path / f"exit-{under_torchrun}.json"
        monkeypatch.setenv("BINAC_EXIT_FILE", str(path))
        monkeypatch.setenv("RANK", "1")
        if under_torchrun:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        with pytest.raises(RuntimeError, match="out of luck"):
            cli._run_here(tmp_path, lambda setup: 0)
        if under_torchrun:  # which may start the ranks again
            assert not path.exists()
        else:
            said = json.loads(path.read_text())
            assert said == {"code": 1, "message": "[rank 1] RuntimeError: out of luck"}


def test_a_start_that_failed_or_was_killed_leaves_its_folder_free(
    calls: list[tuple], tmp_path: Path
) -> None:
    """What a task makes of its options comes to light after the folder was made: mended, the same
    line must work."""
    odd = ["--set", 'task.options={"easy_share": 7}']
    assert cli.main(["train", "toy", *odd, "--run-dir", "a"]) == 0
    Path("a/tokenizer").mkdir()
    Path("a/tokenizer/tokenizer.model").write_text("of another task")
    assert cli.main(["train", "toy", "--run-dir", "a"]) == 0
    assert not Path("a/tokenizer").exists()
    assert configs.from_json((tmp_path / "a" / "config.json").read_text()).task.options == {}
    assert [call[3] for call in calls] == [False, False]
    Path("b").mkdir()
    Path("b/config.json.4711").write_text('{"recipe": "to')
    assert cli.main(["train", "toy", "--run-dir", "b"]) == 0
    assert sorted(path.name for path in Path("b").iterdir()) == [".lock", "config.json"]


def test_a_task_that_is_not_there_makes_no_folder(
    calls: list[tuple], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "toy", "--set", "task.name=chksum", "--run-dir", "a"]) == 2
    assert "did you mean 'checksum'" in capsys.readouterr().err
    odd = ["--set", 'task.options={"easyshare": 7}']
    assert cli.main(["train", "toy", *odd, "--run-dir", "a"]) == 2
    assert "has no option 'easyshare'; did you mean 'easy_share'" in capsys.readouterr().err
    assert (contents(tmp_path), calls) == ({}, [])


def test_folder_with_other_files_is_left_alone(
    calls: list[tuple], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert cli.main(["train", "toy", "--run-dir", "."]) == 2
    assert "is not empty and holds no run" in capsys.readouterr().err
    assert cli.main(["train", "toy", "--run-dir", "thesis.tex"]) == 2
    assert "is a file, expected a folder" in capsys.readouterr().err
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}
    assert calls == []


def test_same_folder_and_config_continues(calls: list[tuple]) -> None:
    assert cli.main(["train", "toy", "--run-dir", "a"]) == 0
    # No checkpoint yet: the run begins again from the start.
    assert cli.main(["train", "toy", "--run-dir", "a"]) == 0
    Path("a/checkpoints/step_000002").mkdir(parents=True)
    assert cli.main(["train", "toy", "--run-dir", "a"]) == 0
    assert [call[3] for call in calls] == [False, False, True]


def test_resume_takes_the_config_of_the_folder(calls: list[tuple], tmp_path: Path) -> None:
    assert cli.main(["train", "toy", "--set", "seed=7", "--run-dir", "a"]) == 0
    Path("a/checkpoints/step_000004").mkdir(parents=True)
    assert (
        cli.main(["train", "--resume", "a", "--set", "num_steps=9", "--set", "eval.every=3"]) == 0
    )
    _, config, run_dir, resume = calls[1]
    assert (config.seed, config.num_steps, config.eval.every) == (7, 9, 3)
    assert (run_dir, resume) == (Path("a"), True)
    # The next resume goes on to the new end.
    assert configs.from_json((tmp_path / "a" / "config.json").read_text()) == config


def test_resume_may_split_the_models_anew(calls: list[tuple]) -> None:
    from megatron_binac import run_folder

    assert cli.main(["train", "toy", "--run-dir", "a"]) == 0
    config = run_folder.resumed(Path("a"), ["actor.parallel.tp=2"])
    assert (config.actor.parallel.tp, config.seed) == (2, 1)


@pytest.mark.parametrize(
    "argv",
    [["--set", "actor.optimizer.lr=1.0"], ["--set", "seed=1"], ["--set", "evaluation=1"]],
)
def test_resume_refuses_what_would_make_another_run(
    argv: list[str], calls: list[tuple], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished_run(Path("a"))
    before = contents(tmp_path)
    assert cli.main(["train", "--resume", "a", *argv]) == 2
    assert "cannot change in a resumed run" in capsys.readouterr().err
    assert contents(tmp_path) == before
    assert len(calls) == 1


def test_resume_with_another_name_or_folder_is_refused(
    calls: list[tuple], capsys: pytest.CaptureFixture[str]
) -> None:
    finished_run(Path("a"))
    assert cli.main(["train", "lone", "--resume", "a"]) == 2
    assert "leave the name out" in capsys.readouterr().err
    assert cli.main(["train", "--resume", "a", "--run-dir", "b"]) == 2
    assert "give one of the two" in capsys.readouterr().err


def test_broken_config_file_is_named(
    calls: list[tuple], capsys: pytest.CaptureFixture[str]
) -> None:
    finished_run(Path("a"))
    Path("a/config.json").write_text('{"recipe": "toy"')
    assert cli.main(["train", "--resume", "a"]) == 2
    assert "a/config.json cannot be read" in capsys.readouterr().err


def test_folder_in_use_is_refused(calls: list[tuple], capsys: pytest.CaptureFixture[str]) -> None:
    finished_run(Path("a"))
    code = (
        "import sys\nfrom pathlib import Path\nfrom megatron_binac.run_folder import locked\n"
        "with locked(Path('a')):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert cli.main(["train", "toy", "--run-dir", "a"]) == 2
        assert f"is in use by process {holder.pid}" in capsys.readouterr().err
        holder.kill()
    # A killed holder leaves no lock behind.
    assert cli.main(["train", "toy", "--run-dir", "a"]) == 0


def test_full_disk_and_errors_of_a_run_are_one_line(
    calls: list[tuple], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **kwargs: object) -> int:
        raise OSError(errno.ENOSPC, "the disk is full: a/metrics.jsonl")

    def wrong(*args: object, **kwargs: object) -> int:
        raise ValueError("got 3, expected 4")

    setup = sys.modules["megatron_binac.training.setup"]
    monkeypatch.setattr(setup, "run_training", full)
    assert cli.main(["train", "toy", "--run-dir", "a"]) == 2
    assert capsys.readouterr().err == "binac: error: the disk is full: a/metrics.jsonl\n"
    monkeypatch.setattr(setup, "run_training", wrong)
    os.environ.pop("RANK")
    os.environ.pop("WORLD_SIZE")
    assert cli.main(["train", "toy", "--run-dir", "a"]) == 2
    error = capsys.readouterr().err
    assert error == "binac: error: got 3, expected 4 (traceback in a/log.txt)\n"
    assert "in wrong" in Path("a/log.txt").read_text()


def test_a_bug_keeps_its_traceback(calls: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*args: object, **kwargs: object) -> int:
        raise KeyError("loss")

    monkeypatch.setattr(sys.modules["megatron_binac.training.setup"], "run_training", bug)
    with pytest.raises(KeyError):
        cli.main(["train", "toy", "--run-dir", "a"])


def test_wandb_that_is_not_installed_is_refused_before_the_start(
    calls: list[tuple], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["train", "toy", "--run-dir", "a", "--set", "track.wandb_project=p"]) == 2
    assert "megatron_binac[track]" in capsys.readouterr().err
    assert not Path("a").exists()


def test_eval_passes_its_options_and_overwrites_nothing(
    calls: list[tuple], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "toy", "--run-dir", "a"]) == 0
    assert cli.main(["eval", "a"]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err
    Path("a/checkpoints/step_000004").mkdir(parents=True)
    assert cli.main(["eval", "a", "--num-prompts", "8", "--output", "out.json"]) == 0
    assert calls[-1][0] == "eval"
    assert calls[-1][2:] == (Path("a"), 8, Path("out.json"))
    Path("out.json").write_text("{}")
    assert cli.main(["eval", "a", "--output", "out.json"]) == 2
    assert "out.json exists already" in capsys.readouterr().err


@pytest.fixture
def rounds(calls: list[tuple], monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Notes the settings that a folder was claimed for, and what is then evaluated."""
    claimed, evaluation = types.ModuleType("rounds"), types.ModuleType("evaluation")
    claimed.RoundSettings = dict  # type: ignore[attr-defined]
    claimed.claim = lambda folder, settings: calls.append(("claim", folder, settings))  # type: ignore[attr-defined]

    def run_evaluation(folder: Path, *, as_json: bool) -> int:
        calls.append(("rounds", folder, as_json))
        return 0

    evaluation.run_evaluation = run_evaluation  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_binac.rollout.rounds", claimed)
    monkeypatch.setitem(sys.modules, "megatron_binac.training.evaluation", evaluation)
    return calls


def test_eval_with_a_task_takes_the_runs_own_lengths(rounds: list[tuple]) -> None:
    finished_run(Path("a"))
    assert cli.main(["eval", "a", "--task", "checksum", "--num-prompts", "9", "--seed", "5"]) == 0
    (_, folder, settings), played = rounds[-2:]
    assert folder == Path("runs/eval-a-checksum")
    assert settings["stamps"] == ["step_000004"]
    assert (settings["seed"], settings["num_prompts"]) == (5, 9)
    rollout = make_toy().rollout
    assert settings["max_tokens"] == rollout.max_attempt_tokens
    assert settings["max_feedback_tokens"] == rollout.max_feedback_tokens
    assert "rounds" not in settings  # the default of one round
    assert played == ("rounds", folder, False)
    argv = ["eval", "a", "--task", "checksum", "--set", "easy_share=0.5", "--max-tokens", "3"]
    assert cli.main([*argv, "--rounds", "0", "--out", "b", "--json"]) == 0
    (_, folder, settings), played = rounds[-2:]
    assert (folder, settings["max_tokens"], settings["rounds"]) == (Path("b"), 3, 0)
    assert settings["task_options"] == {"easy_share": 0.5}
    assert played == ("rounds", Path("b"), True)


def test_eval_of_other_models(rounds: list[tuple], capsys: pytest.CaptureFixture[str]) -> None:
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps({"model_type": "llama"}))
    argv = ["eval", "hf", "--task", "math500", "--data", "x.jsonl", "--critic", "owner/name"]
    assert cli.main(argv) == 0
    settings = rounds[-2][2]
    assert (settings["model"], settings["critic"]) == ("hf", "owner/name")
    assert settings["task_options"] == {"eval_data": "x.jsonl"}
    assert "max_tokens" not in settings
    Path("empty").mkdir()
    assert cli.main(["eval", "empty", "--task", "checksum"]) == 2
    assert "neither a run nor a Hugging Face model" in capsys.readouterr().err
    assert cli.main(["eval", "hf", "--task", "math500", "--output", "o.json"]) == 2
    assert "pass --out DIR or --json" in capsys.readouterr().err
    num_calls = len(rounds)
    assert cli.main(["eval", "hf", "--task", "chcksum"]) == 2
    assert "did you mean 'checksum'" in capsys.readouterr().err
    assert cli.main(["eval", "hf", "--task", "checksum", "--set", "esy_share=1"]) == 2
    assert "has no option 'esy_share'" in capsys.readouterr().err
    assert len(rounds) == num_calls
    finished_run(Path("a"))
    assert cli.main(["eval", "a", "--rounds", "2"]) == 2
    assert "got --rounds without --task" in capsys.readouterr().err


def test_recipes_lists_resolves_and_names_keys(
    calls: list[tuple], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["recipes"]) == 0
    assert capsys.readouterr().out == "toy   A small run.\nlone  No critic.\n"
    assert cli.main(["recipes", "toy"]) == 0
    assert configs.from_json(capsys.readouterr().out) == make_toy()
    assert cli.main(["recipes", "--keys"]) == 0
    assert "actor.optimizer.lr\n" in capsys.readouterr().out


def test_bench_hands_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    module = types.ModuleType("megatron_binac.benchmark.packing")
    module.main = lambda argv: seen.append(argv)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert cli.main(["bench", "packing", "--help", "-n", "3", "file"]) == 0
    assert seen == [["--help", "-n", "3", "file"]]


# Ranks


def test_ranks_of_torchrun_are_taken_over(
    calls: list[tuple], capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    assert cli.main(["train", "toy", "--run-dir", "a"]) == 0
    # The first rank makes the folder; the others need nothing from it.
    assert len(calls) == 1
    assert not Path("a").exists()
    assert cli.main(["train", "toy", "--run-dir", "a", "--nproc", "4"]) == 2
    assert "leave --nproc out" in capsys.readouterr().err
    os.environ.pop("WORLD_SIZE")
    assert cli.main(["train", "toy", "--run-dir", "a"]) == 2
    assert "RANK alone" in capsys.readouterr().err


def test_ranks_of_one_torchrun_agree_on_the_default_folder(calls: list[tuple]) -> None:
    for rank in ("1", "0"):
        os.environ.update(RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        assert cli.main(["train", "toy"]) == 0
        time.sleep(1.1)
    assert calls[0][2] == calls[1][2]


def test_ranks_on_several_machines_need_a_folder(
    calls: list[tuple], capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ.update(RANK="1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
    assert cli.main(["train", "toy"]) == 2
    assert "pass --run-dir" in capsys.readouterr().err


def slurm_step(procid: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_NTASKS": "8",
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": str(procid), "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "n[3-4]",
    }  # fmt: skip


def test_srun_without_torchrun_becomes_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "scontrol"
    fake.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[3-4]" ] && printf "n3\\nn4\\n"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ports = set()
    for procid in range(4):
        env = slurm_step(procid)
        assert ranks.existing(env) == 4
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == (str(procid), "4", "1")
        assert env["MASTER_ADDR"] == "n3"
        ports.add(env["MASTER_PORT"])
    assert len(ports) == 1
    assert 15000 <= int(ports.pop()) < 30000


def test_srun_names_what_is_missing_without_scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ValueError, match="set MASTER_ADDR"):
        ranks.existing(slurm_step(0))
    assert ranks.existing(slurm_step(0) | {"MASTER_ADDR": "n3"}) == 4
    env = slurm_step(0) | {"SLURM_STEP_NODELIST": "a1,a2"}
    ranks.existing(env)
    assert env["MASTER_ADDR"] == "a1"


def test_a_batch_script_and_a_lone_task_are_no_ranks() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    assert ranks.existing(batch) is None
    assert ranks.existing(slurm_step(0) | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    with pytest.raises(ValueError, match="RANK 4 of WORLD_SIZE 4"):
        ranks.existing({"RANK": "4", "WORLD_SIZE": "4"})


def test_a_slurm_job_names_its_folder(calls: list[tuple]) -> None:
    os.environ.update(slurm_step(0), MASTER_ADDR="n3")
    assert cli.main(["train", "toy"]) == 0
    assert calls[0][2] == Path("runs/toy-job4711")


def test_threads_are_shared_among_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    env: dict[str, str] = {}
    ranks.set_defaults(env, 3)
    assert env == {"OMP_NUM_THREADS": "2", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    env = {"OMP_NUM_THREADS": "5", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    ranks.set_defaults(env, 16)
    assert env == {"OMP_NUM_THREADS": "5", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}


# With a real torchrun: the trainer is a stand-in that `sitecustomize` puts into every process.

STAND_IN = """
import json, os, signal, sys, time, types
from pathlib import Path
sys.path.insert(0, {tests!r})

setup = types.ModuleType("megatron_binac.training.setup")
recipes = types.ModuleType("megatron_binac.recipes")

def get(name):
    from megatron_binac.config import Config
    return Config(recipe=name, num_steps=4)

def run_training(config, run_dir, *, resume):
    rank, stopped = os.environ["RANK"], []
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS")
    seen = dict((name, os.environ[name]) for name in names) | dict(pid=os.getpid(), resume=resume)
    if config.recipe == "wait":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: stopped.append(number))
    draft = Path(run_dir, "rank" + rank + ".tmp")
    draft.write_text(json.dumps(seen))
    draft.rename(Path(run_dir, "rank" + rank + ".json"))
    if config.recipe == "fail" and rank == "1":
        raise ValueError("the batch of 3 does not fit, expected 4")
    while config.recipe in ("wait", "fail") and not stopped:
        time.sleep(0.05)
    if stopped:
        Path(run_dir, "saved" + rank).write_text(str(stopped))
        return 128 + stopped[0]
    return 0

recipes.get, recipes.RECIPES = get, dict(ok=get, wait=get, fail=get)
setup.run_training = run_training
sys.modules[setup.__name__] = setup
sys.modules[recipes.__name__] = recipes
"""


@pytest.fixture
def launch(tmp_path: Path):
    """Starts `binac train RECIPE --nproc 2` as a user would, in a folder of its own."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN.format(tests=str(tmp_path)))
    env = {k: v for k, v in os.environ.items() if k not in (*RANK_NAMES, "OMP_NUM_THREADS")}
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    started: list[subprocess.Popen[str]] = []

    def start(recipe: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "megatron_binac", "train", recipe, "--nproc", "2"]
        process = subprocess.Popen(
            [*command, "--run-dir", str(tmp_path / "run")],
            cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for_ranks(run_dir: Path) -> list[dict]:
    paths = [run_dir / "rank0.json", run_dir / "rank1.json"]
    deadline = time.monotonic() + 90
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.1)
    return [json.loads(path.read_text()) for path in paths]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_torchrun_gives_each_rank_its_place(launch, tmp_path: Path) -> None:
    process = launch("ok")
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    seen = wait_for_ranks(tmp_path / "run")
    assert [(s["RANK"], s["LOCAL_RANK"], s["WORLD_SIZE"]) for s in seen] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert {s["OMP_NUM_THREADS"] for s in seen} == {threads}
    assert {s["CUDA_DEVICE_MAX_CONNECTIONS"] for s in seen} == {"1"}
    assert {s["resume"] for s in seen} == {False}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank_once_and_its_code_comes_back(
    launch, tmp_path: Path, number: signal.Signals
) -> None:
    process = launch("wait")
    wait_for_ranks(tmp_path / "run")
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number, error
    for rank in range(2):
        assert (tmp_path / "run" / f"saved{rank}").read_text() == str([int(number)])
    assert "Traceback" not in error


@pytest.mark.slow
def test_the_error_of_one_rank_is_the_last_line(launch, tmp_path: Path) -> None:
    process = launch("fail")
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    last = error.strip().splitlines()[-1]
    assert last.startswith("[rank 1] binac: error: the batch of 3 does not fit, expected 4")
    assert "in run_training" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.slow
def test_ranks_die_with_a_killed_parent(launch, tmp_path: Path) -> None:
    process = launch("wait")
    pids = [seen["pid"] for seen in wait_for_ranks(tmp_path / "run")]
    assert all(is_running(pid) for pid in pids)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived the process that started it"
        time.sleep(0.05)
    assert not list((tmp_path / "run").glob("saved*"))


def test_a_folder_in_the_place_of_a_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    argv = ["grade", str(tmp_path), "--task", "gsm8k", "--data", str(problems)]
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.startswith("binac: error: [Errno 21] Is a directory")


def test_a_missing_extra_is_one_line_and_a_broken_module_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(error: ImportError) -> None:
        def action(args: object) -> int:
            raise error

        monkeypatch.setattr(cli, "_grade", action)

    fails(ImportError("datasets is not installed; pip install 'megatron_binac[tasks]'"))
    assert cli.main(["grade", "x", "--task", "gsm8k"]) == 2
    assert capsys.readouterr().err.startswith("binac: error: datasets is not installed")
    fails(ModuleNotFoundError("No module named 'megatron_binac.gone'", name="megatron_binac.gone"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["grade", "x", "--task", "gsm8k"])
