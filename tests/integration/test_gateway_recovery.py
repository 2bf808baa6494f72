"""Workers that fail in the middle of requests: the client gets the tokens it would have got, or a typed error."""

import asyncio

import grpc
import grpc.aio
import pytest

from engine.model.files.source import ModelSource
from engine.worker_types import WorkerRole
from kvrelay.errors import ChecksumMismatch, DeviceError, LeaseExpired, PeerUnavailable, WorkerUnavailable
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import decode_service_pb2 as decode_pb2
from kvrelay.v1 import inference_service_pb2 as inference_pb2
from kvrelay.v1 import prefill_service_pb2 as prefill_pb2
from tests.fake_workers import FakeCluster, FakeDecodeWorker
from tests.integration.gateway_harness import ANSWER, PROMPT, Harness, harness, load_model, until

Model = tuple[ModelSource, Tokenizer]
pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model()


def check_complete(cluster: Harness, answer: object) -> None:
    assert answer.token_ids() == cluster.answer  # type: ignore[attr-defined]  # an Answer
    assert answer.text() == ANSWER  # type: ignore[attr-defined]  # an Answer


async def test_prefill_death_moves_to_another_prefill_worker(model: Model) -> None:
    async with harness(model, num_prefill=2) as cluster:
        cluster.prefills[0].dies_on_prefill = True
        answer = await cluster.generate(cluster.request())
        check_complete(cluster, answer)
        assert answer.complete[0].prefill_worker == "prefill-1"
        (supersede,) = cluster.decodes[0].seen(decode_pb2.SupersedeCommand)
        (prefill,) = cluster.prefills[1].seen(prefill_pb2.PrefillCommand)
        assert supersede.attempt == prefill.request.attempt == 2
        assert prefill.kv_handle.epoch == 2


