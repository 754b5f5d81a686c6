"""Profiles of sites: what is read, what is refused, and the limits that Slurm writes as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_binac.launch import site as sites
from megatron_binac.launch.site import SECRET_NAME, Site

ROOT = Path(__file__).resolve().parents[2]


def test_a_profile_is_read_and_named_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "north.toml"
    path.write_text(
        'account = "a"\nhang_s = 60\nsrun_args = ["--mpi=none"]\n[env]\nhttp_proxy = "http://p"\n'
    )
    found = sites.load(path)
    assert (found.name, found.account, found.hang_s) == ("north", "a", 60.0)
    assert found.srun_args == ("--mpi=none",)
    assert found.env == {"http_proxy": "http://p"}
    assert sites.from_dict(sites.to_dict(found)) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('acount = "a"', "unknown key 'acount'; the closest is 'account'"),
        ('ranks_per_node = "8"', "ranks_per_node is '8', expected int"),
        ("exclusive = 1", "exclusive is 1, expected bool"),
        ('launcher = "mpi"', "launcher is 'mpi', expected 'srun' or 'torchrun'"),
        ('setup = "module load x"', "expected a list of strings"),
        ("[env]\nNCCL_DEBUG = 1", "expected a table of strings (quote the numbers)"),
        ("ranks_per_node = 0", "ranks_per_node is 0, expected 1 or more"),
        ('time = "soon"', "time is 'soon', expected Slurm's [days-]hours:minutes:seconds"),
        ("account = ", "is no TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        sites.load(path)
    assert said in str(error.value)
    assert "site.toml" in str(error.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("04:00:00", 14400),
        ("2-0", 172800),
        ("1-12:30", 131400),
        ("1-00:00:05", 86405),
    ],
)
def test_limits_of_slurm(text: str, seconds: int) -> None:
    assert sites.seconds(text) == seconds


def test_names_of_secrets() -> None:
    secret = ("WANDB_API_KEY", "HF_TOKEN", "db_password", "AWS_SECRET_ACCESS_KEY", "SSH_KEY")
    plain = ("NCCL_SOCKET_IFNAME", "KEYBOARD", "OMP_NUM_THREADS", "http_proxy", "MONKEY_BARS")
    assert all(SECRET_NAME.search(name) for name in secret)
    assert not any(SECRET_NAME.search(name) for name in plain)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_the_profiles_of_the_examples(path: Path) -> None:
    found = sites.load(path)
    assert found.account
    assert found.workdir.startswith("/")
    assert bool(found.container_image) == ("pyxis" in path.name)
    assert isinstance(found, Site)
