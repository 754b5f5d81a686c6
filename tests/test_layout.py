"""The import floors, and habits that a machine can check, for whatever files there are."""

from __future__ import annotations

import ast
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_binac"

# Floors from the ground up. A module imports from lower floors, and on its own floor only as
# OWN_FLOOR says. The first pattern that fits a module counts.
FLOORS: list[tuple[int, tuple[str, ...]]] = [
    (0, ("config", "method_config", "types", "seeds", "arguments", "__init__")),
    (1, ("algo.*", "algo", "tasks.*", "tasks", "packing", "packing_reference", "recipes")),
    (1, ("quickstart", "method_recipes", "pretrained_recipes")),
    (1, ("tokenizer", "run_folder", "ranks", "pulse", "planner", "planner.*", "report", "terms")),
    (1, ("report_page", "report_charts", "timeline", "first_rank")),
    (2, ("kernels.*", "kernels")),
    (3, ("models.*", "models", "rollout.engine", "rollout.scripted_engine", "rollout.refit")),
    (3, ("rollout.sampling", "rollout.critics", "rollout.http_critic")),
    (3, ("rollout.judging",)),
    (4, ("rollout.vllm_engine", "rollout.megatron_engine", "rollout.play", "rollout.batch")),
    (4, ("rollout.hf_engine",)),
    (5, ("rollout.*", "rollout", "objectives.*", "objectives")),
    (6, ("training.telemetry", "training.profiling")),
    (7, ("training.loop*", "training.trees", "training.warm_start", "training.pretrained")),
    (7, ("training.engines",)),
    (8, ("training.*", "training")),
    (9, ("benchmark.*", "benchmark", "launch.*", "launch", "doctor")),
    (10, ("cli", "__main__")),
]
OWN_FLOOR: list[tuple[str, str]] = [
    ("config", "method_config"),
    ("recipes", "quickstart"),
    ("recipes", "method_recipes"),
    ("recipes", "pretrained_recipes"),
    ("method_recipes", "quickstart"),
    ("algo.*", "algo.*"),
    ("tasks*", "tasks*"),
    ("packing", "packing_reference"),
    ("planner*", "planner*"),
    ("report", "report_*"),
    ("report_page", "report_charts"),
    ("kernels*", "kernels*"),
    ("models*", "models*"),
    ("rollout.scripted_engine", "rollout.engine"),
    ("rollout.refit", "rollout.engine"),
    ("training.evaluation", "training.setup"),
    ("objectives.*", "objectives.*"),
    ("benchmark.*", "benchmark.*"),
    ("launch.*", "launch.*"),
    ("__main__", "cli"),
]
# Heavy or optional packages have a place; an import inside a function counts as well.
HEAVY: dict[str, tuple[str, ...]] = {
    "triton": ("kernels.*", "benchmark.*"),
    "megatron": ("models.*", "rollout.megatron_engine", "benchmark.*"),
    "transformer_engine": ("models.*",),
    "vllm": ("rollout.vllm_engine",),
    "transformers": ("rollout.hf_engine",),
    "nemo_run": ("launch.nemo", "launch.nemo_cli"),
    "wandb": ("training.telemetry",),
    "matplotlib": ("report", "benchmark.*"),
    "reasoning_gym": ("tasks.*",),
    "math_verify": ("tasks.*",),
    "datasets": ("tasks.*",),
    "sentencepiece": ("tokenizer",),
    "tokenizers": ("tokenizer", "models.convert.gguf"),
    "safetensors": ("models.*", "rollout.*"),
    "gguf": ("models.convert.gguf",),
}
TORCH_FREE = (
    "config", "method_config", "arguments", "types", "seeds", "__init__", "__main__", "tasks",
    "tasks.*", "packing", "packing_reference",
    "recipes", "quickstart", "method_recipes", "pretrained_recipes", "terms", "tokenizer",
    "run_folder", "planner", "planner.*", "ranks", "cli",
    "report", "launch", "launch.*", "pulse",
    "training.telemetry", "benchmark.packing", "benchmark.compare*",
    "rollout.critics", "rollout.http_critic",
)  # fmt: skip
TOP_LEVEL = {
    "megatron_binac", "csrc", "examples", "tools", "setup.py", "tests", "README.md",
    "CONTRIBUTING.md", "pyproject.toml", ".pre-commit-config.yaml", ".ci", "LICENSE",
    "CHANGELOG.md", "constraints.txt", ".gitignore", "docs",
}  # fmt: skip
UNWANTED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


def sources(folder: str, *patterns: str) -> list[Path]:
    return sorted(p for pattern in patterns for p in (ROOT / folder).rglob(pattern))


def module_name(path: Path) -> str:
    """`algo.losses` for megatron_binac/algo/losses.py, `algo` for its __init__.py."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): path for path in sources(PACKAGE, "*.py")}


def floor(name: str) -> int | None:
    for number, patterns in FLOORS:
        if any(fnmatch(name, pattern) for pattern in patterns):
            return number
    return None


@cache
def imports(name: str) -> list[tuple[str, int, bool]]:
    """(dotted name, line, runs at import) of each import that is not for type checking."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    found: list[tuple[str, int, bool]] = []

    def visit(node: ast.AST, runs: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child, runs)
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, runs) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{MODULES[name]}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.extend((dotted, node.lineno, runs) for dotted in names)
        inner = runs and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(tree, True)
    return found


