"""The transfer benchmark: raw paths, forced ways of sending, and whole requests, each interleaved with its baseline."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.common.clusters import ClusterPlan, running_clusters, warm_up
from benchmarks.common.progress import BenchProgress
from benchmarks.common.prompts import PromptSource
from benchmarks.common.report import BarChart, BenchReport, JsonValue, Row, model_name, present, ratio
from benchmarks.common.stats import median_or_none, round_order
from benchmarks.common.stream import run_request, wait_idle
from benchmarks.transfer.paths import INPROC, MEMCPY, MEMCPY_BY_LAYER, SOCKET, filled_cache, open_paths
from benchmarks.transfer.prefill import MODES, HandoffSample, handoff_bench
from benchmarks.transfer.receiver_process import opened_receiver, receiver_process
from benchmarks.transfer.serving import ONE_PROCESS, ServingSamples, serving_row
from benchmarks.transfer.shapes import LLAMA_3_8B, KvShape, smollm2_shape
from engine.config import KvDtype
from engine.model.files.source import resolve_model
from kvrelay.serving.telemetry import configure_logging
from kvrelay.text.tokenizer import load_tokenizer

BASELINES = {"shm": MEMCPY, "ucx": SOCKET, "grpc": SOCKET, SOCKET: MEMCPY, INPROC: MEMCPY, MEMCPY_BY_LAYER: MEMCPY}
"""What each path is measured against."""
SHORT_TOKENS = 60
LONG_TOKENS = 1000
SERVED_OUTPUT_TOKENS = 9


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """What is moved how often."""

    cluster: ClusterPlan
    num_tokens: int = LONG_TOKENS
    """Tokens whose KV is moved over the raw paths."""
    kv_dtype: KvDtype = KvDtype.FP32
    """Element type of the SmolLM2-shaped KV."""
    repeats: int = 3
    """Measurements of each variant in a round."""
    rounds: int = 3
    is_serving: bool = True
    """Whether real prompts and clusters are part of it."""
    seed: int = 0

    def as_json(self) -> dict[str, JsonValue]:
        """Return the settings as the report shows them."""
        return {
            "model": model_name(self.cluster.model),
            "worker_args": list(self.cluster.worker_args),
            "num_tokens": self.num_tokens,
            "kv_dtype": self.kv_dtype.value,
            "repeats": self.repeats,
            "rounds": self.rounds,
            "is_serving": self.is_serving,
            "seed": self.seed,
        }


async def run_transfer(settings: TransferSettings, progress: BenchProgress) -> BenchReport:
    """Run all parts.

    Raises:
        EngineError: A transfer failed.
        ClusterError: A cluster does not start.
    """
    configure_logging("bench", level="error")  # the exporter is in this process, and standard output is the report's
    shapes = (smollm2_shape(settings.kv_dtype), LLAMA_3_8B)
    progress.begin(settings.rounds * (len(shapes) + 2 * settings.is_serving))
    seconds: dict[tuple[str, str], list[float]] = {}
    for shape in shapes:
        seconds |= await _raw_paths(settings, shape, progress)
    rows: list[Row] = [
        path_row(shape, path, seconds, settings.num_tokens) for shape in shapes for path in _paths(seconds)
    ]
    ratios: dict[str, float | None] = {
        f"{path}_over_{baseline}": worst_speed_ratio(seconds, path, baseline)
        for path, baseline in BASELINES.items()
        if path in ("shm", "ucx", "grpc")
    }
    ratios["shm_over_memcpy_by_layer"] = worst_speed_ratio(seconds, "shm", MEMCPY_BY_LAYER)
    if settings.is_serving:
        served = await _served(settings, _transports(seconds), progress)
        rows += [serving_row(samples, served[ONE_PROCESS, length]) for (_, length), samples in served.items()]
        ratios["exposed_over_total_1000_grpc"] = exposed_share(served)
        ratios["second_token_over_limit"] = worst_second_token(served)
        handoffs = await _forced_modes(settings, progress)
        rows += [_mode_row(mode, samples) for mode, samples in handoffs.items()]
        # What workers do, beside what it must not be slower than.
        ratios["layerwise_over_oneshot_60"] = ratio(
            [sample.total_s for sample in handoffs["adaptive"]], [sample.total_s for sample in handoffs["oneshot"]]
        )
    return BenchReport(
        "transfer",
        settings.as_json(),
        rows,
        present(ratios),
        charts=(_chart(shapes, seconds, settings.num_tokens),),
        notes=_NOTES,
    )


_NOTES = (
    "x_over_y: bandwidth of x in that of y, the lower of the two KV shapes.",
    "second_token_over_limit: time from first to second token in 1.5 decode steps plus exposed transfer; the worst.",
    "layerwise_over_oneshot_60: time of a 60-token hand-off as workers do it, in that of one frame set.",
    "inproc: both ends share one process and event loop.",
)


async def _raw_paths(
    settings: TransferSettings, shape: KvShape, progress: BenchProgress
) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of every path's measurements, by shape and path."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    cache = filled_cache(shape.layout(), settings.num_tokens)
    progress.say(f"opening paths for {shape.name}")
    async with (
        receiver_process() as process,
        opened_receiver(process, shape.layout(), settings.num_tokens) as receiver,
        open_paths(cache, receiver) as paths,
    ):
        for path in paths.values():
            await path.send(settings.num_tokens)  # connections and first touches
        for round_index in range(settings.rounds):
            progress.say(f"round {round_index + 1}, {shape.name}")
            for _ in range(settings.repeats):
                for name in round_order(tuple(paths), round_index):
                    seconds[shape.name, name].append(await paths[name].send(settings.num_tokens))
            progress.advance()
    return seconds


def _paths(seconds: Mapping[tuple[str, str], Sequence[float]]) -> list[str]:
    return list(dict.fromkeys(path for _, path in seconds))


def _transports(seconds: Mapping[tuple[str, str], Sequence[float]]) -> list[str]:
    return [path for path in _paths(seconds) if path not in (MEMCPY, MEMCPY_BY_LAYER, SOCKET, INPROC)]


def path_row(
    shape: KvShape, path: str, seconds: Mapping[tuple[str, str], Sequence[float]], num_tokens: int
) -> dict[str, JsonValue]:
    """Return the row of one raw path."""
    layout = shape.layout()
    num_bytes = layout.num_blocks(num_tokens) * layout.block_bytes * layout.num_layers
    median_s = median_or_none(seconds[shape.name, path]) or 0.0
    baseline = BASELINES.get(path)
    share = None if baseline is None else ratio(seconds[shape.name, baseline], seconds[shape.name, path])
    return {
        "what": f"KV of {shape.name}",
        "path": path,
        "num_tokens": num_tokens,
        "num_samples": len(seconds[shape.name, path]),
        "megabytes": num_bytes / 1e6,
        "gigabytes_per_s": num_bytes / median_s / 1e9 if median_s else None,
        "ms_per_1000_tokens": median_s * 1e6 / num_tokens,
        "baseline": baseline,
        "share_of_baseline": share,
    }


def worst_speed_ratio(seconds: Mapping[tuple[str, str], Sequence[float]], path: str, baseline: str) -> float | None:
    """Return a path's bandwidth in its baseline's, for the shape where it is lowest; None = not measured."""
    shapes = dict.fromkeys(shape for shape, _ in seconds)
    # Speed is bytes in time, so the baseline's time goes above.
    shares = [ratio(seconds.get((shape, baseline), ()), seconds.get((shape, path), ())) for shape in shapes]
    return min((share for share in shares if share is not None), default=None)


async def _served(
    settings: TransferSettings, transports: Sequence[str], progress: BenchProgress
) -> dict[tuple[str, int], ServingSamples]:
    """Send short and long prompts to a cluster of each transport and to a single process, by turns."""
    base = settings.cluster.with_args("--speculation", "none")
    plans = {ONE_PROCESS: replace(base, num_prefill=0)} | {
        scheme: replace(base, transport=scheme) for scheme in transports
    }
    samples = {(name, length): ServingSamples(name, length) for length in (SHORT_TOKENS, LONG_TOKENS) for name in plans}
    async with running_clusters(plans, progress) as clients:
        prompts = await PromptSource.load(clients[ONE_PROCESS], settings.seed)
        for client in clients.values():
            await warm_up(client, prompts)
        for round_index in range(settings.rounds):
            progress.say(f"round {round_index + 1}, requests")
            for repeat in range(settings.repeats):
                for length in (SHORT_TOKENS, LONG_TOKENS):
                    for name in round_order(tuple(plans), round_index):
                        token_ids = prompts.cut(length, f"{round_index} {repeat} {length}")
                        trace = await run_request(clients[name], token_ids, max_tokens=SERVED_OUTPUT_TOKENS)
                        samples[name, length].traces.append(trace)
                        await wait_idle(clients[name])
            progress.advance()
    return samples


def exposed_share(served: Mapping[tuple[str, int], ServingSamples]) -> float | None:
    """Return how much of a long prompt's transfer over gRPC compute does not hide; None = not measured."""
    samples = served.get(("grpc", LONG_TOKENS))
    return None if samples is None else ratio(samples.exposed_ms, samples.transfer_ms)


