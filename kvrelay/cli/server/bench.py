"""`kvrelay bench ...`: measurements of a local cluster, as a table, JSON and a picture.

Owns the flags; what is measured is in `benchmarks/`, which is imported only when a command runs.
"""

from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kvrelay.cli.console import err, out, readable_errors

if TYPE_CHECKING:
    from benchmarks.common.clusters import ClusterPlan
    from benchmarks.common.deliver import Measurement

app = typer.Typer(
    help="Measure a local cluster: latency under load, interference, speed by technique, transfer, speculation.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Model: TypeAlias = Annotated[str, typer.Option("--model", help="smollm2, a folder, a .gguf file or a Hugging Face id.")]
Transport: TypeAlias = Annotated[str, typer.Option("--transport", help="How KV travels: auto, shm, ucx or grpc.")]
WorkerArg: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--worker-arg", help="A flag for every worker, e.g. --worker-arg=--kv-dtype=bf16; may be repeated."),
]
JsonFile: TypeAlias = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write one JSON object; - is standard output.")
]
PlotFile: TypeAlias = Annotated[
    str | None,
    typer.Option("--plot", metavar="FILE.png", help="Draw the figures; needs kvrelay-server[bench]."),
]
Record: TypeAlias = Annotated[bool, typer.Option("--record", help="Append the figures to benchmarks/results.csv.")]
Rounds: TypeAlias = Annotated[
    int, typer.Option("--rounds", min=1, help="How often the variants take turns; figures are medians.")
]
Seed: TypeAlias = Annotated[int, typer.Option("--seed", help="Of prompts and arrivals.")]
OutputTokens: TypeAlias = Annotated[int, typer.Option("--output-tokens", min=2, help="Tokens of each answer.")]


@app.command()
def load(
    target: Annotated[
        str | None, typer.Option("--target", help="A running gateway, host:port; default: a cluster of its own.")
    ] = None,
    model: Model = "smollm2",
    prefill: Annotated[int, typer.Option("--prefill", min=0, max=64, help="Number of prefill workers.")] = 1,
    decode: Annotated[int, typer.Option("--decode", min=1, max=64, help="Number of decode workers.")] = 1,
    transport: Transport = "auto",
    worker_arg: WorkerArg = None,
    streams: Annotated[
        list[int] | None,
        typer.Option("--streams", min=1, help="Closed loop: requests kept running; may be repeated."),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option("--rate", help="Open loop: Poisson arrivals per second; may be repeated."),
    ] = None,
    trace: Annotated[
        str | None, typer.Option("--trace", help="Replay azure-conv, azure-code, mooncake, or a file of that form.")
    ] = None,
    trace_speed: Annotated[float, typer.Option("--trace-speed", help="How many times as fast a trace goes.")] = 1.0,
    trace_scale: Annotated[
        float, typer.Option("--trace-scale", help="What the lengths in a trace are multiplied with.")
    ] = 0.1,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests of each scenario.")] = 32,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens of each prompt.")] = 60,
    output_tokens: OutputTokens = 64,
    slo_ttft_ms: Annotated[
        float, typer.Option("--slo-ttft-ms", min=0, help="Goodput: longest time to the first token.")
    ] = 500.0,
    slo_tpot_ms: Annotated[
        float, typer.Option("--slo-tpot-ms", min=0, help="Goodput: longest mean time per further token.")
    ] = 100.0,
    seed: Seed = 0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    record: Record = False,
) -> None:
    """Serve many requests: closed loops, Poisson arrivals, or a recorded trace."""
    from benchmarks.load.run import LoadSettings, run_load

    with readable_errors(target or ""):
        settings = LoadSettings(
            cluster=_plan(model, transport, worker_arg, prefill, decode),
            target=target,
            streams=tuple(streams or (() if rate or trace else (4,))),
            rates=tuple(rate or ()),
            trace=trace,
            trace_speed=trace_speed,
            trace_scale=trace_scale,
            num_requests=requests,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            slo_ttft_ms=slo_ttft_ms,
            slo_tpot_ms=slo_tpot_ms,
            seed=seed,
        )
        _run("load", lambda progress: run_load(settings, progress), json_file, plot_file, record)


@app.command()
def interference(
    model: Model = "smollm2",
    transport: Transport = "auto",
    worker_arg: WorkerArg = None,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Streams that run throughout.")] = 4,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Tokens of each arriving prompt.")
    ] = 1200,
    long_output_tokens: Annotated[
        int, typer.Option("--long-output-tokens", min=1, help="Tokens generated for each arriving prompt.")
    ] = 8,
    interval: Annotated[float, typer.Option("--interval", help="Seconds from one arriving prompt to the next.")] = 1.0,
    window: Annotated[float, typer.Option("--window", help="Seconds of each quiet and each disturbed window.")] = 10.0,
    rounds: Rounds = 3,
    seed: Seed = 0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    record: Record = False,
) -> None:
    """Show what running streams feel of long prompts that arrive: in two tiers, and in one process for contrast."""
    from benchmarks.interference.run import InterferenceSettings, run_interference

    with readable_errors():
        settings = InterferenceSettings(
            cluster=_plan(model, transport, worker_arg),
            num_streams=streams,
            long_prompt_tokens=prompt_tokens,
            long_output_tokens=long_output_tokens,
            interval_s=interval,
            window_s=window,
            rounds=rounds,
            seed=seed,
        )
        _run("interference", lambda progress: run_interference(settings, progress), json_file, plot_file, record)


