"""The critic behind HTTP, against a small server of its own on a free port of this machine."""

from __future__ import annotations

import email.utils
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from helpers_http import GUARD_S, Server, asked, completion, echo, send, status, then

from megatron_binac.rollout import http_critic
from megatron_binac.rollout.critics import TextCritic
from megatron_binac.rollout.http_critic import HttpCritic
from megatron_binac.types import Prompt

KEY = "sk-test-5e2b9c"


def problem(text: str) -> Prompt:
    return Prompt(id=f"t/{text}", text=text, gold="g", task="t")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were waited for, without the wait."""
    noted: list[float] = []

    def pause(stop: threading.Event, seconds: float) -> bool:
        noted.append(seconds)
        return stop.is_set()

    monkeypatch.setattr(http_critic, "_pause", pause)
    return noted


@pytest.fixture
def make(server: Server) -> Iterator[Callable[..., HttpCritic]]:
    made: list[HttpCritic] = []

    def build(**settings: Any) -> HttpCritic:
        given = {
            "base_url": server.url, "model": "m", "system": "", "timeout_s": GUARD_S,
            "template": "{problem}|{attempt}",
        } | settings  # fmt: skip
        made.append(HttpCritic(**given))
        return made[-1]

    try:
        yield build
    finally:
        server.over.set()
        for critic in made:
            critic.close()


Make = Callable[..., HttpCritic]


def test_one_request_is_one_feedback(server: Server, make: Make) -> None:
    critic: TextCritic = make(system="be brief", max_tokens=7, temperature=0.5)
    assert critic.say([problem("2+2"), problem("2+3")], ["4", "6"], [1, 2**40 + 2]) == [
        "on 2+2|4",
        "on 2+3|6",
    ]
    path, headers, body = sorted(server.requests, key=lambda r: r[2]["seed"])[1]
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    # 2**40 + 2 in 31 bits.
    assert body == {
        "model": "m", "max_tokens": 7, "temperature": 0.5, "seed": 2,
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "2+3|6"},
        ],
    }  # fmt: skip


def test_the_gold_never_goes_out(server: Server, make: Make) -> None:
    secret = "GOLD-8d1f"
    prompt = Prompt(
        id=f"t/{secret}", text="2+2", gold=secret, task="t", meta={"tests": [secret], "n": secret}
    )
    defaults = {"system": http_critic.SYSTEM, "template": http_critic.TEMPLATE}
    make(**defaults).say([prompt], ["5"], [1])
    assert secret not in repr(server.requests)
    assert "2+2" in asked(server.bodies[0])
    assert "5" in asked(server.bodies[0])


def test_a_problem_that_spells_a_placeholder_stays_as_it_is(server: Server, make: Make) -> None:
    critic = make(template="<{problem}> {attempt} {x}")
    critic.say([problem("what is {attempt}?")], ["{problem}"], [0])
    assert asked(server.bodies[0]) == "<what is {attempt}?> {problem} {x}"


def test_order_is_kept_when_answers_overtake_each_other(server: Server, make: Make) -> None:
    last_came = threading.Event()
    overtaken: list[bool] = []

    def reply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if asked(body) == "0|a":
            overtaken.append(last_came.wait(GUARD_S))
        if asked(body) == "3|a":
            last_came.set()
        echo(handler, body)

    server.reply = reply
    said = make(max_parallel=4).say([problem(str(i)) for i in range(4)], ["a"] * 4, range(4))
    assert said == [f"on {i}|a" for i in range(4)]
    assert overtaken == [True]


def test_no_more_requests_at_once_than_allowed(server: Server, make: Make) -> None:
    lock, active, peak = threading.Lock(), 0, 0
    full = threading.Event()

    def reply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        nonlocal active, peak
        with lock:
            active += 1
            peak = max(peak, active)
            if active == 3:
                full.set()
        full.wait(GUARD_S)
        time.sleep(0.02)  # a fourth one would come in the meantime
        with lock:
            active -= 1
        echo(handler, body)

    server.reply = reply
    said = make(max_parallel=3).say([problem(str(i)) for i in range(12)], ["a"] * 12, range(12))
    assert said == [f"on {i}|a" for i in range(12)]
    assert peak == 3


def test_it_tries_again_and_waits_twice_as_long_each_time(
    server: Server, make: Make, waits: list[float]
) -> None:
    server.reply = then(status(503), status(500), status(429), echo)
    critic = make(first_wait_s=2.0)
    assert critic.say([problem("a")], ["b"], [1]) == ["on a|b"]
    assert len(server.requests) == 4
    # One spread for all tries of a request: exact doubling from within 2 * [0.5, 1.5).
    assert 1.0 <= waits[0] < 3.0
    assert waits[1:] == pytest.approx([2 * waits[0], 4 * waits[0]])
    assert (critic.num_sent, critic.num_retried, critic.num_answered) == (4, 3, 1)
    assert critic.num_failed == 0


def test_retry_after_is_kept_to(
    server: Server, make: Make, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_900_000_000.0
    monkeypatch.setattr(http_critic.time, "time", lambda: now)
    date = email.utils.formatdate(now + 25, usegmt=True)
    server.reply = then(
        status(429, Retry_After="17"),
        status(503, Retry_After=date),
        status(429, Retry_After="9000"),
        status(429, Retry_After="nan"),
        status(429, Retry_After="soon"),
        echo,
    )
    critic = make(first_wait_s=0.001, max_wait_s=40.0)
    assert critic.say([problem("a")], ["b"], [1]) == ["on a|b"]
    # A number, a date, one that is longer than allowed; what says nothing is the doubled wait.
    assert waits[:3] == pytest.approx([17.0, 25.0, 40.0])
    assert all(wait < 0.001 * 2**4 * 1.5 for wait in waits[3:])


def test_a_lost_connection_is_tried_again(server: Server, make: Make, waits: list[float]) -> None:
    def hang_up(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        handler.close_connection = True

    server.reply = then(hang_up, echo)
    assert make().say([problem("a")], ["b"], [1]) == ["on a|b"]
    assert len(waits) == 1


def test_one_request_that_stays_failed_is_none_counted_and_logged_once(
    server: Server, make: Make, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    def reply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if asked(body).startswith("bad"):
            send(handler, b'{"error": {"message": "no room"}}', 503)
        else:
            echo(handler, body)

    server.reply = reply
    critic = make(max_retries=2)
    said = critic.say([problem("a"), problem("bad"), problem("c")], ["y"] * 3, [1, 2, 3])
    assert said == ["on a|y", None, "on c|y"]
    assert critic.num_failed == 1
    assert sum(asked(body) == "bad|y" for body in server.bodies) == 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "1 of 3 feedbacks failed, the first: got status 503: no room (3 tries)"
    )


@pytest.mark.parametrize("code", [401, 403, 404, 405, 418])
def test_what_concerns_all_requests_raises_at_once(
    code: int, server: Server, make: Make, waits: list[float]
) -> None:
    server.reply = status(code, b'{"error": {"message": "model m is not\\nserved here"}}')
    with pytest.raises(ValueError) as caught:
        make(max_parallel=1).say([problem("a"), problem("b")], ["y"] * 2, [1, 2])
    assert f"got status {code}: model m is not\\nserved here" in str(caught.value)
    assert server.url in str(caught.value)
    assert "\n" not in str(caught.value)
    assert waits == []
    assert len(server.requests) <= 2


def test_a_request_that_is_refused_is_not_repeated(
    server: Server, make: Make, waits: list[float]
) -> None:
    def reply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if asked(body).startswith("long"):
            send(handler, b'{"error": "too long"}', 400)
        else:
            echo(handler, body)

    server.reply = reply
    critic = make()
    said = critic.say([problem("long"), problem("a")], ["y"] * 2, [1, 2])
    assert said == [None, "on a|y"]
    assert (len(server.requests), waits) == (2, [])
    # Where nothing was ever answered it is not the request.
    with pytest.raises(ValueError, match="answered none of 1 requests: got status 400: too long"):
        make().say([problem("long")], ["y"], [1])


def test_nobody_at_the_address_is_an_error_that_says_so(server: Server, make: Make) -> None:
    critic = make(max_retries=1, first_wait_s=0.0)
    server.close()
    with pytest.raises(ValueError, match="answered none of 1 requests: ConnectionRefusedError"):
        critic.say([problem("a")], ["y"], [1])
    assert critic.num_sent == 2


def test_a_server_that_says_nothing_runs_into_the_timeout(server: Server, make: Make) -> None:
    server.reply = lambda handler, body: server.over.wait(GUARD_S)
    critic = make(timeout_s=0.2, max_retries=1, first_wait_s=0.0)
    with pytest.raises(ValueError, match=r"TimeoutError: timed out \(2 tries\)"):
        critic.say([problem("a")], ["y"], [1])


def test_a_server_that_drips_runs_into_the_timeout(server: Server, make: Make) -> None:
    def drip(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        while not server.over.wait(0.01):
            handler.wfile.write(b" ")

    server.reply = drip
    critic = make(timeout_s=1.0, max_retries=0)
    with pytest.raises(ValueError, match=r"did not end in time|TimeoutError"):
        critic.say([problem("a")], ["y"], [1])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html>busy</html>",
        completion("half")[:40],
        b"[" * 100_000,
        b"\xff\xfe{",
        b"null",
        b"[]",
        b'{"choices": []}',
        b'{"choices": {"0": 1}}',
        b'{"choices": [{"message": null}]}',
        b'{"choices": ["text"]}',
        b'{"error": {"code": 429, "message": "later"}}',
        b'{"choices": [' + b"9" * 5000 + b"]}",
    ],
)
def test_an_answer_that_is_none_is_tried_again(
    data: bytes, server: Server, make: Make, waits: list[float]
) -> None:
    server.reply = then(status(200, data), echo)
    assert make().say([problem("a")], ["b"], [1]) == ["on a|b"]
    assert len(waits) == 1


@pytest.mark.parametrize("chunked", [False, True])
def test_an_answer_that_breaks_off_is_tried_again(
    chunked: bool, server: Server, make: Make, waits: list[float]
) -> None:
    def broken(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        data = completion("whole")  # valid by itself: only its length says that more was to come
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        if chunked:
            handler.send_header("Transfer-Encoding", "chunked")
        else:
            handler.send_header("Content-Length", str(len(data) + 5))
        handler.end_headers()
        handler.wfile.write(b"%x\r\n%s\r\n5\r\nab" % (len(data), data) if chunked else data)
        handler.close_connection = True

    server.reply = then(broken, echo)
    assert make().say([problem("a")], ["b"], [1]) == ["on a|b"]
    assert len(waits) == 1


def test_chunks_are_put_together(server: Server, make: Make) -> None:
    def reply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        data = completion("in parts")
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for part in (data[:9], data[9:]):
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        handler.wfile.write(b"0\r\n\r\n")

    server.reply = reply
    assert make().say([problem("a")], ["b"], [1]) == ["in parts"]


@pytest.mark.parametrize("text", [None, "", " \n", ["part"], 7])
def test_no_text_is_a_failure_and_stays_one(
    text: object, server: Server, make: Make, waits: list[float], tmp_path: Path
) -> None:
    server.reply = then(echo, status(200, completion(text)))
    critic = make(cache_dir=tmp_path)
    assert critic.say([problem("a")], ["b"], [1]) == ["on a|b"]
    assert critic.say([problem("a")], ["b"], [2]) == [None]
    assert (len(server.requests), waits) == (2, [])
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_half_a_surrogate_pair_becomes_text(server: Server, make: Make, tmp_path: Path) -> None:
    server.reply = status(200, b'{"choices": [{"message": {"content": "a\\ud800b"}}]}')
    for _ in range(2):  # the second one from the cache
        (said,) = make(cache_dir=tmp_path).say([problem("a")], ["b"], [1])
        assert said == "a?b"
    assert len(server.requests) == 1


def test_a_long_answer_is_not_read(
    server: Server, make: Make, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_critic, "MAX_BYTES", 1000)
    fits = completion("x" * (1000 - len(completion(""))))
    assert len(fits) == 1000
    server.reply = then(status(200, fits), status(200, fits + b" "))
    critic = make()
    assert critic.say([problem("a")], ["b"], [1])[0] is not None
    assert critic.say([problem("a")], ["b"], [2]) == [None]
    assert (len(server.requests), waits) == (2, [])


def test_a_cached_answer_is_not_asked_for(server: Server, make: Make, tmp_path: Path) -> None:
    first = make(cache_dir=tmp_path)
    assert first.say([problem("a")] * 2, ["b"] * 2, [1, 2]) == ["on a|b"] * 2
    assert len(server.requests) == 2
    assert first.say([problem("a")], ["b"], [1]) == ["on a|b"]
    second = make(cache_dir=tmp_path)
    assert second.say([problem("a")] * 3, ["b"] * 3, [2, 1, 2]) == ["on a|b"] * 3
    assert len(server.requests) == 2
    assert (second.num_cached, second.num_sent) == (2, 0)
    # Another seed, attempt, model, length or temperature is another question.
    second.say([problem("a")], ["b"], [3])
    second.say([problem("a")], ["c"], [1])
    for other in ({"model": "n"}, {"max_tokens": 3}, {"temperature": 0.0}, {"system": "s"}):
        make(cache_dir=tmp_path, **other).say([problem("a")], ["b"], [1])
    assert len(server.requests) == 8


def test_equal_questions_of_one_call_are_asked_once(server: Server, make: Make) -> None:
    assert make().say([problem("a")] * 5, ["b"] * 5, [1, 1, 2, 1, 2]) == ["on a|b"] * 5
    assert sorted(body["seed"] for body in server.bodies) == [1, 2]


def test_siblings_stay_apart_where_the_endpoint_takes_no_seed(
    server: Server, make: Make, tmp_path: Path
) -> None:
    critic = make(options={"seed": None, "top_p": 0.5}, cache_dir=tmp_path)
    critic.say([problem("a")] * 2, ["b"] * 2, [1, 2])
    assert len(server.requests) == 2
    assert all("seed" not in body and body["top_p"] == 0.5 for body in server.bodies)


@pytest.mark.parametrize(
    "held", [b"", b'{"key"', b"[]", b'{"text": 5}', b'{"key": "x", "text": "y"}']
)
def test_a_broken_file_of_the_cache_is_made_anew(
    held: bytes, server: Server, make: Make, tmp_path: Path
) -> None:
    make(cache_dir=tmp_path).say([problem("a")], ["b"], [1])
    (path,) = tmp_path.rglob("*.json")
    whole = path.read_bytes()
    path.write_bytes(held)
    assert make(cache_dir=tmp_path).say([problem("a")], ["b"], [1]) == ["on a|b"]
    assert len(server.requests) == 2
    assert path.read_bytes() == whole
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]


def test_who_reads_the_cache_while_others_write_sees_whole_answers(tmp_path: Path) -> None:
    key, texts = "ab" * 32, ["x" * 200_000, "y" * 200_000]
    caches = [http_critic._Cache(tmp_path) for _ in range(3)]  # as of three processes
    caches[0].put(key, texts[0])
    over = threading.Event()

    def write(cache: http_critic._Cache, text: str) -> None:
        while not over.is_set():
            cache.put(key, text)

    threads = [
        threading.Thread(target=write, args=pair, daemon=True)
        for pair in zip(caches[:2], texts, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        seen = {caches[2].get(key) for _ in range(200)}
    finally:
        over.set()
        for thread in threads:
            thread.join(GUARD_S)
    assert seen <= set(texts)
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".json"]


def test_a_cache_that_cannot_be_written_is_said_once(
    server: Server, make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    critic = make(cache_dir=tmp_path / "file")
    assert critic.say([problem("a")] * 3, ["b"] * 3, [1, 2, 3]) == ["on a|b"] * 3
    (record,) = caplog.records
    assert "cache cannot be written" in record.getMessage()


def test_the_key_goes_into_the_header_and_nowhere_else(
    server: Server,
    make: Make,
    waits: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TOY_KEY", f" {KEY}\n")
    critic = make(api_key_env="TOY_KEY", cache_dir=tmp_path, max_retries=1)
    # A server that repeats the key in what it says, in an answer and in all kinds of errors.
    server.reply = status(200, completion(f"your key is {KEY}"))
    assert critic.say([problem("a")], ["b"], [1]) == ["your key is [key]"]
    assert server.requests[0][1]["Authorization"] == f"Bearer {KEY}"
    # Where the text is cut no half of the key may stay: its place moves over the cut.
    for seed, pad in enumerate(range(340, 420, 3), start=2):
        server.reply = status(503, b"." * pad + KEY.encode() + b"." * 400)
        assert critic.say([problem("a")], ["b"], [seed]) == [None]
    server.reply = status(400, json.dumps({"error": {"message": f"bad {KEY}"}}).encode())
    assert critic.say([problem("a")], ["b"], [-1]) == [None]
    errors = []
    for reply in (
        status(401, b'{"error": {"message": "wrong key ' + KEY.encode() + b'"}}'),
        status(308, Location=f"http://other.invalid/{KEY}"),
        status(302, Location=f"/{KEY}"),
    ):
        server.reply = reply
        with pytest.raises(ValueError) as caught:
            critic.say([problem("a")], ["b"], [-2])
        errors.append(repr(caught.value))
    assert len(errors) == 3
    files = [path.read_text() for path in tmp_path.rglob("*.json")]
    assert len(files) == 1
    for place in (*errors, *files, caplog.text, repr(critic)):
        assert KEY[:8] not in place
        assert "Bearer" not in place


def test_a_key_that_is_not_there_or_not_one_is_refused_unseen(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOY_KEY", raising=False)
    with pytest.raises(ValueError, match="api_key_env is TOY_KEY, which is not set; export"):
        make(api_key_env="TOY_KEY")
    for pasted in (KEY, "hf_AbCdEf"):
        with pytest.raises(ValueError, match="give the name, not the key") as caught:
            make(api_key_env=pasted)
        assert pasted not in str(caught.value)
    monkeypatch.setenv("TOY_KEY", f"{KEY}\nX-Other: 1")
    with pytest.raises(ValueError, match="TOY_KEY holds a space") as caught:
        make(api_key_env="TOY_KEY")
    assert KEY not in str(caught.value)


def test_a_key_in_the_clear_is_warned_about(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TOY_KEY", KEY)
    make(api_key_env="TOY_KEY")
    make(base_url="https://host.invalid/v1", api_key_env="TOY_KEY")
    make(base_url="http://host.invalid/v1")
    assert caplog.records == []
    make(base_url="http://host.invalid/v1", api_key_env="TOY_KEY")
    assert [r.getMessage() for r in caplog.records] == [
        "the critic's key goes to host.invalid unencrypted; use https"
    ]


def test_the_proxy_of_the_environment_is_for_other_machines_alone(
    server: Server, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/v1"))
    make(base_url="http://host.invalid/v1").say([problem("a")], ["b"], [1])
    assert server.requests[0][0] == "http://host.invalid/v1/chat/completions"
    make().say([problem("a")], ["b"], [1])
    assert server.requests[1][0] == "/v1/chat/completions"


def test_one_refused_key_ends_the_wait_of_the_others(server: Server, make: Make) -> None:
    waiting = threading.Event()

    def reply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if asked(body) == "a|y":
            send(handler, b"", 503, Retry_After="3000")
            waiting.set()
        else:
            waiting.wait(GUARD_S)
            send(handler, b"", 401)

    server.reply = reply
    critic = make(max_wait_s=3000.0, max_parallel=2)
    with pytest.raises(ValueError, match="got status 401"):
        critic.say([problem("a"), problem("b")], ["y"] * 2, [1, 2])


def test_a_redirect_on_the_same_host_is_followed_with_the_request(
    server: Server, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_KEY", KEY)

    def reply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if handler.path == "/v1/chat/completions":
            send(handler, b"", 307, Location="/elsewhere")
        else:
            echo(handler, body)

    server.reply = reply
    assert make(api_key_env="TOY_KEY").say([problem("a")], ["b"], [1]) == ["on a|b"]
    (first, second) = server.requests
    assert (second[0], second[2]) == ("/elsewhere", first[2])


def test_a_redirect_to_elsewhere_is_refused(server: Server, make: Make, waits: list[float]) -> None:
    other = Server()
    try:
        for location in (
            f"{other.url}/chat/completions",
            other.url.replace("http:", "https:"),
            server.url.replace("127.0.0.1", "localhost"),
            "file:///etc/passwd",
            "gopher://127.0.0.1/",
            "http://[broken",
            "",
        ):
            server.reply = status(308, Location=location)
            # An empty one leads to itself, for ever.
            with pytest.raises(ValueError, match=r"redirects (\(308\); set|more than 3 times)"):
                make().say([problem("a")], ["b"], [1])
        server.reply = status(302, Location="/elsewhere")  # a GET would follow
        with pytest.raises(
            ValueError, match=r"redirects \(302\); set base_url to http://127.0.0.1/e"
        ):
            make().say([problem("a")], ["b"], [1])
        assert other.requests == []
    finally:
        other.close()
    assert {path for path, _, _ in server.requests} == {"/v1/chat/completions"}


@pytest.mark.parametrize(
    ("base_url", "expected"),
    [
        ("https://api.invalid/v1", "https://api.invalid/v1/chat/completions"),
        ("https://api.invalid/v1/", "https://api.invalid/v1/chat/completions"),
        ("http://localhost:8000", "http://localhost:8000/v1/chat/completions"),
        ("https://api.invalid/openai/v1", "https://api.invalid/openai/v1/chat/completions"),
        ("https://api.invalid/v1/chat/completions", "https://api.invalid/v1/chat/completions"),
    ],
)
def test_the_url_of_the_endpoint(base_url: str, expected: str, make: Make) -> None:
    assert make(base_url=base_url).url == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "file:///etc/passwd"}, "scheme 'file'"),
        ({"base_url": "ftp://host/v1"}, "scheme 'ftp'"),
        ({"base_url": "host:8000/v1"}, "scheme 'host'"),
        ({"base_url": "https:///v1"}, "host None"),
        ({"base_url": "http://host:port/v1"}, "critic base_url: Port"),
        ({"base_url": "http://[::1/v1"}, "critic base_url: "),
        ({"base_url": "http://ho st/v1"}, "holds a space"),
        ({"model": ""}, "critic model is empty"),
        ({"template": "{problem}"}, "expected one with {problem} and {attempt}"),
        ({"max_tokens": 0}, "critic max_tokens is 0, expected 1 or more"),
        ({"max_retries": -1}, "critic max_retries is -1, expected 0 or more"),
        ({"max_parallel": 0}, "critic max_parallel is 0"),
        ({"temperature": float("nan")}, "critic temperature is nan"),
        ({"timeout_s": 0.0}, "critic timeout_s is 0.0, expected seconds above 0"),
        ({"options": {"messages": [], "n": 2}}, "options set ['messages', 'n']"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    settings: dict[str, Any], message: str, make: Make
) -> None:
    with pytest.raises(ValueError) as caught:
        make(**settings)
    assert message in str(caught.value)


def test_secrets_in_the_url_are_refused_unseen(make: Make) -> None:
    for url in (f"https://user:{KEY}@host/v1", f"https://host/v1?key={KEY}", f"https://h/v1#{KEY}"):
        with pytest.raises(ValueError, match="api_key_env names") as caught:
            make(base_url=url)
        assert KEY not in str(caught.value)


def test_lists_that_do_not_belong_together_are_an_error(server: Server, make: Make) -> None:
    with pytest.raises(ValueError):
        make().say([problem("1")], ["1", "2"], [0, 1])
    assert make().say([], [], []) == []
    assert server.requests == []


def test_closing_wakes_who_waits_for_another_try(server: Server, make: Make) -> None:
    server.reply = status(503, Retry_After="3000")
    critic = make(max_wait_s=3000.0)
    came = threading.Event()
    said: list[object] = []

    def ask() -> None:
        try:
            said.append(critic.say([problem("a")], ["b"], [1]))
        except ValueError as error:
            said.append(str(error))

    def reply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        send(handler, b"", 503, Retry_After="3000")
        came.set()

    server.reply = reply
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert came.wait(GUARD_S)
    critic.close()
    thread.join(GUARD_S)
    assert not thread.is_alive()
    assert "(stopped)" in str(said[0])
