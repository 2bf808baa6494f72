"""`kvrelay check`: would `kvrelay serve` with these flags work, and what would it start? Changes nothing."""

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from rich.table import Table
from rich.text import Text

from kvrelay.cli.console import FAILURE, out, readable_errors
from kvrelay.cli.serve import config_path

if TYPE_CHECKING:
    from engine.config import ModelConfig
    from kvrelay.cli.serve_settings import ServeSettings

Verdict = Literal["ok", "warning", "error"]
_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    verdict: Verdict
    text: str


def check(context: typer.Context) -> None:
    """Check settings, model, port and transports of a local cluster, and print the plan. Changes nothing."""
    from engine.serving.settings import parse_settings
    from kvrelay.cli.serve_settings import ServeSettings, check_keys

    # All other flags are those of serve.
    switches = {"--json": "print one JSON object instead"}
    settings = parse_settings(ServeSettings, context.args, "kvrelay check", switches)
    with readable_errors():
        config = config_path(context.args)
        if config is not None:
            check_keys(config)
        findings = list(_findings(settings))
        plan = _plan(settings, config)
    is_good = all(finding.verdict != "error" for finding in findings)
    if "--json" in context.args:
        shown = {"ok": is_good, "findings": [asdict(finding) for finding in findings], "plan": plan}
        print(json.dumps(shown))
    else:
        _show(findings, plan)
    if not is_good:
        raise typer.Exit(FAILURE)


def _plan(settings: "ServeSettings", config: Path | None) -> list[dict[str, str]]:
    cluster = settings.to_cluster(config)
    port = str(settings.port) if settings.port else "any free one"
    plan = [{"process": "gateway", "address": f"{settings.host}:{port}", "flags": " ".join(cluster.gateway_args)}]
    for role, count, own in (
        ("prefill", cluster.num_prefill, cluster.prefill_args),
        ("decode", cluster.num_decode, cluster.decode_args),
    ):
        for index in range(count):
            flags = " ".join([*cluster.worker_args, *own])
            plan.append({"process": f"{role}-{index}", "address": "127.0.0.1:any free one", "flags": flags})
    return plan


def _findings(settings: "ServeSettings") -> Iterator[Finding]:
    yield from _check_model(settings)
    yield _check_port(settings.host, settings.port)
    yield _check_transports(settings)
    yield _check_run_dir(settings.run_dir)


def _check_model(settings: "ServeSettings") -> Iterator[Finding]:
    from engine.errors import InvalidRequest
    from engine.model.source import resolve_model
    from engine.text.tokenizer import load_tokenizer

    # A hub id that is not here would be downloaded by `serve`; a check must not do that.
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        source = resolve_model(settings.model)
    except InvalidRequest as error:
        if _looks_like_hub_id(settings.model):
            yield Finding("model", "warning", f"{settings.model} is not on this machine; serve would download it")
        else:
            yield Finding("model", "error", error.description)
        return
    yield Finding("model", "ok", f"{source.name}: {source.path}")
    try:
        config = _read_config(source.kind, source.path)
        tokenizer = load_tokenizer(source.path)
    except InvalidRequest as error:
        yield Finding("model", "error", error.description)
        return
    yield Finding(
        "model",
        "ok",
        f"{config.architecture}, {config.num_layers} layers, context {config.max_position:,} tokens, "
        f"vocabulary {config.vocab_size:,}",
    )
    if tokenizer.vocab_size > config.vocab_size:
        yield Finding(
            "tokenizer", "error", f"has {tokenizer.vocab_size:,} tokens, more than the model's {config.vocab_size:,}"
        )
    elif not tokenizer.has_chat_template:
        yield Finding("tokenizer", "warning", "has no chat template: chat prompts will be refused")
    else:
        yield Finding("tokenizer", "ok", f"{tokenizer.vocab_size:,} tokens, with a chat template")
    yield _check_kv_memory(settings, config, source.kind)