@app.command()
def ladder(
    model: Model = "smollm2",
    worker_arg: WorkerArg = None,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Requests; the upper rungs serve all at once.")] = 16,
    prefix_tokens: Annotated[
        int, typer.Option("--prefix-tokens", min=1, help="Tokens of the document that all requests share.")
    ] = 256,
    output_tokens: OutputTokens = 64,
    naive_tokens: Annotated[
        int, typer.Option("--naive-tokens", min=1, help="Tokens that the first rung computes in a round.")
    ] = 8,
    cached_requests: Annotated[
        int, typer.Option("--cached-requests", min=1, help="Requests that the second rung serves in a round.")
    ] = 1,
    rounds: Rounds = 3,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    record: Record = False,
) -> None:
    """Do the same work with one technique after the other, from recomputing everything to all of them."""
    from benchmarks.ladder.run import LadderSettings, run_ladder

    with readable_errors():
        settings = LadderSettings(
            cluster=_plan(model, "auto", worker_arg),
            num_streams=streams,
            prefix_tokens=prefix_tokens,
            output_tokens=output_tokens,
            naive_tokens=naive_tokens,
            cached_requests=cached_requests,
            rounds=rounds,
        )
        _run("ladder", lambda progress: run_ladder(settings, progress), json_file, plot_file, record)


@app.command()
def transfer(
    model: Model = "smollm2",
    worker_arg: WorkerArg = None,
    tokens: Annotated[int, typer.Option("--tokens", min=16, help="Tokens whose KV is moved each time.")] = 1000,
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="Element type of the SmolLM2-shaped KV.")] = "fp32",
    serving: Annotated[
        bool, typer.Option("--serving/--no-serving", help="Also measure whole requests and real prefill.")
    ] = True,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Measurements of each variant in a round.")] = 3,
    rounds: Rounds = 3,
    seed: Seed = 0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    record: Record = False,
) -> None:
    """Show how fast KV travels on each transport, beside a memory copy and a bare socket."""
    from benchmarks.transfer.run import TransferSettings, run_transfer
    from engine.config import KvDtype
    from kvrelay.errors import InvalidRequest

    with readable_errors():
        if kv_dtype not in tuple(KvDtype):
            raise InvalidRequest("kv_dtype", f"must be one of {', '.join(KvDtype)}")
        settings = TransferSettings(
            cluster=_plan(model, "auto", worker_arg),
            num_tokens=tokens,
            kv_dtype=KvDtype(kv_dtype),
            repeats=repeats,
            rounds=rounds,
            is_serving=serving,
            seed=seed,
        )
        _run("transfer", lambda progress: run_transfer(settings, progress), json_file, plot_file, record)


@app.command()
def spec(
    model: Model = "smollm2",
    worker_arg: WorkerArg = None,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", help="How tokens are drafted; may be repeated; default: ngram.")
    ] = None,
    category: Annotated[
        list[str] | None, typer.Option("--category", help="Only this kind of task; may be repeated; default: all.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Most tasks of each category; 0 = all.")] = 10,
    output_tokens: OutputTokens = 512,
    streams: Annotated[
        int, typer.Option("--streams", min=0, help="Streams at once in the last part; 0 leaves it out.")
    ] = 16,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Measure engines in this process: no gateway, less noise.")
    ] = False,
    rounds: Rounds = 1,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    record: Record = False,
) -> None:
    """Show what speculative decoding gains on Spec-Bench's questions and on editing tasks."""
    from benchmarks.spec.run import SpecSettings, run_spec

    with readable_errors():
        settings = SpecSettings(
            cluster=_plan(model, "auto", worker_arg),
            drafters=tuple(drafter or ("ngram",)),
            categories=tuple(category or ()),
            limit=limit or None,
            output_tokens=output_tokens,
            rounds=rounds,
            num_streams=streams,
            is_local=in_process,
        )
        _run("spec", lambda progress: run_spec(settings, progress), json_file, plot_file, record)


def _plan(model: str, transport: str, worker_arg: list[str] | None, prefill: int = 1, decode: int = 1) -> "ClusterPlan":
    from benchmarks.common.clusters import ClusterPlan
    from engine.model.files.source import resolve_model

    resolve_model(model)  # a download shows its progress, and a name that leads nowhere starts nothing
    return ClusterPlan(model, prefill, decode, transport, tuple(worker_arg or ()))


def _run(name: str, measure: "Measurement", json_file: str | None, plot_file: str | None, record: bool) -> None:
    from benchmarks.common.deliver import Outputs, run_and_deliver

    run_and_deliver(name, measure, Outputs(json_file, plot_file, record), out, err)