def worst_second_token(served: Mapping[tuple[str, int], ServingSamples]) -> float | None:
    """Return the second token's time over its limit, for the cluster and length where it is highest; None = no KV."""
    shares = [samples.second_token_over_limit for samples in served.values()]
    return max((share for share in shares if share is not None), default=None)


async def _forced_modes(settings: TransferSettings, progress: BenchProgress) -> dict[str, list[HandoffSample]]:
    """Hand 60-token prompts over in every mode, by turns."""
    progress.say("loading the model here")
    tokenizer = load_tokenizer(resolve_model(settings.cluster.model).path)
    prompts = PromptSource.from_texts(tokenizer.encode, settings.seed)
    samples: dict[str, list[HandoffSample]] = {mode: [] for mode in MODES}
    plan = settings.cluster
    async with handoff_bench(plan.model, "grpc", plan.worker_args, SHORT_TOKENS) as bench:
        for mode in MODES:
            await bench.run(prompts.cut(SHORT_TOKENS, f"warm-up {mode}"), mode)
        for round_index in range(settings.rounds):
            progress.say(f"round {round_index + 1}, ways of sending")
            for repeat in range(settings.repeats):
                for mode in round_order(tuple(MODES), round_index):
                    token_ids = prompts.cut(SHORT_TOKENS, f"{round_index} {repeat}")
                    samples[mode].append(await bench.run(token_ids, mode))
            progress.advance()
    return samples


def _mode_row(mode: str, samples: Sequence[HandoffSample]) -> dict[str, JsonValue]:
    return {
        "what": "prefill and hand-off",
        "path": f"grpc, {mode}",
        "num_tokens": SHORT_TOKENS,
        "num_samples": len(samples),
        "num_frames": samples[0].stats.num_frames,
        "total_ms": median_or_none([sample.total_s * 1e3 for sample in samples]),
        "exposed_ms": median_or_none([sample.stats.exposed_ns / 1e6 for sample in samples]),
    }


def _chart(shapes: Sequence[KvShape], seconds: Mapping[tuple[str, str], Sequence[float]], num_tokens: int) -> BarChart:
    paths = _paths(seconds)
    series = {}
    for shape in shapes:
        rows = [path_row(shape, path, seconds, num_tokens) for path in paths]
        series[shape.name] = [float(str(row["gigabytes_per_s"] or 0.0)) for row in rows]
    return BarChart("KV between two processes", "GB/s", tuple(paths), series)
