"""Numbers on the command line."""

import argparse

import pytest

from megatron_binac import cli
from megatron_binac.arguments import positive, whole


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("7", 7), ("1_000", 1000), ("1000", 1000)])
def test_integers_in_range_are_taken(text: str, value: int) -> None:
    assert whole(1, 1000)(text) == value


@pytest.mark.parametrize("text", ["0", "-5", "1001", "99999999999999", "1.5", "ten", ""])
def test_others_are_refused_with_the_range(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        whole(1, 1000)(text)
    assert f"got {text!r}, expected an integer from 1 to 1,000" in str(error.value)


@pytest.mark.parametrize("text", ["0", "-0.1", "nan", "inf", "many"])
def test_numbers_that_are_not_positive_are_refused(text: str) -> None:
    assert positive("0.25") == 0.25
    with pytest.raises(argparse.ArgumentTypeError, match="expected a number above 0"):
        positive(text)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bench packing --num-sequences 99999999999999", "--num-sequences: got '99999999999999'"),
        ("bench packing --num-sequences 0", "--num-sequences: got '0'"),
        ("bench packing --dp -5", "--dp: got '-5'"),
        ("bench packing --capacity 0", "--capacity: got '0'"),
        ("bench packing --pack-multiple 0", "--pack-multiple: got '0'"),
        ("bench kernels --tokens -1", "--tokens: got '-1'"),
        ("bench kernels --hidden 0", "--hidden: got '0'"),
        ("bench kernels --vocab 99999999999", "--vocab: got '99999999999'"),
        ("bench kernels --repeats 0", "--repeats: got '0'"),
        ("bench kernels --arch sm_90", "--arch is of --compile-only"),
        ("bench kernels --roofline --repeats 3", "got --roofline and --repeats"),
        ("bench kernels --compile-only --hidden 64", "got --compile-only and --hidden"),
        ("bench step --repeats 0", "--repeats: got '0'"),
        ("bench scaling --repeats -1", "--repeats: got '-1'"),
        ("train quickstart --nproc 0", "--nproc: got '0'"),
        ("train quickstart --tp 0", "--tp: got '0'"),
        ("eval runs/none --num-prompts 0", "--num-prompts: got '0'"),
        ("plan quickstart --gpus 8 --steps 0", "--steps: got '0'"),
        ("launch quickstart --nodes 0", "--nodes: got '0'"),
        ("launch quickstart --jobs 0", "--jobs: got '0'"),
        ("launch quickstart --port 70000", "--port: got '70000'"),
    ],
)
def test_every_command_names_the_option(
    command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command.split()) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("binac: error: ")
    assert error.count("\n") == 1
