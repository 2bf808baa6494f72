"""The part of `kvrelay check` about the model: everything that gateway and workers would read, and what they would run.

Reads headers, shapes, tokenizer and template with the code that serves them, and asks `worker/compute/plan.py` for
kernels and KV blocks. Loads no weights, compiles and allocates nothing. Loads torch.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from decode_service.settings import DecodeSettings
from engine.config import ModelConfig
from engine.model.files.open import open_weights
from engine.model.files.source import ModelSource, resolve_model
from engine.model.kernel_choice import plan_kernels
from engine.model.weights import rope_factors
from kvrelay.cli.server.finding import Finding
from kvrelay.cluster.local import ClusterConfig
from kvrelay.errors import InvalidRequest
from kvrelay.serving.settings import parse_settings
from kvrelay.text.tokenizer import Tokenizer, load_tokenizer
from prefill_service.settings import PrefillSettings
from worker.compute.drafters import check_draft_model, num_draft_layers
from worker.compute.plan import kv_layout, num_kv_blocks, plain_compute, worker_device
from worker.settings import WorkerSettings


def check_model(cluster: ClusterConfig) -> Iterator[Finding]:
    """Say whether the cluster's roles could load the model, and what they would make of it."""
    # A hub id that is not here would be downloaded by `serve`; a check must not do that.
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        source = resolve_model(cluster.model)
    except InvalidRequest as error:
        if _looks_like_hub_id(cluster.model):
            yield Finding("model", "warning", f"{cluster.model} is not on this machine; serve would download it")
        else:
            yield Finding("model", "error", error.description)
        return
    yield Finding("model", "ok", f"{source.name}: {source.path}")
    config: ModelConfig | None = None
    try:
        config, reader = open_weights(cluster.model)
        rope_factors(config, reader)
    except InvalidRequest as error:
        yield Finding("model", "error", error.description)
    else:
        yield Finding(
            "model",
            "ok",
            f"{config.architecture}, {config.num_layers} layers, context {config.max_position:,} tokens, "
            f"vocabulary {config.vocab_size:,}; all {len(reader.shapes)} tensors are there",
        )
        yield from _check_workers(cluster, source, config)
    try:
        tokenizer = load_tokenizer(source.path)
    except InvalidRequest as error:
        yield Finding("tokenizer", "error", error.description)
    else:
        yield from _check_tokenizer(tokenizer)
        if config is not None and tokenizer.vocab_size > config.vocab_size:
            yield Finding(
                "tokenizer",
                "warning",
                f"has {tokenizer.vocab_size:,} tokens, the model {config.vocab_size:,}: prompts with one of the others "
                "will be refused",
            )


def _check_tokenizer(tokenizer: Tokenizer) -> Iterator[Finding]:
    ends = [tokenizer.token_bytes(token_id, False).decode(errors="replace") for token_id in tokenizer.eos_token_ids]
    if not ends:
        yield Finding("tokenizer", "warning", "no token ends a turn: answers go on until max_tokens or a stop string")
    if not tokenizer.has_chat_template:
        yield Finding("tokenizer", "warning", "has no chat template: chat prompts will be refused")
        return
    try:
        tokenizer.encode_chat([("user", "Hello")])
    except InvalidRequest as error:
        yield Finding("tokenizer", "warning", f"one question and nothing else is refused: {error.description}")
        return
    text = f"{tokenizer.vocab_size:,} tokens, with a chat template"
    yield Finding("tokenizer", "ok", f"{text}; a turn ends with {' or '.join(sorted(ends))}" if ends else text)


def _check_workers(cluster: ClusterConfig, source: ModelSource, config: ModelConfig) -> Iterator[Finding]:
    """Say what each tier's workers would run, once where both say the same."""
    tiers: list[tuple[str, list[Finding]]] = []
    common = ["--model", cluster.model, *cluster.worker_args]
    if cluster.num_prefill:
        settings: WorkerSettings = parse_settings(PrefillSettings, [*common, *cluster.prefill_args], "kvrelay check")
        tiers.append(("prefill", list(_check_worker(settings, source, config))))
    settings = parse_settings(DecodeSettings, [*common, *cluster.decode_args], "kvrelay check")
    tiers.append(("decode", list(_check_worker(settings, source, config))))
    if all(findings == tiers[0][1] for _, findings in tiers):
        yield from tiers[0][1]
        return
    for tier, findings in tiers:
        for finding in findings:
            yield Finding(f"{finding.subject} ({tier})", finding.verdict, finding.text)


def _check_worker(settings: WorkerSettings, source: ModelSource, config: ModelConfig) -> Iterator[Finding]:
    try:
        device = worker_device(settings.device)
        compute = plain_compute(settings, device)
        if compute is None:
            yield from _check_triton(settings, device)
            return
        choice = plan_kernels(compute, device, source, config)
        yield Finding(
            "kernels", "warning" if choice.is_fallback else "ok", f"{choice.kernels} on {device}: {choice.reason}"
        )
        layout = kv_layout(
            "",
            config,
            settings,
            is_native=choice.kernels == "native",
            num_draft_layers=num_draft_layers(settings, config),
        )
        num_blocks = num_kv_blocks(layout, settings)
        if settings.section == "decode" and settings.speculation == "draft":
            check_draft_model(settings, config)
    except InvalidRequest as error:
        yield Finding(error.field, "error", error.description)
        return
    num_tokens = num_blocks * layout.block_size
    mebibytes = num_blocks * layout.num_layers * layout.block_bytes / 2**20
    text = (
        f"{layout.bytes_per_token:,} bytes per token in {layout.dtype.value}; {num_blocks:,} blocks of "
        f"{layout.block_size} tokens per worker hold {num_tokens:,} tokens in {mebibytes:,.0f} MiB"
    )
    if num_tokens < config.max_position:
        yield Finding("KV cache", "warning", f"{text}, less than one full context of {config.max_position:,}")
    else:
        yield Finding("KV cache", "ok", text)


def _check_triton(settings: WorkerSettings, device: torch.device) -> Iterator[Finding]:
    if find_spec("triton") is None:
        yield Finding("kernels", "error", "triton's need the package triton, which the extra `gpu` brings")
        return
    reason = "asked for" if settings.compute == "triton" else "there is a GPU"
    yield Finding("kernels", "ok", f"triton on {device}: {reason}")
    if settings.num_blocks is not None:
        yield Finding("KV cache", "ok", f"{settings.num_blocks:,} blocks of {settings.block_size} tokens per worker")
    elif settings.kv_memory_mib is not None:
        yield Finding("KV cache", "ok", f"as many blocks as {settings.kv_memory_mib:,} MiB hold")
    else:
        yield Finding("KV cache", "ok", "as many blocks as the GPU has room for beside the weights")


def _looks_like_hub_id(name: str) -> bool:
    owner, slash, rest = name.partition("/")
    return bool(owner and slash and rest) and "/" not in rest and not Path(name).exists() and not name.startswith(".")
