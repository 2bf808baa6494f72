"""Peers that are HTTP servers with streamed completions: llama.cpp's `llama-server` and vLLM."""

import asyncio
import http.client
import json
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO

from benchmarks.peers.answers import PeerAnswer, PeerResult
from benchmarks.peers.process import JOB_TIMEOUT_S, ProcessGroup
from benchmarks.peers.tied import tied
from kvrelay.errors import EngineError

START_TIMEOUT_S = 600.0
LAST_WORDS = 1000
"""Characters of a server's log that are shown when it ends."""
_POLL_INTERVAL_S = 0.5
_HOST = "127.0.0.1"


class HttpPeer(ProcessGroup):
    """See `Peer`. Every request is a thread of this process, which reads server-sent events.

    Args:
        name: What tables call it.
        process: The server.
        port: Its port.
        path: Where completions are.
        body: Fields of every request besides prompt and length.
        length_field: How the server calls the number of tokens to generate.
        log: What the server writes.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        port: int,
        path: str,
        body: Mapping[str, object],
        length_field: str,
        log: IO[bytes],
    ) -> None:
        super().__init__(process)
        self.name = name
        self._port = port
        self._path = path
        self._body = dict(body)
        self._length_field = length_field
        self._log = log

    async def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, *, together: bool) -> PeerResult:
        """See `Peer.run`."""
        started = time.perf_counter()
        if together:
            jobs = (asyncio.to_thread(self._complete, prompt, max_tokens) for prompt in prompts)
            answers = await asyncio.gather(*jobs)
        else:
            answers = [await asyncio.to_thread(self._complete, prompt, max_tokens) for prompt in prompts]
        return PeerResult(tuple(answers), time.perf_counter() - started)

    def _complete(self, prompt: Sequence[int], max_tokens: int) -> PeerAnswer:
        started = time.perf_counter()
        body = {"prompt": list(prompt), self._length_field: max_tokens, "stream": True, "temperature": 0} | self._body
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=JOB_TIMEOUT_S)
        times = []
        try:
            connection.request("POST", self._path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise EngineError(f"{self.name} answered {response.status}: {response.read(200)!r}")
            for line in response:
                if _has_token(line):
                    times.append(time.perf_counter() - started)
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{self.name} does not answer: {error}") from error
        finally:
            connection.close()
        if not times:
            raise EngineError(f"{self.name} sent no token")
        return PeerAnswer(times[0], times[-1], max_tokens)

    async def wait_ready(self) -> None:
        """Wait until it serves.

        Raises:
            EngineError: It ended, or it took longer than ten minutes.
        """
        deadline = time.perf_counter() + START_TIMEOUT_S
        while not await asyncio.to_thread(self._is_healthy):
            if self.process.returncode is not None:
                raise EngineError(f"{self.name} ended:\n{self._last_words()}")
            if time.perf_counter() > deadline:
                raise EngineError(f"{self.name} was not ready within {START_TIMEOUT_S:g} s")
            await asyncio.sleep(_POLL_INTERVAL_S)

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-LAST_WORDS:]

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _has_token(line: bytes) -> bool:
    """Whether a line of the stream is an event that brings a token."""
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return False
    event = json.loads(line[len(b"data: ") :])
    if "choices" in event:
        return bool(event["choices"])
    # llama-server: the last event only sums up.
    return not event.get("stop", False)


@asynccontextmanager
async def llama_server(name: str, binary: str, model: str, num_threads: int) -> AsyncIterator[HttpPeer]:
    """Run `llama-server` with 16 slots around the block."""
    port = _free_port()
    arguments = ["--model", model, "--threads", str(num_threads), "--parallel", "16", "--ctx-size", str(16 * 1280)]
    arguments += ["--host", _HOST, "--port", str(port)]
    body = {"ignore_eos": True, "cache_prompt": False}
    async with _server([binary, *arguments]) as (process, log):
        peer = HttpPeer(name, process, port, "/completion", body, "n_predict", log)
        await peer.wait_ready()
        yield peer


@asynccontextmanager
async def vllm_server(name: str, python: str, folder: str) -> AsyncIterator[HttpPeer]:
    """Run vLLM's OpenAI-compatible server in bf16 around the block."""
    port = _free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "model"]
    command += ["--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "16"]
    command += ["--no-enable-prefix-caching", "--host", _HOST, "--port", str(port)]
    body = {"model": "model", "ignore_eos": True}
    async with _server(command) as (process, log):
        peer = HttpPeer(name, process, port, "/v1/completions", body, "max_tokens", log)
        await peer.wait_ready()
        yield peer


@asynccontextmanager
async def _server(command: Sequence[str]) -> AsyncIterator[tuple[asyncio.subprocess.Process, IO[bytes]]]:
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *tied(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        try:
            yield process, log
        finally:
            await ProcessGroup(process).end()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
