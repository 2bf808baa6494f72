"""Requests with every field at its extremes against a live cluster: a stream of tokens or a typed error, each of them.

Nobody dies of one, and a stream beside them gets its tokens.
"""

import asyncio
import math
import random
from collections import Counter
from typing import Any

import pytest
import structlog

from kvrelay.client import AsyncClient
from kvrelay.cluster.local import ClusterConfig, LocalCluster
from kvrelay.errors import EngineError, InvalidRequest
from kvrelay.results import Complete
from tests.settling import settle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_log = structlog.get_logger(__name__)

NUM_AT_ONCE = 16
FLOATS = [0.0, -0.0, 1e-45, 1e-44, 1e-38, 3e-38, 9e-6, 1.1e-5, 0.01, 0.7, 1.0, 2.0, -2.0, 2.1, 3e38, math.inf, math.nan]
INTS = [0, 1, 2, 40, 49_151, 49_152, 2**31 - 1, 2**31, 3_000_000_000, 2**32 - 1]
TOKENS = [0, 1, 2, 5, 300, 49_151, 49_152, 2**32 - 1]
WORDS = ["a", " the", "\ufffd", "<|im_end|>", "🙂", "\n", "x" * 40]
FIELDS: dict[str, list[Any]] = {
    "max_tokens": [1, 2, 8, 8, 8, 0, 8_191, 2**32 - 1],
    "min_tokens": [0, 1, 2, 8, 9, 2**32 - 1],
    "temperature": FLOATS,
    "top_p": FLOATS,
    "top_k": INTS,
    "min_p": FLOATS,
    "seed": [0, 1, 2**63, 2**64 - 1],
    "repetition_penalty": FLOATS,
    "presence_penalty": FLOATS,
    "frequency_penalty": FLOATS,
    "stop": [[word] for word in WORDS] + [WORDS, [""], ["y"] * 17],
    "stop_token_ids": [[], [2], [5, 300], TOKENS, [49_151]],
    "include_stop_str": [True, False],
    "ignore_eos": [True, False],
    "logit_bias": [{5: 100.0}, {2: -100.0}, {5: math.nan}, {49_152: 1.0}, dict.fromkeys(range(1025), 1.0)],
    "allowed_token_ids": [[2], [0], [5], [5, 300], [49_151], [49_152], list(range(300))],
    "bad_words": [[word] for word in WORDS] + [WORDS, [""]],
    "logprobs": [0, 1, 20, 21, 2**32 - 1],
    "skip_special_tokens": [True, False],
    "priority": [-(2**31), 0, 2**31 - 1],
    "cache_salt": ["", "tenant", "s" * 257],
    "num_draft_tokens": INTS,
    "n": [1, 2, 16, 17, 0],
}
TRAPS: list[dict[str, Any]] = [
    {"top_k": 3_000_000_000},
    {"allowed_token_ids": [2], "min_tokens": 1, "max_tokens": 8},
    {"allowed_token_ids": [2], "min_tokens": 1, "max_tokens": 8, "ignore_eos": True, "stop_token_ids": [2]},
    {"repetition_penalty": 1e-44},
    {"temperature": 1e-38},
    {"temperature": 3e-38},
]
"""Each of these once took two workers down, or gave wrong tokens."""


def _fields(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(sorted(FIELDS), rng.choice([1, 1, 2, 2, 3, 5]))
    return {"max_tokens": 8} | {name: rng.choice(FIELDS[name]) for name in names}


async def _outcome(client: AsyncClient, prompt: str, fields: dict[str, Any]) -> str:
    num_complete = 0
    try:
        async for event in client.generate(prompt, timeout_s=120, **fields):
            num_complete += isinstance(event, Complete)
    except EngineError as error:
        return error.reason
    assert num_complete == fields.get("n", 1)
    return "tokens"


async def _background(client: AsyncClient) -> tuple[int, ...]:
    answer = await client.complete("The sea", temperature=0.9, seed=4, max_tokens=300, ignore_eos=True, timeout_s=200)
    return answer.token_ids


@pytest.mark.parametrize("num_requests", [150, pytest.param(1_000, marks=pytest.mark.soak)])
async def test_token_stream_or_typed_error(num_requests: int) -> None:
    rng = random.Random(1)
    async with LocalCluster(ClusterConfig(num_decode=2)) as cluster, AsyncClient(cluster.target) as client:
        expected = await _background(client)
        pids = [process.pid for process in cluster.processes]
        # A token that two spellings of one bad word ban both ways: only its tokens can be allowed, so none is.
        word = (await client.tokenize(" sea"))[0]
        traps = [*TRAPS, {"allowed_token_ids": [word], "bad_words": ["sea"]}]
        waiting = iter([*traps, *(_fields(rng) for _ in range(num_requests - len(traps)))])
        counts: Counter[str] = Counter()

        async def work() -> None:
            for fields in waiting:
                counts[await _outcome(client, f"Say {rng.randrange(10_000)} things", fields)] += 1

        beside = asyncio.create_task(_background(client))
        await asyncio.gather(*(work() for _ in range(NUM_AT_ONCE)))
        assert await beside == expected
        _log.info("outcomes", **counts)
        assert counts.total() == num_requests
        assert set(counts) <= {"tokens", "INVALID_REQUEST", "CONTEXT_TOO_LONG", "NO_TOKEN_ALLOWED"}
        # Both kinds are there in numbers, or nothing was shown.
        assert counts["tokens"] > num_requests // 5
        assert counts["INVALID_REQUEST"] > num_requests // 5
        assert [process.pid for process in cluster.processes] == pids
        with pytest.raises(InvalidRequest, match="top_k"):
            await client.complete("x", **TRAPS[0])
        await settle(client)
