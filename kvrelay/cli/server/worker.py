"""`kvrelay worker load | drain | flush-cache`: questions and orders to one worker itself."""

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer

from kvrelay.cli import options
from kvrelay.cli.console import FAILURE, err, out, print_json, readable_errors

app = typer.Typer(help="Ask one worker, or tell it what to do; the last two need --worker-control there.")

Address = Annotated[str, typer.Argument(help="The worker's own address, host:port, as `kvrelay status` shows it.")]


@app.command()
def load(address: Address, as_json: options.Json = False) -> None:
    """Show what a worker is doing."""
    from kvrelay.cluster.worker_client import WorkerClient

    async def ask() -> dict[str, object]:
        async with WorkerClient(address) as worker:
            return asdict(await worker.load())

    with readable_errors(address):
        found = asyncio.run(ask())
    if as_json:
        print_json(found)
    else:
        for name, value in found.items():
            out.print(f"{name:24}{value}", highlight=False)


@app.command()
def drain(
    address: Address,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.001, help="Longest wait for running requests in s.")
    ] = 60.0,
) -> None:
    """Have a worker refuse new requests, and wait for the running ones: exit code 1 if some still run."""
    from kvrelay.cluster.worker_client import WorkerClient

    async def tell() -> int:
        async with WorkerClient(address) as worker:
            return await worker.drain(timeout)

    with readable_errors(address):
        num_running = asyncio.run(tell())
    if num_running:
        err.print(f"{num_running} requests still run after {timeout:g} s")
        raise typer.Exit(FAILURE)
    out.print("drained")


@app.command("flush-cache")
def flush_cache(address: Address) -> None:
    """Have a worker forget every cached prefix that no request uses."""
    from kvrelay.cluster.worker_client import WorkerClient

    async def tell() -> int:
        async with WorkerClient(address) as worker:
            return await worker.flush_cache()

    with readable_errors(address):
        out.print(f"{asyncio.run(tell())} blocks forgotten")