def _read_config(kind: str, path: Path) -> "ModelConfig":
    from engine.model.gguf_config import read_gguf_config
    from engine.model.gguf_file import GgufFile
    from engine.model.hf_config import read_hf_config

    if kind == "gguf":
        return read_gguf_config(GgufFile(path))
    return read_hf_config(path)


def _check_kv_memory(settings: "ServeSettings", config: "ModelConfig", kind: str) -> Finding:
    from decode_service.settings import DecodeSettings
    from engine.config import KvDtype, default_kv_dtype
    from worker.settings import DEFAULT_KV_MEMORY_MIB

    defaults = DecodeSettings.model_fields
    is_on_gpu = (settings.device or "").startswith("cuda")
    # As workers choose it, but for a GGUF file of floats, which runs in fp32 too.
    is_native = settings.compute == "native" or (kind == "gguf" and settings.compute in (None, "auto"))
    dtype = settings.kv_dtype or (KvDtype.BF16 if is_on_gpu else default_kv_dtype(is_native=is_native))
    block_size = settings.block_size or defaults["block_size"].default
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    block_bytes = token_bytes * block_size
    if is_on_gpu and settings.num_blocks is None and settings.kv_memory_mib is None:
        return Finding(
            "KV cache", "ok", f"{token_bytes:,} bytes per token in {dtype.value}; as many as the GPU has room for"
        )
    memory_mib = settings.kv_memory_mib or DEFAULT_KV_MEMORY_MIB
    num_blocks = settings.num_blocks or memory_mib * 1024 * 1024 // block_bytes
    text = (
        f"{token_bytes:,} bytes per token in {dtype.value}; {num_blocks:,} blocks of {block_size} tokens per worker "
        f"hold {num_blocks * block_size:,} tokens in {num_blocks * block_bytes / 2**20:,.0f} MiB"
    )
    if num_blocks * block_size < config.max_position:
        return Finding("KV cache", "warning", f"{text}, less than one full context of {config.max_position:,}")
    return Finding("KV cache", "ok", text)


def _looks_like_hub_id(name: str) -> bool:
    owner, slash, rest = name.partition("/")
    return bool(owner and slash and rest) and "/" not in rest and not Path(name).exists() and not name.startswith(".")


def _check_port(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return Finding("port", "error", f"cannot listen on {host}:{port}: {error.strerror or error}")
    return Finding("port", "ok", f"{host}:{port} is free" if port else f"any free one on {host}")


def _check_transports(settings: "ServeSettings") -> Finding:
    from decode_service.settings import DecodeSettings
    from worker.transports import make_transports

    available = make_transports(DecodeSettings.model_validate({})).schemes
    if settings.prefill == 0:
        return Finding("transport", "ok", "none needed: decode workers prefill themselves")
    if settings.transport == "auto":
        return Finding("transport", "ok", f"auto takes the best of {', '.join(available)}")
    if settings.transport in available:
        return Finding("transport", "ok", settings.transport)
    return Finding("transport", "error", f"{settings.transport} is not available here; there is {', '.join(available)}")


def _check_run_dir(run_dir: Path | None) -> Finding:
    if run_dir is None:
        return Finding("run directory", "ok", "a new private one")
    existing = next(each for each in (run_dir, *run_dir.absolute().parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding("run directory", "error", f"{run_dir} cannot be written to")
    return Finding("run directory", "ok", str(run_dir))


def _show(findings: list[Finding], plan: list[dict[str, str]]) -> None:
    for finding in findings:
        line = Text.assemble((f"{finding.verdict:8}", _STYLES[finding.verdict]), (f"{finding.subject}: ", "bold"))
        out.print(line.append(finding.text), soft_wrap=True)
    table = Table(title="serve would start", title_justify="left")
    for name in ("process", "address", "flags"):
        table.add_column(name, overflow="fold")
    for row in plan:
        table.add_row(row["process"], row["address"], row["flags"])
    out.print(table)
