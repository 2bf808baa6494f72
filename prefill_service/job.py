"""PrefillJob: one request's life on a prefill worker, from command to committed export."""

import asyncio
import time
from collections.abc import Sequence

from opentelemetry.trace import Span

from engine.engine import Engine
from engine.loop import EngineLoop
from engine.types import BlockId, EngineRequest, HandoffRecord, PrefillTiming, SequenceOutput
from engine.worker_types import KvHandle, TransferStats
from kv_transfer.handoff.export import Export
from kv_transfer.handoff.exporter import Exporter
from kvrelay.errors import DeadlineExceeded, EngineError
from kvrelay.serving.telemetry import emit_span, span, traceparent
from kvrelay.wire.engine.handoff import handoff_record_to_bytes


class PrefillJob:
    """Computes one prompt here while its KV leaves for the reservation that `handle` names.

    Belongs to the event loop. `run` is called once; cancelling it is how a request is aborted, but not once
    `is_ending`: its clean-up would be cut short. `deadline` is in monotonic seconds; None = none.
    """

    def __init__(
        self,
        request: EngineRequest,
        handle: KvHandle,
        attempt: int,
        deadline: float | None,
        parent_traceparent: str,
    ) -> None:
        self.request = request
        self.handle = handle
        self.attempt = attempt
        self._deadline = deadline
        self._parent_traceparent = parent_traceparent
        self._first_output: asyncio.Future[SequenceOutput] = asyncio.get_running_loop().create_future()
        self._export: Export | None = None
        self.is_ending = False
        """Whether the job is freeing what it holds; it must not be cancelled any more."""

    def layer_ready(self, layer: int, num_tokens: int, block_ids: Sequence[BlockId]) -> None:
        """Take the engine's word that a layer's KV is final up to `num_tokens`."""
        if self._export is not None:
            self._export.layer_ready(layer, num_tokens, block_ids)

    def on_output(self, output: SequenceOutput) -> None:
        """Take the first token, or why there is none."""
        if output.error is not None:
            self._stop_waiting(output.error)
        elif not self._first_output.done():
            self._first_output.set_result(output)

    def _on_export_failed(self, error: EngineError) -> None:
        """Nobody would take over what is being computed."""
        self._stop_waiting(error)

    def _stop_waiting(self, error: EngineError) -> None:
        if not self._first_output.done():
            self._first_output.set_exception(error)
            self._first_output.exception()  # a job that is being aborted never asks for it

    async def run(self, engine_loop: EngineLoop, exporter: Exporter) -> TransferStats | None:
        """Compute, send and commit; the engine forgets the request before this returns.

        Returns:
            How the KV travelled; None when the request ended on its first token, so that there was nobody to send it
            to.

        Raises:
            DeadlineExceeded: The deadline passed.
            EngineError: The request was refused, or the hand-off failed.
        """
        request = self.request
        time_left = None if self._deadline is None else self._deadline - time.monotonic()
        with span(
            "prefill",
            self._parent_traceparent,
            request_id=str(request.request_id),
            num_tokens=len(request.token_ids),
            start_token=self.handle.start_token,
        ) as prefill_span:
            export = exporter.begin(self.handle, on_failed=self._on_export_failed)
            try:
                async with asyncio.timeout(time_left):
                    return await self._serve(engine_loop, export, prefill_span)
            except TimeoutError as error:
                raise DeadlineExceeded("the deadline passed during prefill") from error
            finally:
                self.is_ending = True
                self._export = None
                # The export may still be reading blocks: it ends first, then they are freed.
                await export.abort("the request ended")
                await engine_loop.call(self._remove)

    async def _serve(self, engine_loop: EngineLoop, export: Export, prefill_span: Span) -> TransferStats | None:
        self._export = export
        await engine_loop.call(lambda engine: engine.add_handoff(self.request))
        output = await self._first_output
        prefill_span.set_attribute("num_cached_tokens", output.num_cached_tokens)
        if output.finish_reason is not None:
            return None
        context = traceparent(prefill_span)
        stats = await export.finish(handoff_record_to_bytes(self._record(output, context)))
        emit_span(
            "kv.export",
            context,
            duration_ns=stats.total_ns,
            attributes={
                "num_bytes": stats.num_bytes,
                "num_frames": stats.num_frames,
                "exposed_ns": stats.exposed_ns,
                "transport": stats.transport,
            },
        )
        return stats

    def _remove(self, engine: Engine) -> None:
        engine.remove([self.request.request_id])

    @staticmethod
    def _record(output: SequenceOutput, trace_context: str) -> HandoffRecord:
        timing = output.prefill_timing or PrefillTiming(0, 0)
        return HandoffRecord(
            first_token_id=output.token_ids[0],
            first_logprobs=output.logprobs[0] if output.logprobs else None,
            finish_reason=output.finish_reason,
            matched_stop_token_id=output.matched_stop_token_id,
            num_cached_tokens=output.num_cached_tokens,
            prefill_ns=timing.prefill_ns,
            queue_ns=timing.queue_ns,
            traceparent=trace_context,
            draft_state=output.draft_state,
        )
