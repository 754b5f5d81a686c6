"""A critic behind an HTTP endpoint that speaks OpenAI's chat completions. No torch, no client
library.

One request is one feedback. The key of the endpoint is read from a named environment variable and
goes into one header: not into errors, logs, cache or config. Answers are cached on disk by what
was asked, so that a run that is repeated or resumed asks nothing twice.
"""

from __future__ import annotations

import email.utils
import hashlib
import http.client
import ipaddress
import json
import logging
import math
import os
import re
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_binac import __version__
from megatron_binac.method_config import check_request
from megatron_binac.types import Prompt

logger = logging.getLogger(__name__)

SYSTEM = (
    "You review attempts at problems. Check the attempt step by step. Say whether it is right. If "
    "it is not, point to the first mistake and say how to go on from there. Do not write down the "
    "final answer. Be brief."
)
TEMPLATE = "Problem:\n{problem}\n\nAttempt:\n{attempt}\n\nYour feedback on the attempt:"
MAX_BYTES = 8 << 20
"""Longest response that is read."""
_MAX_REDIRECTS = 3
_MAX_ERROR_BYTES = 1 << 16


class HttpCritic:
    """Feedback from a model that somebody else serves.

    A try that meets a timeout, a lost connection, 408, 409, 425, 429, 5xx or a broken answer is
    repeated, after a wait that doubles and is never shorter than what Retry-After asks for (up to
    `max_wait_s`). A request that stays failed gives None, is counted, and is logged once.

    Example: ``HttpCritic(base_url="http://localhost:8000/v1", model="qwen")``
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        api_key_env: str | None = None,
        system: str = SYSTEM,
        template: str = TEMPLATE,
        max_tokens: int = 512,
        temperature: float = 1.0,
        options: Mapping[str, Any] | None = None,
        timeout_s: float = 120.0,
        max_retries: int = 5,
        first_wait_s: float = 1.0,
        max_wait_s: float = 60.0,
        max_parallel: int = 16,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """ValueError names the setting that does not fit.

        `base_url` is that of the API ("https://host/v1"); `api_key_env` the NAME of the variable
        with the key, None for an endpoint without one. In `template` the problem takes the place of
        {problem} and the attempt that of {attempt}. `options` are further fields of the request; a
        value of None drops a field that the endpoint does not take, such as {"seed": None}.
        `timeout_s` bounds each wait for a byte, and the whole body of one answer.
        """
        self.url = _endpoint(base_url)
        self._key = None if api_key_env is None else _read_key(api_key_env)
        for name, value, least in (
            ("max_tokens", max_tokens, 1),
            ("max_retries", max_retries, 0),
            ("max_parallel", max_parallel, 1),
            ("temperature", temperature, 0),
            ("first_wait_s", first_wait_s, 0),
            ("max_wait_s", max_wait_s, 0),
        ):
            if not least <= value < math.inf:
                raise ValueError(f"critic {name} is {value}, expected {least} or more")
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"critic timeout_s is {timeout_s}, expected seconds above 0")
        if not model:
            raise ValueError("critic model is empty, expected the name the endpoint serves it by")
        self._options = dict(options or {})
        check_request(template, self._options)
        self.model, self.system, self.template = model, system, template
        self.max_tokens, self.temperature = max_tokens, temperature
        self.timeout_s, self.max_retries, self.max_parallel = timeout_s, max_retries, max_parallel
        self.first_wait_s, self.max_wait_s = first_wait_s, max_wait_s
        self.num_sent = 0
        """Requests that went out, repeated ones included."""
        self.num_retried = 0
        self.num_cached = 0
        """Answers that the cache held."""
        self.num_answered = 0
        self.num_failed = 0
        """Feedbacks that stayed None."""
        self._cache = _Cache(Path(cache_dir)) if cache_dir is not None else None
        self._opener = _opener(self.url)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        host = urllib.parse.urlsplit(self.url)
        if self._key is not None and host.scheme == "http" and not _is_loopback(host.hostname):
            logger.warning("the critic's key goes to %s unencrypted; use https", host.hostname)

    def say(
        self, prompts: Sequence[Prompt], attempts: Sequence[str], seeds: Sequence[int]
    ) -> list[str | None]:
        """One feedback per attempt, in order, None where a request stayed failed.

        Raises ValueError where the endpoint turns every request away (401, 403, 404, a redirect to
        another host, a bad certificate), and where it has never answered anything so far.
        """
        stop = self._stop = threading.Event()
        seeds = [int(seed) for seed in seeds]  # JSON takes no numbers of numpy
        bodies = [
            self._body(prompt, attempt, seed)
            for prompt, attempt, seed in zip(prompts, attempts, seeds, strict=True)
        ]
        # The seed is in the key also where the endpoint takes none: siblings are samples, not one.
        keys = [_digest(self.url, body, seed) for body, seed in zip(bodies, seeds, strict=True)]
        answers = self._ask_all(dict(zip(keys, bodies, strict=True)), stop)
        failed = [reason for text, reason in map(answers.__getitem__, keys) if text is None]
        self.num_failed += len(failed)
        if failed and self.num_answered + self.num_cached == 0:
            raise ValueError(
                f"the critic at {self.url} answered none of {len(keys)} requests: {failed[0]}; "
                "check its base_url, its model and that it is up"
            )
        if failed:
            logger.warning(
                "%d of %d feedbacks failed, the first: %s", len(failed), len(keys), failed[0]
            )
        return [answers[key][0] for key in keys]

    def close(self) -> None:
        """End a `say` that another thread is in: who waits for another try gives up."""
        self._stop.set()

    def _ask_all(
        self, bodies: dict[str, bytes], stop: threading.Event
    ) -> dict[str, tuple[str | None, str]]:
        """Text, or None and why, by key; the first error ends it."""
        # Threads of this call alone: whoever forks between two calls has none of them.
        pool = ThreadPoolExecutor(self.max_parallel, thread_name_prefix="critic")
        try:
            futures = {
                key: pool.submit(self._feedback, key, body, stop) for key, body in bodies.items()
            }
            # A key that is refused is refused to all: not what the first request comes to, but the
            # first error.
            for future in wait(futures.values(), return_when=FIRST_EXCEPTION).done:
                future.result()
            answers = {key: future.result() for key, future in futures.items()}
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        return answers

    def _body(self, prompt: Prompt, attempt: str, seed: int) -> bytes:
        # Of the prompt its text alone: gold and meta are for graders.
        said = {"{problem}": prompt.text, "{attempt}": attempt}
        # In one pass, so that a problem that spells "{attempt}" stays as it is.
        asked = re.sub(r"\{problem\}|\{attempt\}", lambda m: said[m.group()], self.template)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*messages, {"role": "user", "content": asked}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            # Some servers hold seeds in 32 bits.
            "seed": seed & 0x7FFFFFFF,
        } | self._options
        return json.dumps({k: v for k, v in fields.items() if v is not None}).encode()

    def _feedback(self, key: str, body: bytes, stop: threading.Event) -> tuple[str | None, str]:
        """The text, or None and why; tries until there is one or the tries are used up."""
        held = self._cache.get(key) if self._cache is not None else None
        if held is not None:
            self._count("num_cached")
            return held, ""
        for num_tried in range(self.max_retries + 1):
            if stop.is_set():
                return None, "stopped"
            self._count("num_sent")
            try:
                text = self._ask(body)
            except _RefusedError as error:
                return None, self._line(error)
            except _TransientError as error:
                reason, asked_s = self._line(error), error.wait_s
            else:
                self._count("num_answered")
                if self._cache is not None:
                    self._cache.put(key, text)
                return text, ""
            if num_tried == self.max_retries:
                return None, f"{reason} ({num_tried + 1} tries)"
            # Spread between 0.5 and 1.5 by what is asked: those who failed together come apart.
            spread = 0.5 + int(key[:8], 16) / 2**32
            wait_s = max(self.first_wait_s * 2.0**num_tried * spread, asked_s)
            if stop.is_set() or _pause(stop, min(wait_s, self.max_wait_s)):
                return None, f"{reason} (stopped)"
            self._count("num_retried")
        raise AssertionError(f"max_retries is {self.max_retries}")

    def _ask(self, body: bytes) -> str:
        """One try: the text that came back."""
        url = self.url
        for _ in range(_MAX_REDIRECTS + 1):
            status, headers, data = self._post(url, body)
            if status not in (301, 302, 303, 307, 308):
                break
            target = _target(url, headers.get("Location") or "")
            # The others would turn the request into another one; and the key stays with its host.
            if status not in (307, 308) or _origin(target) != _origin(url):
                raise self._fatal(f"redirects ({status}); set base_url to {_place(target)}")
            url = target
        else:
            raise self._fatal(f"redirects more than {_MAX_REDIRECTS} times; check base_url")
        if status == 200:
            return self._scrub(_content(data))
        said = f"got status {status}: {_error_text(data)}"
        if status in (408, 409, 425, 429) or status >= 500:
            raise _TransientError(said, _retry_after(headers.get("Retry-After")))
        if status in (400, 413, 422):  # this request may be too long; the next one need not be
            raise _RefusedError(said)
        raise self._fatal(f"turns requests away (check base_url, model and api_key_env), {said}")

    def _post(self, url: str, body: bytes) -> tuple[int, Any, bytes]:
        """Status, headers and body of one POST, whatever the status is."""
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "User-Agent": f"megatron_binac/{__version__}",
        }
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(url, data=body, headers=headers, method="POST")
        try:
            with self._opener.open(request, timeout=self.timeout_s) as response:
                limit = MAX_BYTES if response.status == 200 else _MAX_ERROR_BYTES
                data = _read(response, limit, time.monotonic() + self.timeout_s)
                return response.status, response.headers, data
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise self._fatal(
                    f"has a certificate that does not hold ({cause.verify_message}); check "
                    "base_url, or point SSL_CERT_FILE at the authority that signed it"
                ) from None
            raise _TransientError(f"{type(cause).__name__}: {cause}") from None

    def _fatal(self, what: str) -> ValueError:
        return ValueError(f"the critic at {self.url} {self._line(what)}")

    def _scrub(self, text: str) -> str:
        """Text without the key, whoever has put it there."""
        return text if self._key is None else text.replace(self._key, "[key]")

    def _line(self, said: object) -> str:
        """What somebody else may have said, in one short line of ASCII."""
        # Scrubbed before it is cut, which could leave half of the key.
        text = ascii(self._scrub(str(said)))[1:-1]
        return text if len(text) <= 400 else f"{text[:400]}..."

    def _count(self, name: str) -> None:
        with self._lock:
            setattr(self, name, getattr(self, name) + 1)


class _TransientError(Exception):
    """Another try may go better, after `wait_s` seconds."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class _RefusedError(Exception):
    """This request gets no answer; another one may."""


