"""From a model's name to a trained head: text, features, training, file. Each goes on where an earlier run ended."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.cache.layout import KvLayout
from engine.config import CacheConfig, ModelConfig, SchedulerConfig, default_kv_dtype
from engine.engine import Engine
from engine.model.cpu.model import NativeModel
from engine.model.files.open import load_config
from engine.model.files.source import resolve_model
from engine.model.interface import TappedModel
from engine.model.kv_cache import KvCache
from engine.model.llama import LlamaModel
from engine.model.loader import load_model
from engine.spec.head.format import DraftHeadFile, load_head, save_head
from engine.training.corpus import Conversation, Corpus
from engine.training.coupling import measure_coupling
from engine.training.evaluate import Evaluator
from engine.training.features import Features, prepare_features
from engine.training.finding import build_finding
from engine.training.generate import Generator
from engine.training.head import DraftHead
from engine.training.log import TrainingLog
from engine.training.settings import GenerationSettings, TrainingSettings
from engine.training.target import load_target_parts
from engine.training.train import HistoryEntry, Trainer
from kvrelay.errors import InvalidRequest
from kvrelay.text.tokenizer import load_tokenizer

_TEXT, _FEATURES, _TRAINING = "text", "features", "training"
_RUN = "run.json"
_BLOCK_SIZE = 16
_STEP_TOKENS = 512
_HELD_OUT_EVERY = 40
"""One conversation of so many is never trained on."""
_MAX_HELD_OUT = 96
_TEMPERATURES = (1.0, 0.8)
"""At which the cost of the coupled noise is measured."""
_PROMPT_WEIGHT = 0.05
"""What a prompt token counts towards the head's vocabulary; an answer token counts 1."""

Progress = Callable[[str, float, str], None]
"""Called with (name of the part, share that is done, one line)."""


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """What came of a run."""

    path: Path
    log_path: Path
    history: tuple[HistoryEntry, ...]

    @property
    def best(self) -> HistoryEntry:
        """The evaluation of the head that was kept."""
        return max(self.history, key=lambda entry: entry.accepted_drafts[-1])


def train_drafter(
    model_name: str,
    out: Path,
    work_dir: Path,
    generation: GenerationSettings,
    training: TrainingSettings,
    progress: Progress,
    start_from: Path | None = None,
) -> TrainedHead:
    """Let a model write text, train a head on it and write the head's file and, beside it, the log of its training.

    Args:
        model_name: As `engine.model.files.source.resolve_model` takes it.
        out: The .safetensors file; the log gets the same name with .json.
        work_dir: Where text, features and checkpoints are kept; a run that is started again goes on from them.
        generation: How the text is written.
        training: How the head learns.
        progress: Told now and then.
        start_from: A head of the same model to go on from; None = a fresh one.

    Raises:
        InvalidRequest: Names what is wrong: the model, a setting, `out`, `work_dir` or `start_from`.
    """
    if out.suffix != ".safetensors":
        raise InvalidRequest("out", f"{out} must end in .safetensors")
    if not out.absolute().parent.is_dir():
        raise InvalidRequest("out", f"there is no folder {out.absolute().parent}")
    config = load_config(model_name)
    taps = training.tap_layers or default_tap_layers(config.num_layers)
    _check_taps(taps, config.num_layers)
    start = _load_start(start_from, config, taps) if start_from is not None else None
    model = load_model(model_name, num_threads=generation.num_threads or None)
    if not isinstance(model, LlamaModel | NativeModel):
        raise InvalidRequest("model", "runs on kernels that give no hidden states")
    _check_run(work_dir, model.fingerprint, generation.seed, training)
    conversations = write_text(model_name, model, work_dir / _TEXT, generation, progress)
    target = load_target_parts(model_name)
    held_out, learned = split(conversations)
    vocab_ids = choose_vocabulary([conversations[each] for each in learned], target.config, training.vocab_size)
    folder = work_dir / _FEATURES
    folder.mkdir(exist_ok=True)
    features = prepare_features(
        folder,
        model,
        target,
        taps,
        vocab_ids,
        conversations,
        lambda done, total: progress("features", done / total, ""),
    )
    head = DraftHead(target, taps, vocab_ids)
    if start is not None:
        head.load(start)
    else:
        head.initialise(torch.Generator().manual_seed(training.seed), tap_scales(features, len(taps)))
        build_finding(head, features.batch(learned[:1]).taps)
    folder = work_dir / _TRAINING
    folder.mkdir(exist_ok=True)
    trainer = Trainer(head, features, training, folder, [each.num_answer_tokens for each in conversations])
    name = resolve_model(model_name).name
    started_from = start_from.name if start_from is not None else None
    log = TrainingLog(out.with_suffix(".json"), name, head, conversations, held_out, generation, training, started_from)

    def keep(_: HistoryEntry) -> None:
        save_head(out, head.to_file(model.fingerprint), target.config)
        log.write(trainer.history)

    evaluator = Evaluator(head, features, held_out)
    trainer.run(learned, evaluator, keep, lambda share, line: progress("training", share, line))
    if not out.is_file():  # the run had already ended, with another output
        save_head(out, head.to_file(model.fingerprint), target.config)
    head.load(load_head(out, target.config))  # the best, which need not be the last
    couplings = [measure_coupling(head, features, held_out, temperature) for temperature in _TEMPERATURES]
    log.write(trainer.history, couplings)
    return TrainedHead(out, log.path, tuple(trainer.history))


