"""Our models on Transformer Engine's layers, as far as they can be looked at without a GPU: which
layers, which parameters, which names in checkpoints and in Hugging Face's format.

Set BINAC_TEST_TE to a folder made by
`pip install --no-deps --target FOLDER transformer_engine==2.20.2 pydantic pydantic-core
annotated-types typing-inspection onnx onnxscript onnx-ir ml-dtypes nvdlfw-inspect
importlib-metadata`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = os.environ.get("BINAC_TEST_TE")
ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        FOLDER is None,
        reason="BINAC_TEST_TE names no folder with Transformer Engine's Python part",
    ),
]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    worker = Path(__file__).with_name("te_worker.py")
    path = os.pathsep.join([str(FOLDER), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(worker), str(FOLDER)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["dense", "biased", "experts"])
def test_both_kinds_of_layers_hold_the_same_model(found: dict[str, Any], name: str) -> None:
    local, engine = (found["models"][f"{name} {layers}"] for layers in ("local", "te"))
    assert engine["linear"] == "TELayerNormColumnParallelLinear"
    assert local["linear"] == "ColumnParallelLinear"
    assert "DotProductAttention" in engine["attention"]
    assert engine["parameters"] == local["parameters"]
    # Fresh weights depend on seed and name alone, and come out under the same names.
    assert engine["hugging_face"] == local["hugging_face"]
    assert engine["metadata"] == list(engine["hugging_face"])
    assert engine["keys"] == local["keys"]  # a checkpoint of one is read by the other


@pytest.mark.parametrize("layers", ["local", "te"])
@pytest.mark.parametrize("name", ["dense", "biased", "experts"])
def test_both_kinds_of_layers_start_from_converted_weights(
    found: dict[str, Any], name: str, layers: str
) -> None:
    """Written as `binac convert` writes them, without the states that Transformer Engine's norms
    and attention have; read into layers whose weights were all one number."""
    made = found["models"][f"{name} {layers}"]
    assert made["loaded"] == made["hugging_face"]
    assert len(set(made["loaded"].values())) > 10


def test_recipes_are_those_of_transformer_engine(found: dict[str, Any]) -> None:
    assert found["recipes"] == {
        "fp8_tensorwise": "Float8CurrentScaling",
        "fp8_blockwise": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
    }
