"""The comparison: ratios, the choice of peers, and both ways of talking to them, with peers made here."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.clusters import ClusterPlan
from benchmarks.compare import CompareSettings, Samples, build_report
from benchmarks.peers import find
from benchmarks.peers.answers import PeerAnswer, PeerResult
from benchmarks.peers.http_peer import HttpPeer
from benchmarks.peers.kvrelay_peer import KvrelayPeer
from benchmarks.peers.process import ROOT, pipe_peer
from kvrelay.errors import EngineError, InvalidRequest
from tests.unit.benchmarks.fake_client import FakeClient

SETTINGS = CompareSettings(ClusterPlan(), ("openvino", "transformers"))


def samples(decode1: float, ttft_ms: float, prefill: float, total: float) -> Samples:
    return Samples([decode1], [ttft_ms], [prefill], [total])


def test_ratios_compare_with_a_peer_or_with_the_best() -> None:
    found = {
        "kvrelay": samples(200, 30, 2000, 900),
        "openvino": samples(100, 60, 1000, 300),
        "transformers": samples(20, 120, 500, 400),
    }
    assert build_report(SETTINGS, found).ratios == {
        "decode1_over_openvino": 2.0,
        "total16_over_best": 2.25,
        "prefill1000_over_openvino": 2.0,
        "ttft60_over_best": 0.5,
    }


def test_ratio_over_a_peer_that_is_not_there_is_absent() -> None:
    report = build_report(SETTINGS, {"kvrelay": samples(1, 1, 1, 1), "llamacpp_q4_0": samples(1, 1, 1, 2)})
    assert set(report.ratios) == {"decode1_over_llamacpp_q4_0", "total16_over_best", "ttft60_over_best"}
    assert build_report(SETTINGS, {"kvrelay": samples(1, 1, 1, 1)}).ratios == {}


def test_peer_that_is_unknown_or_not_here_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(InvalidRequest, match="none of"):
        find.chosen_peers(["nonsense"])
    with pytest.raises(InvalidRequest, match="--install openvino"):
        find.chosen_peers(["openvino"])
    assert "openvino" not in find.chosen_peers([])
    (tmp_path / "kvrelay/peers/openvino/lib/python3/site-packages/openvino_genai").mkdir(parents=True)
    assert find.chosen_peers(["openvino"]) == ["openvino"]


def test_decode_speed_leaves_the_first_token_out() -> None:
    assert PeerAnswer(first_s=1.0, last_s=3.0, num_tokens=9).decode_tokens_per_s == 4.0
    assert PeerAnswer(first_s=1.0, last_s=1.0, num_tokens=1).decode_tokens_per_s == 0.0
    assert PeerResult((PeerAnswer(1, 2, 3), PeerAnswer(1, 2, 4)), 2.0).num_tokens == 7


async def test_kvrelay_is_asked_like_the_others() -> None:
    client = FakeClient(lambda _prompt, max_tokens: [(0.01, 1)] * max_tokens)
    peer = KvrelayPeer(client)
    alone = await peer.run([(1,), (2,)], 3, together=False)
    assert client.most_running == 1
    together = await peer.run([(1,), (2,)], 3, together=True)
    assert client.most_running == 2
    assert alone.num_tokens == together.num_tokens == 6
    salts = [options["cache_salt"] for options in client.requests]
    assert len(set(salts)) == 4, "no answer may find anything of another one in a cache"


PEER_MODULE = """
import sys, time
from benchmarks.peers.loop import serve

def load():
    print("a library's chatter")
    def run_one(prompt, max_tokens):
        if prompt == [13]:
            sys.exit("bad luck")
        first = time.perf_counter()
        return first, first + max_tokens / 10
    return run_one, lambda prompts, max_tokens: [run_one(prompt, max_tokens) for prompt in prompts]

