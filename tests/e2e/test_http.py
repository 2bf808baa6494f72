"""Both doors of a real cluster: the same model, the same tokens."""

import asyncio
from typing import Any

from openai import AsyncOpenAI

from kvrelay.client import AsyncClient
from kvrelay.cluster.local import ClusterConfig, LocalCluster
from kvrelay.requests import SamplingOptions
from tests.settling import settle

QUESTION = "What is the capital of France? Answer in one sentence."


async def test_openais_client_gets_the_tokens_of_ours() -> None:
    config = ClusterConfig(http_port=0, worker_args=["--num-blocks", "512"])
    async with (
        LocalCluster(config) as cluster,
        AsyncClient(cluster.target) as ours,
        AsyncOpenAI(base_url=f"http://{cluster.http_target}/v1", api_key="none") as client,
    ):
        theirs: Any = client
        (model,) = (await theirs.models.list()).data
        for fields in (
            SamplingOptions(temperature=0.0, max_tokens=40),
            SamplingOptions(temperature=0.9, seed=7, max_tokens=40),
        ):
            answer = await theirs.chat.completions.create(
                model=model.id, messages=[{"role": "user", "content": QUESTION}], **fields
            )
            own = await ours.complete(messages=[("user", QUESTION)], **fields)
            assert answer.choices[0].message.content == own.text
            assert answer.usage.completion_tokens == len(own.token_ids)
        # One is left in the middle, and eight come at once.
        stream = await theirs.completions.create(model=model.id, prompt="Once upon a time", max_tokens=400, stream=True)
        async for _ in stream:
            break
        await stream.close()
        prompts = [f"{number} + 1 =" for number in range(8)]
        told = await asyncio.gather(
            *(theirs.completions.create(model=model.id, prompt=prompt, max_tokens=8) for prompt in prompts)
        )
        assert all(each.choices[0].text for each in told)
        await settle(ours, num_workers=2)