class _Cache:
    """One small file an answer. Several processes may share the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._has_warned = False

    def get(self, key: str) -> str | None:
        """The text, None where there is none or its file is broken."""
        try:
            held = json.loads(self._path(key).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        text = held.get("text") if isinstance(held, dict) else None
        return text if isinstance(text, str) and held.get("key") == key else None

    def put(self, key: str, text: str) -> None:
        """Written in one move: a reader sees a whole file or none."""
        path = self._path(key)
        draft = path.with_name(f".{key}.{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps({"key": key, "text": text}), encoding="ascii")
            draft.replace(path)
        except OSError as error:  # the answer is there all the same
            with suppress(OSError):
                draft.unlink()
            with self._lock:
                is_first, self._has_warned = not self._has_warned, True
            if is_first:
                logger.warning("the critic's cache cannot be written: %s", error)

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"


# What goes out


def _endpoint(base_url: str) -> str:
    """The full URL of chat completions; the value itself is shown only where it is no secret."""
    try:
        parts = urllib.parse.urlsplit(base_url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"critic base_url: {error}; expected http(s)://HOST[:PORT]/v1") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"critic base_url has scheme {parts.scheme!r} and host {parts.hostname!r}, expected "
            "http(s)://HOST[:PORT]/v1"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            "critic base_url holds a user, a query or a fragment, expected http(s)://HOST/v1; a "
            "key belongs into the environment variable that api_key_env names"
        )
    if not re.fullmatch(r"[!-~]+", base_url):
        raise ValueError("critic base_url holds a space or a character that no URL has; fix it")
    path = parts.path.rstrip("/")
    if not path.endswith("/chat/completions"):
        path = f"{path or '/v1'}/chat/completions"
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def _read_key(name: str) -> str:
    """The key from its environment variable; errors show no value."""
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        # Not shown: it may be the key, put where its name belongs.
        raise ValueError(
            "critic api_key_env is not the name of an environment variable (capitals, digits, _); "
            "give the name, not the key"
        )
    key = os.environ.get(name, "").strip()
    if not key:
        raise ValueError(
            f"critic api_key_env is {name}, which is not set; export {name}, or set api_key_env to "
            "null for an endpoint without a key"
        )
    if not re.fullmatch(r"[!-~]+", key):
        raise ValueError(f"{name} holds a space or a character that no header takes; set it anew")
    return key


def _opener(url: str) -> urllib.request.OpenerDirector:
    """HTTP and HTTPS through the proxies of the environment: no redirects, no other scheme.

    Without urllib's error processor every status comes back as a response.
    """
    opener = urllib.request.OpenerDirector()
    # A server on this machine is not behind a proxy, whatever no_proxy forgot to say.
    local = _is_loopback(urllib.parse.urlsplit(url).hostname)
    opener.add_handler(urllib.request.ProxyHandler({} if local else None))
    opener.add_handler(urllib.request.HTTPHandler())
    opener.add_handler(urllib.request.HTTPSHandler(context=ssl.create_default_context()))
    opener.add_handler(urllib.request.UnknownHandler())
    return opener


def _is_loopback(host: str | None) -> bool:
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


def _digest(url: str, body: bytes, seed: int) -> str:
    """Key of the cache: everything that decides the answer, and nothing of who asks."""
    return hashlib.sha256(json.dumps([url, body.decode(), seed]).encode()).hexdigest()


def _pause(stop: threading.Event, seconds: float) -> bool:
    """Wait; True where the wait was broken off."""
    return stop.wait(seconds)


# What comes back


def _read(response: http.client.HTTPResponse, limit: int, deadline: float) -> bytes:
    """The body, at most `limit` bytes of it; an error's is cut, an answer's must be whole."""
    wanted = response.length
    parts: list[bytes] = []
    size = 0
    while wanted is None or size < wanted:
        # Not read: that one waits for all of the bytes, however slowly they drip.
        part = response.read1(min(1 << 16, limit + 1 - size))
        if not part:
            break
        parts.append(part)
        size += len(part)
        if size > limit:
            if response.status == 200:
                raise _RefusedError(f"the answer is longer than {limit} bytes")
            return b"".join(parts)[:limit]
        if time.monotonic() > deadline:
            raise _TransientError("the answer did not end in time; raise timeout_s")
    if wanted is not None and size < wanted and response.status == 200:
        raise _TransientError(f"the answer ended after {size} of {wanted} bytes")
    return b"".join(parts)


def _content(data: bytes) -> str:
    """The text of a chat completion; whatever else it may be is an error, never a crash."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        kind = type(error).__name__
        raise _TransientError(f"expected JSON ({kind}), got {_decoded(data)}") from None
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
    except (TypeError, LookupError):
        raise _TransientError(f"expected choices[0].message, got {_decoded(data)}") from None
    if not isinstance(text, str) or not text.strip():
        # No content is what a refusal has, or a model that used all of its tokens to think.
        finish = choice.get("finish_reason") if isinstance(choice, dict) else None
        raise _RefusedError(
            f"got no text; raise max_tokens or change the prompt (finish_reason {finish})"
        )
    # Half of a surrogate pair is legal JSON and no text that can be written down.
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _error_text(data: bytes) -> str:
    """What the body of an error says."""
    try:
        said = json.loads(data)
        error = said.get("error", said)
        said = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, RecursionError, AttributeError):
        return _decoded(data)
    return said if isinstance(said, str) else _decoded(data)


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _retry_after(value: str | None) -> float:
    """Seconds from now that a Retry-After header asks for (a number or a date), else 0."""
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _target(url: str, location: str) -> str:
    """Where a redirect leads, "" where to nowhere."""
    try:
        return urllib.parse.urljoin(url, location)
    except ValueError:
        return ""


def _origin(url: str) -> tuple[str, str | None, int | None]:
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
        return parts.scheme, parts.hostname, port
    except ValueError:
        return "", None, None


def _place(url: str) -> str:
    """A URL without its user and query, for a message."""
    try:
        parts = urllib.parse.urlsplit(url)
        return f"{parts.scheme}://{parts.hostname}{parts.path}" if parts.hostname else "nowhere"
    except ValueError:
        return "nowhere"