async def test_prefill_death_without_another_is_prefilled_by_decode(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.prefills[0].dies_on_prefill = True
        answer = await cluster.generate(cluster.request())
        check_complete(cluster, answer)
        assert answer.complete[0].prefill_worker == "decode-0"
        assert len(cluster.decodes[0].seen(decode_pb2.SupersedeCommand)) == 1


@pytest.mark.parametrize("error", [WorkerUnavailable("draining"), PeerUnavailable("no route"), DeviceError("broken")])
async def test_prefill_error_is_retried_elsewhere(model: Model, error: Exception) -> None:
    async with harness(model, num_prefill=2) as cluster:
        cluster.prefills[0].error = error  # type: ignore[assignment]  # all of them are EngineErrors
        answer = await cluster.generate(cluster.request())
        check_complete(cluster, answer)
        assert answer.complete[0].prefill_worker == "prefill-1"


async def test_attempts_are_limited_and_the_error_is_typed(model: Model) -> None:
    async with harness(model, num_prefill=3, max_attempts=2) as cluster:
        for prefill in cluster.prefills:
            prefill.error = ChecksumMismatch("damaged")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.generate(cluster.request())
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS
        assert sum(len(prefill.seen(prefill_pb2.PrefillCommand)) for prefill in cluster.prefills) == 2
        await until(lambda: len(cluster.decodes[0].aborted) == 1)


async def test_prefill_death_after_its_commit_costs_nothing_once_the_first_token_is_there(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.decodes[0].may_generate.clear()
        call = asyncio.create_task(cluster.generate(cluster.request()))
        await until(lambda: len(cluster.decodes[0].commits) == 1)
        cluster.prefills[0].break_sessions()
        await until(lambda: not cluster.gateway.pool.usable(WorkerRole.PREFILL))
        cluster.decodes[0].may_generate.set()
        check_complete(cluster, await call)
        assert not cluster.decodes[0].seen(decode_pb2.SupersedeCommand)


async def test_first_token_lost_after_the_commit_is_computed_again(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.prefills[0].dies_before_first_token = True
        cluster.cluster.script.pace_s = 0.02  # so that decode is not through before the loss is noticed
        check_complete(cluster, await cluster.generate(cluster.request()))
        assert len(cluster.decodes[0].seen(decode_pb2.ReserveCommand)) == 2
        assert len(cluster.decodes[0].aborted) == 1


@pytest.mark.parametrize("dies_before_index", [1, 2, 11])
@pytest.mark.parametrize("num_decode", [1, 2])
async def test_decode_death_is_resumed_with_the_same_tokens(
    model: Model, dies_before_index: int, num_decode: int
) -> None:
    async with harness(model, num_decode=num_decode) as cluster:
        cluster.decodes[0].dies_before_index = dies_before_index
        answer = await cluster.generate(cluster.request())
        check_complete(cluster, answer)
        prompt = cluster.tokenizer.encode(PROMPT)
        resumed = cluster.decodes[-1].seen(decode_pb2.ReserveCommand)[-1].request
        assert resumed.attempt == 2
        assert resumed.num_prompt_tokens == len(prompt)
        assert list(resumed.token_ids) == prompt + cluster.answer[: len(resumed.token_ids) - len(prompt)]
        assert len(resumed.token_ids) >= len(prompt)
        assert answer.complete[0].usage.prompt_tokens == len(prompt)
        assert answer.complete[0].usage.completion_tokens == len(cluster.answer)
        assert answer.complete[0].decode_worker == cluster.decodes[-1].worker_id


async def test_stop_string_across_a_resume_is_found(model: Model) -> None:
    async with harness(model, num_decode=2) as cluster:
        stop = "is Paris, a ci"
        cluster.cluster.script.pace_s = 0.002
        middle = len(cluster.tokenizer.encode(ANSWER[: ANSWER.index("Paris")], add_special_tokens=False))
        cluster.decodes[0].dies_before_index = middle
        answer = await cluster.generate(cluster.request(stop=[stop]))
        assert answer.text() == ANSWER[: ANSWER.index(stop)]
        assert answer.complete[0].matched_stop_str == stop


async def test_lease_that_expired_is_reserved_anew(model: Model) -> None:
    async with harness(model, num_decode=2) as cluster:
        cluster.decodes[0].reserve_error = LeaseExpired("too slow")
        answer = await cluster.generate(cluster.request())
        check_complete(cluster, answer)


async def test_both_tiers_dying_in_one_request_is_survived(model: Model) -> None:
    async with harness(model, num_decode=2, num_prefill=2) as cluster:
        cluster.prefills[0].dies_on_prefill = True
        cluster.decodes[0].dies_before_index = 5
        check_complete(cluster, await cluster.generate(cluster.request()))


async def test_decode_tier_gone_for_good_is_unavailable(model: Model) -> None:
    async with harness(model, worker_wait_s=0.2) as cluster:
        cluster.decodes[0].may_generate.clear()
        call = asyncio.create_task(cluster.generate(cluster.request()))
        await until(lambda: len(cluster.decodes[0].commits) == 1)
        await cluster.decodes[0].stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_n_completions_survive_a_decode_death(model: Model) -> None:
    async with harness(model, num_decode=2) as cluster:
        cluster.decodes[0].dies_before_index = 4
        answer = await cluster.generate(cluster.request(n=4))
        for index in range(4):
            assert answer.token_ids(index) == cluster.answer


async def test_many_streams_survive_a_decode_death(model: Model) -> None:
    async with harness(model, num_decode=2, num_prefill=2) as cluster:
        cluster.cluster.script.pace_s = 0.005
        calls = [asyncio.create_task(cluster.generate(cluster.request())) for _ in range(24)]
        await until(lambda: len(cluster.decodes[0].commits) >= 8)
        cluster.decodes[0].break_sessions()
        for call in calls:
            check_complete(cluster, await call)


async def test_restarted_worker_is_used_under_its_new_incarnation(model: Model) -> None:
    async with harness(model) as cluster:
        decode = cluster.decodes[0]
        decode.incarnation = 2
        decode.break_sessions()
        await until(lambda: not cluster.gateway.pool.usable(WorkerRole.DECODE))
        await asyncio.sleep(0.2)
        # The process answers, but not as what the registry knows: nothing may be sent to it.
        assert not cluster.gateway.pool.usable(WorkerRole.DECODE)
        await decode.register(cluster.gateway.address)
        await until(lambda: bool(cluster.gateway.pool.usable(WorkerRole.DECODE)))
        check_complete(cluster, await cluster.generate(inference_pb2.GenerateRequest(text=PROMPT)))
        handle = cluster.prefills[0].seen(prefill_pb2.PrefillCommand)[0].kv_handle
        assert handle.incarnation == 2


@pytest.mark.parametrize("way", ["silent", "stalled"])
async def test_hung_decode_worker_is_left_for_another_in_mid_answer(model: Model, way: str) -> None:
    """Nothing is heard of it any more, or it says itself that its engine hangs: its streams go on elsewhere."""
    async with harness(model, num_decode=2, worker_silence_s=1.2) as cluster:
        victim, other = cluster.decodes
        cluster.cluster.script.pace_s = 0.02
        running = asyncio.create_task(cluster.generate(cluster.request()))
        await until(lambda: bool(victim.commits or other.commits))
        if other.commits:
            victim, other = other, victim
        await asyncio.sleep(0.1)
        assert victim.running
        victim.may_generate.clear()
        victim.is_silent, victim.is_stalled = way == "silent", way == "stalled"
        answer = await running
        check_complete(cluster, answer)
        assert answer.complete[0].decode_worker == other.worker_id
        assert answer.complete[0].num_attempts == 2
        assert victim.aborted
        await cluster.check_idle()
        # Once it moves again it is used again.
        victim.is_silent = victim.is_stalled = False
        await until(lambda: len(cluster.gateway.pool.usable(WorkerRole.DECODE)) == 2)


async def test_hung_only_decode_worker_is_waited_for(model: Model) -> None:
    async with harness(model, worker_silence_s=1.2) as cluster:
        (only,) = cluster.decodes
        only.may_reserve.clear()
        running = asyncio.create_task(cluster.generate(cluster.request()))
        await until(lambda: bool(only.commands))
        only.is_stalled = True
        await until(lambda: not cluster.gateway.pool.usable(WorkerRole.DECODE))
        await asyncio.sleep(0.8)
        only.is_stalled = False
        only.may_reserve.set()
        answer = await running
        check_complete(cluster, answer)
        assert answer.complete[0].num_attempts == 1


async def test_leases_are_renewed_while_their_prompts_wait(model: Model) -> None:
    async with harness(model) as cluster:
        (decode,), (prefill,) = cluster.decodes, cluster.prefills
        decode.lease_ttl_s = 0.4
        decode.break_sessions()
        await until(lambda: not cluster.gateway.pool.usable(WorkerRole.DECODE))
        await until(lambda: bool(cluster.gateway.pool.usable(WorkerRole.DECODE)))
        prefill.may_prefill.clear()
        running = asyncio.create_task(cluster.generate(cluster.request()))
        await until(lambda: len(decode.renewed) >= 3, timeout_s=5)
        prefill.may_prefill.set()
        check_complete(cluster, await running)
        assert len(set(decode.renewed)) == 1
        num_renewed = len(decode.renewed)
        await asyncio.sleep(1.2)
        assert len(decode.renewed) == num_renewed


async def test_prompts_beyond_what_prefill_can_use_wait_without_blocks(model: Model) -> None:
    async with harness(model, max_prefill_tokens=1) as cluster:
        (decode,), (prefill,) = cluster.decodes, cluster.prefills
        prefill.may_prefill.clear()
        running = [asyncio.create_task(cluster.generate(cluster.request(seed=seed))) for seed in range(5)]
        await until(lambda: cluster.gateway.prefill_gate.num_waiting == 3)
        await until(lambda: len(decode.leases) == 2)
        reserved = decode.seen(decode_pb2.ReserveCommand)
        assert len(reserved) == 2
        # One that waits goes away: its place is free, and nobody else is touched.
        begun = {command.request.sampling_params.seed for command in reserved}
        left = next(seed for seed in range(5) if seed not in begun)
        running[left].cancel()
        await until(lambda: cluster.gateway.prefill_gate.num_waiting == 2)
        prefill.may_prefill.set()
        for answer in await asyncio.gather(*(task for seed, task in enumerate(running) if seed != left)):
            check_complete(cluster, answer)
        await cluster.check_idle()


async def test_live_workers_name_is_refused_with_the_reason(model: Model) -> None:
    async with harness(model) as cluster:
        (decode,) = cluster.decodes
        impostor = FakeDecodeWorker(decode.worker_id, FakeCluster(cluster.cluster.script), incarnation=99)
        await impostor.start()
        try:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await impostor.register(cluster.gateway.address)
            assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
            assert decode.address in str(caught.value.details())
            check_complete(cluster, await cluster.generate(cluster.request()))
            assert not impostor.commands
            # Once the first is gone the name is free.
            await decode.stop()
            await until(lambda: not cluster.gateway.pool.usable(WorkerRole.DECODE))
            await impostor.register(cluster.gateway.address)
            await until(lambda: bool(cluster.gateway.pool.usable(WorkerRole.DECODE)))
            assert [info.incarnation for info in cluster.gateway.registry.workers(WorkerRole.DECODE)] == [99]
        finally:
            await impostor.stop()
