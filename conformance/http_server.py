"""mlx-lm's own server in a process of its own, on the loopback interface, and its clients."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

HOST = "127.0.0.1"
START_S = 60.0
REQUEST_S = 60.0
WITH_MLXIMPL = "import mlximpl; mlximpl.install(); from mlx_lm.server import main; main()"
MLX_LM_ALONE = "from mlx_lm.server import main; main()"
FIRST = (
    "import mlx.core as mx; mx.set_default_device(mx.cpu); "
    "import socketserver; socketserver.TCPServer.request_queue_size = 64; "
)
"""All clients may connect before the server has taken the first."""

Prompt = str | list[dict[str, str]]
"""The text of a completion, or the messages of a chat."""


class Answer(NamedTuple):
    """What the server says to one request.

    `cached` is how many tokens of the prompt it had in its store. `logprobs` are those of the tokens, in answers that
    are not streamed; of the others `began` and `ended` say between which moments they came.
    """

    text: str
    finish_reason: str
    cached: int
    logprobs: list[float]
    began: float
    ended: float


class Refused(Exception):
    """The server did not answer a request with an answer."""


class Server:
    """A server that runs within a `with` and is ended in any case.

    Args:
        model: the model's directory.
        home: where it may look for models and logs.
        options: of its command line.
        program: what the process runs.
    """

    def __init__(self, model: Path, home: Path, *options: str, program: str = WITH_MLXIMPL) -> None:
        self.command = [sys.executable, "-c", FIRST + program, "--model", str(model), "--host", HOST, *options]
        self.log = home / "server.log"
        self.env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _start(self) -> None:
        self.port = free_port()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*self.command, "--port", str(self.port)], env=self.env, stdout=log, stderr=subprocess.STDOUT
            )
        until = time.monotonic() + START_S
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > until:
                raise Refused(f"the server did not start: {self.said()}")
            time.sleep(0.05)

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def said(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-2000:]

    def healthy(self) -> bool:
        """Whether it answers, and can generate."""
        connection = HTTPConnection(HOST, self.port, timeout=REQUEST_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def ask(self, prompt: Prompt, max_tokens: int, stream: bool = True, **more: Any) -> Answer:
        """One request, greedy unless `more` says otherwise."""
        body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "stream": stream, **more}
        if stream:
            body["stream_options"] = {"include_usage": True}
        chat = not isinstance(prompt, str)
        body["messages" if chat else "prompt"] = prompt
        connection = HTTPConnection(HOST, self.port, timeout=REQUEST_S)
        try:
            path = "/v1/chat/completions" if chat else "/v1/completions"
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            first = response.readline()
            began = time.monotonic()
            said = (first + response.read()).decode()
        except OSError as error:
            raise Refused(f"no answer ({error}): {self.said()}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise Refused(f"{response.status}: {said}; {self.said()}")
        return _answer(_parts(said) if stream else [json.loads(said)])._replace(began=began, ended=time.monotonic())

    def ask_and_leave(self, prompt: str, max_tokens: int) -> bytes:
        """A request whose client is gone after the first line of the answer, which is returned."""
        connection = HTTPConnection(HOST, self.port, timeout=REQUEST_S)
        try:
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            return connection.getresponse().readline()
        finally:
            connection.close()

    def ask_at_once(self, prompts: list[Prompt], max_tokens: int, **more: Any) -> list[Answer]:
        """All the requests at the same time."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, max_tokens, **more), prompts))


def _parts(said: str) -> list[dict[str, Any]]:
    """The events of a stream, which must have come to its end."""
    events = [line.removeprefix("data: ") for line in said.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise Refused(f"the stream broke off: {said[-500:]}")
    return [json.loads(event) for event in events[:-1]]


def _answer(parts: list[dict[str, Any]]) -> Answer:
    text, reason, cached, logprobs = "", "", 0, list[float]()
    for part in parts:
        cached = part.get("usage", {}).get("prompt_tokens_details", {}).get("cached_tokens", cached)
        for choice in part["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            text += said.get("content") or ""
            reason = choice.get("finish_reason") or reason
            logprobs += [each["logprob"] for each in (choice.get("logprobs") or {}).get("content", [])]
    return Answer(text, reason, cached, logprobs, 0.0, 0.0)


def most_at_once(answers: list[Answer]) -> int:
    """How many of the answers came at the same time."""
    return max(sum(a.began <= one.began < a.ended for a in answers) for one in answers)


def free_port() -> int:
    """A port that the system has free now."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
    return port