serve(load)
"""


@pytest.fixture
def peer_environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "made_up_peer.py").write_text(PEER_MODULE)
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}


async def test_peer_on_a_pipe_answers_each_job(peer_environment: dict[str, str], no_leaks: None) -> None:
    async with pipe_peer("made-up", sys.executable, "made_up_peer", "model", peer_environment) as peer:
        for together in (False, True):
            result = await peer.run([(1, 2), (3, 4)], 5, together=together)
            assert [answer.num_tokens for answer in result.answers] == [5, 5]
            assert result.answers[0].last_s - result.answers[0].first_s == pytest.approx(0.5)


async def test_paused_peer_takes_no_time_until_it_is_resumed(peer_environment: dict[str, str], no_leaks: None) -> None:
    async with pipe_peer("made-up", sys.executable, "made_up_peer", "model", peer_environment) as peer:
        peer.pause()
        job = asyncio.create_task(peer.run([(1,)], 1, together=False))
        await asyncio.sleep(0.3)
        assert not job.done()
        peer.resume()
        assert (await job).num_tokens == 1
        peer.pause()  # a stopped one is ended all the same


async def test_peer_that_ends_is_an_error_that_names_it(peer_environment: dict[str, str], no_leaks: None) -> None:
    async with pipe_peer("made-up", sys.executable, "made_up_peer", "model", peer_environment) as peer:
        with pytest.raises(EngineError, match="made-up ended"):
            await peer.run([(13,)], 1, together=False)


async def test_peer_does_not_outlive_its_parent(peer_environment: dict[str, str]) -> None:
    program = (
        "import asyncio, sys\n"
        "from benchmarks.peers.process import pipe_peer\n"
        "async def main():\n"
        "    async with pipe_peer('p', sys.executable, 'made_up_peer', 'm') as peer:\n"
        "        peer.pause()\n"
        "        print(peer.process.pid, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    # The peer's module is found through the variable that the parent passes on.
    environment = os.environ | peer_environment
    program = program.replace("'m')", f"'m', {peer_environment!r})")
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, env=environment, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 30))
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    deadline = time.monotonic() + 10
    while _is_alive(pid):
        assert time.monotonic() < deadline, "a stopped peer was left behind"
        await asyncio.sleep(0.05)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


class CompletionServer(BaseHTTPRequestHandler):
    """Streams as llama-server (`/completion`) and as vLLM (`/v1/completions`) do."""

    seen: list[dict[str, object]] = []  # noqa: RUF012 - the handler is made anew for each request

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen.append(body)
        if body["prompt"] == [13]:
            self.send_error(500)
            return
        self.send_response(200)
        self.end_headers()
        if self.path == "/completion":
            events: list[Any] = [{"content": "x", "stop": False}] * body["n_predict"] + [{"content": "", "stop": True}]
        else:
            events = [{"choices": [{"text": "x"}]}] * body["max_tokens"] + [{"choices": []}]
        for event in events:
            time.sleep(0.02)
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def completion_port() -> Iterator[int]:
    CompletionServer.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), CompletionServer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@contextlib.asynccontextmanager
async def http_peer(port: int, path: str, length_field: str, log: Path):  # type: ignore[no-untyped-def]  # a generator of the test's own
    process = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    with log.open("w+b") as file:
        peer = HttpPeer("made-up", process, port, path, {"ignore_eos": True}, length_field, file)
        try:
            yield peer
        finally:
            await peer.end()


@pytest.mark.parametrize(("path", "length_field"), [("/completion", "n_predict"), ("/v1/completions", "max_tokens")])
async def test_streamed_completions_are_timed(
    path: str, length_field: str, completion_port: int, tmp_path: Path
) -> None:
    async with http_peer(completion_port, path, length_field, tmp_path / "log") as peer:
        together = await peer.run([(1, 2), (3, 4)], 4, together=True)
        alone = await peer.run([(1, 2)], 4, together=False)
    assert [answer.num_tokens for answer in (*together.answers, *alone.answers)] == [4, 4, 4]
    for answer in alone.answers:
        assert answer.first_s > 0.015
        assert answer.last_s - answer.first_s > 0.055
        # The event that only sums up comes 20 ms after the last token and is none itself.
        assert alone.seconds - answer.last_s > 0.015
    assert CompletionServer.seen[-1] == {
        "prompt": [1, 2],
        length_field: 4,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
    }


async def test_server_that_fails_is_an_error(completion_port: int, tmp_path: Path) -> None:
    async with http_peer(completion_port, "/completion", "n_predict", tmp_path / "log") as peer:
        with pytest.raises(EngineError, match="answered 500"):
            await peer.run([(13,)], 1, together=False)


async def test_server_that_never_comes_up_shows_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    async with http_peer(1, "/completion", "n_predict", tmp_path / "log") as peer:
        peer._log.write(b"no such model")
        peer.process.kill()
        await peer.process.wait()
        with pytest.raises(EngineError, match="no such model"):
            await peer.wait_ready()
