"""Whole runs whose feedback comes from a model behind HTTP."""

from __future__ import annotations

import os
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from helpers_http import Server, asked, completion, send, status, then
from helpers_ranks import Job
from helpers_runs import arguments, command, finish, rows, transcripts

KEY = "sk-test-77c0d1"


def with_key(argv: list[str]) -> int:
    """`binac ARGV` with the endpoint's key in the environment."""
    os.environ["TOY_KEY"] = KEY
    return command(argv)


def judge(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """Words that depend on what is asked, and the key, as an endpoint that repeats it would."""
    assert handler.headers["Authorization"] == f"Bearer {KEY}"
    send(handler, completion("ok" if len(asked(body)) % 2 else "off"))


def argv(run_dir: Path, tmp_path: Path, server: Server) -> list[str]:
    sets = (
        "critic=null",
        'text_critic={"kind": "http", "model": "toy", "api_key_env": "TOY_KEY", '
        f'"base_url": "{server.url}"}}',
        f"text_critic.cache_dir={tmp_path / 'answers'}",
        "text_critic.system=judge digits",
        "text_critic.template=problem {problem} attempt {attempt}",
        "text_critic.temperature=0.25",
        "text_critic.options.top_p=0.75",
        "text_critic.options.seed=null",
        "bilevel.lam=0",
        "num_steps=2",
        "eval.every=0",
        "eval.num_prompts=2",
        "rollout.prompts_per_step=4",
        "rollout.criticised=4",
        "rollout.feedbacks=1",
        "rollout.revisions=1",
        "rollout.max_feedback_tokens=5",
        "track.transcripts_per_step=4",
    )
    return arguments(run_dir, tmp_path / "warm", *sets, recipe="rltf_sd")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_criticised_over_http_and_asks_nothing_twice(
    tmp_path: Path, server: Server
) -> None:
    busy, broken = status(429, Retry_After="0"), status(500, f"no {KEY}".encode())
    server.reply = then(busy, broken, judge)
    first, second = tmp_path / "first", tmp_path / "second"
    job = Job(1, with_key, argv(first, tmp_path, server))
    finish(job)
    said = job.log.read()
    assert [row["step"] for row in rows(first)] == [-1, 0, 1]
    assert not [key for row in rows(first) for key in row if key.startswith("critic/")]
    # As the config says it, and two more requests than answers: both failures were tried again.
    answers = list((tmp_path / "answers").rglob("*.json"))
    assert len(server.requests) == len(answers) + 2 > 10
    for path, headers, body in server.requests:
        assert path == "/v1/chat/completions"
        assert headers["Authorization"] == f"Bearer {KEY}"
        system, user = body.pop("messages")
        assert system == {"role": "system", "content": "judge digits"}
        assert user["role"] == "user"
        assert user["content"].startswith("problem ")
        assert " attempt " in user["content"]
        assert body == {"model": "toy", "max_tokens": 5, "temperature": 0.25, "top_p": 0.75}
    # What was said is what the actor read.
    trees = [line["tree"] for line in transcripts(first)]
    words = {z["text"] for tree in trees for z in tree["feedbacks"]}
    assert words == {"ok", "off"}
    # The key is nowhere on the disk and in nothing that was printed.
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert first / "log.txt" in files
    assert first / "config.json" in files
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert KEY not in said
    # The same run again, elsewhere: all answers are there.
    asked_before = len(server.requests)
    again = Job(1, with_key, argv(second, tmp_path, server))
    finish(again)
    assert len(server.requests) == asked_before
    assert rows(second) == rows(first)
    assert transcripts(second) == transcripts(first)