def own_module(dotted: str) -> str | None:
    """Our module that `from X import Y` or `import X.Y` reaches, None for other packages."""
    parts = dotted.split(".")
    if parts[0] != PACKAGE:
        return None
    for end in range(len(parts), 1, -1):
        if ".".join(parts[1:end]) in MODULES:
            return ".".join(parts[1:end])
    return "__init__"


@pytest.mark.parametrize("name", MODULES)
def test_a_module_looks_down_only(name: str) -> None:
    height = floor(name)
    assert height is not None, f"{MODULES[name]} stands on no floor; give it one in FLOORS"
    for dotted, line, _ in imports(name):
        target = own_module(dotted)
        if target is None or target == name:
            continue
        other = floor(target)
        allowed = any(fnmatch(name, a) and fnmatch(target, b) for a, b in OWN_FLOOR)
        assert other is not None
        assert other < height or (other == height and allowed), (
            f"{MODULES[name]}:{line}: {name} (floor {height}) imports {target} (floor {other})"
        )


def test_no_two_modules_import_each_other() -> None:
    reaches = {n: {t for d, _, _ in imports(n) if (t := own_module(d)) and t != n} for n in MODULES}
    pairs = {tuple(sorted((a, b))) for a in reaches for b in reaches[a] if a in reaches.get(b, ())}
    assert not pairs, f"modules that import each other: {sorted(pairs)}"


@pytest.mark.parametrize("name", MODULES)
def test_a_heavy_package_stays_in_its_place(name: str) -> None:
    for dotted, line, _ in imports(name):
        package = dotted.split(".")[0]
        if package in HEAVY:
            assert any(fnmatch(name, pattern) for pattern in HEAVY[package]), (
                f"{MODULES[name]}:{line}: {package} may be imported by {', '.join(HEAVY[package])}"
            )


@pytest.mark.parametrize("name", [n for n in MODULES if any(fnmatch(n, p) for p in TORCH_FREE)])
def test_importing_a_torch_free_module_imports_no_torch(name: str) -> None:
    """Followed through our own imports, so that a lower module cannot bring torch in by the way."""
    seen, open_names = set(), [name]
    while open_names:
        module = open_names.pop()
        # Importing a.b runs a/__init__ first.
        chain = [module] + [p for p in (module.rpartition(".")[0],) if p in MODULES]
        for link in chain:
            if link in seen:
                continue
            seen.add(link)
            for dotted, line, runs in imports(link):
                assert not (runs and dotted.split(".")[0] == "torch"), (
                    f"importing {name} imports torch at {MODULES[link]}:{line}"
                )
                target = own_module(dotted)
                if runs and target is not None:
                    open_names.append(target)


def test_importing_config_pulls_in_nothing_heavy() -> None:
    code = (
        f"import sys, {PACKAGE}.config, {PACKAGE}.cli\n"
        "found = {'torch', 'numpy', 'megatron', 'triton', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_top_level_names() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip(f"needs a git checkout: {listed.stderr.strip()}")
    extra = {line.split("/")[0] for line in listed.stdout.splitlines()} - TOP_LEVEL
    assert not extra, f"new names at the top of the tree: {sorted(extra)}"


def test_no_file_is_named_for_being_shared() -> None:
    bad = [str(p) for p in MODULES.values() if p.stem in UNWANTED_NAMES]
    bad += [str(p) for p in (ROOT / PACKAGE).rglob("*") if p.is_dir() and p.name in UNWANTED_NAMES]
    assert not bad, f"name these for what they do: {bad}"


def test_sources_are_ascii() -> None:
    folders = {PACKAGE: ("*.py",), "tests": ("*.py",), "tools": ("*.sh", "*.py")}
    folders |= {"csrc": ("*.cpp", "*.h"), "examples": ("*.py",)}
    for folder, patterns in folders.items():
        for path in sources(folder, *patterns):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                assert line.isascii(), f"{path}:{number}: {line}"


def test_examples_are_short_and_say_what_they_show() -> None:
    for path in sources("examples", "*.py"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 60, f"{path} has {len(text.splitlines())} lines"
        assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def test_every_module_says_what_it_is() -> None:
    for path in MODULES.values():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{path} has no docstring"


def test_test_folders_mirror_the_package() -> None:
    folders = {p.parent.relative_to(ROOT / "tests") for p in sources("tests", "test_*.py")}
    for folder in folders:
        assert (ROOT / PACKAGE / folder).is_dir(), f"tests/{folder} mirrors nothing"
    assert not sources("tests", "__init__.py"), "test folders are no packages (importlib mode)"


def test_the_tree_in_the_readme_names_every_module() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.split("## The tree")[1].split("```")[1]
    named, folder = set(), ""
    for line in tree.splitlines():
        entry = line.split()[0] if line.strip() else ""
        if line.startswith("  ") and entry.endswith("/"):
            folder = entry
        elif entry.endswith(".py"):
            named.add(folder + entry if line.startswith("    ") else entry)
    there = {
        str(path.relative_to(ROOT / PACKAGE))
        for path in MODULES.values()
        if path.name not in ("__init__.py", "__main__.py")
    }
    assert not there - named, f"give these a line in README.md: {sorted(there - named)}"
