"""The doctor tells namesakes apart, reports problems by its exit code, and prints JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_binac import cli, doctor


@pytest.fixture
def fake_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of the import path; give packages to it by making folders."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def make_package(root: Path, name: str, version: str, *folders: str) -> None:
    for folder in ("", *folders):
        (root / name / folder).mkdir(parents=True, exist_ok=True)
        (root / name / folder / "__init__.py").touch()
    info = root / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_json_names_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--json"])
    findings = {f["name"]: f for f in json.loads(capsys.readouterr().out)}
    assert {"python", "torch", "megatron-core", "sentencepiece", "packing", "kernels"} <= set(
        findings
    )
    assert findings["kernels"]["value"] in ("reference", "triton")
    assert findings["layers"]["value"] in ("local", "transformer engine")
    assert "megatron" in findings["engines"]["value"]
    assert {"apex", "vllm", "fp8_tensorwise", "fp8_blockwise", "mxfp8"} <= set(findings)
    assert code == int(any(f["status"] == "problem" for f in findings.values()))
    for finding in findings.values():
        if finding["status"] != "ok":
            assert finding["why"], finding


def test_the_apex_of_the_index_is_not_nvidias(fake_packages: Path) -> None:
    make_package(fake_packages, "apex", "0.9.10", "lib", "models")
    finding = doctor._apex()
    assert (finding.status, finding.value) == ("problem", "0.9.10")
    assert "not NVIDIA's" in finding.why


def test_the_apex_of_nvidia(fake_packages: Path) -> None:
    make_package(fake_packages, "apex", "0.1", "normalization", "optimizers")
    assert doctor._apex().status == "ok"


def test_nemo_run_with_a_leptonai_that_breaks_it(fake_packages: Path) -> None:
    make_package(fake_packages, "nemo_run", "0.11.1")
    make_package(fake_packages, "leptonai", "0.47.1", "api/v2")
    finding = doctor._nemo_run()
    assert finding.status == "problem"
    assert "leptonai 0.47.1 has no api.v1" in finding.why


def test_nemo_run_with_a_leptonai_that_fits(fake_packages: Path) -> None:
    make_package(fake_packages, "nemo_run", "0.11.1")
    make_package(fake_packages, "leptonai", "0.27.3", "api/v1")
    assert doctor._nemo_run().status == "ok"


def test_a_full_disk_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "MIN_FREE_GIB", 2.0**40)
    assert doctor.main(as_json=False) == 1
    (line,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith("disk")]
    assert "PROBLEM" in line


def test_a_library_that_does_not_load_is_said_so() -> None:
    def load() -> None:
        raise ImportError("libcudart.so.13: cannot open shared object file\nand more")

    assert (
        doctor._problem_of(load) == "ImportError: libcudart.so.13: cannot open shared object file"
    )
    assert doctor._problem_of(lambda: None) is None