def write_text(
    model_name: str, model: TappedModel, folder: Path, settings: GenerationSettings, progress: Progress
) -> list[Conversation]:
    """Let the model write until the folder holds enough; returns all its conversations."""
    tokenizer = load_tokenizer(resolve_model(model_name).path)
    num_blocks = (settings.num_streams + 1) * (settings.max_context // _BLOCK_SIZE + 2)
    kv_dtype = default_kv_dtype(is_native=isinstance(model, NativeModel))
    layout = KvLayout.of_model(model.fingerprint, model.config, _BLOCK_SIZE, kv_dtype)
    engine = Engine(
        model,
        KvCache(layout, num_blocks, model.device),
        CacheConfig(num_blocks, _BLOCK_SIZE, kv_dtype),
        SchedulerConfig(settings.num_streams, _STEP_TOKENS),
    )
    with Corpus(folder) as corpus:

        def on_progress(done: int, wanted: int) -> None:
            progress("text", min(1.0, done / wanted), f"{done:,} answer tokens")

        Generator(engine, tokenizer, settings).run(corpus, on_progress)
        conversations = corpus.conversations
    if len(split(conversations)[0]) == 0 or len(split(conversations)[1]) == 0:
        raise InvalidRequest("tokens", f"{len(conversations)} conversations are too few to train on")
    return conversations


def split(conversations: Sequence[Conversation]) -> tuple[list[int], list[int]]:
    """Return the places of held-out conversations and of those to learn from."""
    held_out = [place for place, each in enumerate(conversations) if each.index % _HELD_OUT_EVERY == 0][:_MAX_HELD_OUT]
    kept = set(held_out)
    return held_out, [place for place in range(len(conversations)) if place not in kept]


def choose_vocabulary(conversations: Iterable[Conversation], config: ModelConfig, size: int) -> Tensor:
    """Return the `size` most frequent tokens, end-of-sequence tokens always among them, [n] int64 ascending."""
    counts: defaultdict[int, float] = defaultdict(float)
    for conversation in conversations:
        for token_id in conversation.token_ids:
            counts[token_id] += _PROMPT_WEIGHT
        for first, end in conversation.answers:
            for token_id in conversation.token_ids[first:end]:
                counts[token_id] += 1.0
    # Tokens that never came fill up from the smallest id, which byte-pair vocabularies give to the most common.
    ranked = sorted(range(config.vocab_size), key=lambda token_id: (-counts[token_id], token_id))
    forced = sorted(config.eos_token_ids)
    chosen = dict.fromkeys([*forced, *ranked])
    return torch.tensor(sorted(list(chosen)[: min(size, config.vocab_size)]))


def default_tap_layers(num_layers: int) -> tuple[int, ...]:
    """Layers after a quarter, a half and all of the model."""
    return tuple(sorted({num_layers // 4, num_layers // 2, num_layers - 1}))


def tap_scales(features: Features, num_taps: int) -> Tensor:
    """Return each tap's root mean square over some text, [num_taps]."""
    taps = features.batch([0]).taps[1:]  # a first token's hidden states are outliers in many models
    scales: Tensor = taps.unflatten(1, (num_taps, -1)).square().mean(dim=(0, 2)).sqrt()
    return scales


def _check_taps(taps: Sequence[int], num_layers: int) -> None:
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] != num_layers - 1:
        raise InvalidRequest(
            "tap_layers", f"must be ascending and end with the model's last layer, {num_layers - 1}; not {list(taps)}"
        )


def _load_start(path: Path, config: ModelConfig, taps: Sequence[int]) -> DraftHeadFile:
    start = load_head(path, config, "start_from")
    if start.tap_layers != tuple(taps):
        raise InvalidRequest("start_from", f"{path} sees layers {list(start.tap_layers)}, not {list(taps)}")
    return start


def _check_run(work_dir: Path, fingerprint: str, seed: int, training: TrainingSettings) -> None:
    """Refuse a work folder of another run."""
    run = {"fingerprint": fingerprint, "seed": seed, "vocab_size": training.vocab_size}
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
        path = work_dir / _RUN
        if not path.exists():
            path.write_text(json.dumps(run))
            return
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest("work_dir", f"{work_dir} cannot be used: {error}") from error
    if found != run:
        names = ", ".join(name for name in run if found.get(name) != run[name])
        raise InvalidRequest("work_dir", f"{work_dir} belongs to another run: {names} differs")
