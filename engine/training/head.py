"""The draft head as a PyTorch module, unrolled over several draft steps as serving unrolls it.

Rows of all sequences lie side by side, without padding; only attention goes sequence by sequence. In the first step
every row sees true features. In step s row i stands for the s-th draft of a run that began at row i - s + 1: its
feature is what step s - 1 gave at row i - 1, and it attends to true rows up to i - s + 1 and to one row of each later
step.
The mathematics is that of `engine/spec/head/format.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.spec.head import format as names
from engine.spec.head.format import DraftHeadFile, num_finding_kv_heads, weight_shapes
from engine.training.target import TargetParts

_BUILT = (names.FIND_QUERY, names.FIND_KEY)
"""Not trained: `finding.py` builds them."""
_INITIAL_STD = 0.02
_SMALL = 0.1
"""Factor on the initial weights of what is added to the residual stream, so that training starts near the features."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one answer: rows [first, end) predict its tokens."""

    sequence_start: int
    """First row of the sequence; its position is 0."""
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class HeadBatch:
    """Sequences to run the head over."""

    token_ids: Tensor
    """[num_rows] int64."""
    taps: Tensor
    """[num_rows, num_taps * hidden_size] fp32."""
    sequence_starts: tuple[int, ...]
    """Row of each sequence's first token."""
    segments: tuple[Segment, ...]

    @property
    def following(self) -> Tensor:
        """[num_rows] int64, the token behind each row; -1 behind a sequence's last one, where the batch holds none."""
        following = self.token_ids.roll(-1)
        following[[start - 1 for start in self.sequence_starts]] = -1
        return following


@dataclass(frozen=True, slots=True)
class StepRows:
    """What one draft step gave."""

    rows: Tensor
    """[n] int64, the batch rows that it stands for."""
    hidden: Tensor
    """[n, hidden_size], normalised: ready to be multiplied with the output rows."""


@dataclass(frozen=True, slots=True)
class _Finding:
    """What the finding heads compare: of tokens alone, so the same in every draft step."""

    query: Tensor  # [n, their query heads, head_dim]
    key: Tensor  # [n, their KV heads, head_dim]

    def of(self, rows: Tensor) -> "_Finding":
        return _Finding(self.query[rows], self.key[rows])


@dataclass(frozen=True, slots=True)
class _Keys:
    key: Tensor  # [n, num_kv_heads, head_dim]
    value: Tensor  # [n, num_kv_heads, head_dim]
    offsets: tuple[int, ...]  # where each segment begins


class DraftHead(nn.Module):
    """A trainable head of one target."""

    def __init__(self, target: TargetParts, tap_layers: Sequence[int], vocab_ids: Tensor) -> None:
        super().__init__()
        self.target = target
        self.tap_layers = tuple(tap_layers)
        self.vocab_ids = vocab_ids
        """[num_vocab_ids] int64, ascending."""
        self.output_rows = target.lm_head[vocab_ids].contiguous()
        """[num_vocab_ids, hidden_size], frozen."""
        self.weights = nn.ParameterDict()
        for name, shape in weight_shapes(target.config, len(self.tap_layers)).items():
            values = torch.ones(shape) if len(shape) == 1 else torch.zeros(shape)
            self.weights[_key(name)] = nn.Parameter(values, requires_grad=name not in _BUILT)

    def initialise(self, generator: torch.Generator, tap_scales: Tensor) -> None:
        """Set the start of training: features are the last tap as the output rows read it, all else is small noise.

        Args:
            generator: Source of the noise.
            tap_scales: [num_taps] root mean square of each tap.
        """
        hidden = self.target.config.hidden_size
        with torch.no_grad():
            for name in weight_shapes(self.target.config, len(self.tap_layers)):
                weight = self.weight(name)
                if weight.dim() > 1:
                    std = _INITIAL_STD * (_SMALL if name in (names.O_PROJ, names.DOWN_PROJ) else 1.0)
                    weight.normal_(0.0, std, generator=generator)
            fuse = self.weight(names.FUSE)
            fuse.mul_(_SMALL / tap_scales.repeat_interleave(hidden))
            fuse[:, -hidden:] += torch.diag(self.target.final_norm / tap_scales[-1])
            self.weight(names.OUTPUT_NORM).fill_(float(self.target.final_norm.square().mean().sqrt()))

    def weight(self, name: str) -> Tensor:
        """Return a parameter by its name in the file."""
        weight: Tensor = self.weights[_key(name)]
        return weight

    def to_file(self, target_fingerprint: str) -> DraftHeadFile:
        """Return the head as it is stored."""
        shapes = weight_shapes(self.target.config, len(self.tap_layers))
        weights = {name: self.weight(name).detach() for name in shapes}
        return DraftHeadFile(
            self.tap_layers, self.vocab_ids.int(), weights, self.target.config.rms_norm_eps, target_fingerprint
        )

    def load(self, file: DraftHeadFile) -> None:
        """Take over the weights of a file for the same target, taps and vocabulary."""
        with torch.no_grad():
            for name, weight in file.weights.items():
                self.weight(name).copy_(weight)

    def unroll(self, batch: HeadBatch, num_steps: int, dtype: torch.dtype = torch.float32) -> list[StepRows]:
        """Draft `num_steps` tokens from every row of the segments, along the batch's own tokens.

        Args:
            batch: The sequences.
            num_steps: At least 1.
            dtype: In which weights are multiplied; attention, norms and the residual stream are fp32.
        """
        products = _Products(self, dtype)
        embedded, features = self._embedded(batch), self._features(batch, products)
        rotation, finding = self._rotation(batch), self._finding(batch, embedded)

        inputs = torch.cat([embedded, self._norm(features, names.FEATURE_NORM)], dim=1).to(dtype)
        base = self._keys(products, inputs, rotation, finding, ())
        steps: list[StepRows] = []
        drafted: list[_Keys] = []
        segments = list(batch.segments)
        rows = _rows(segments)
        residual = features[rows]
        inputs = inputs[rows]
        while True:
            query = self._query(products, inputs, rotation, finding, rows)
            attended = self._attend(query, base, drafted, segments, len(steps))
            behind = residual + products.linear(attended.to(dtype), names.O_PROJ)
            normed = self._norm(behind, names.MLP_NORM).to(dtype)
            inner = functional.silu(products.linear(normed, names.GATE_PROJ)) * products.linear(normed, names.UP_PROJ)
            given = behind + products.linear(inner.to(dtype), names.DOWN_PROJ)
            steps.append(StepRows(rows, self._norm(given, names.OUTPUT_NORM)))
            if len(steps) == num_steps:
                return steps
            # Row i goes on from what row i - 1 gave; the first row of each segment has nothing to go on from.
            lengths = [segment.end - segment.first for segment in segments]
            residual = torch.cat([part[:-1] for part in given.split(lengths)])
            segments = [Segment(each.sequence_start, min(each.first + 1, each.end), each.end) for each in segments]
            rows = _rows(segments)
            inputs = torch.cat([embedded[rows], self._norm(residual, names.FEATURE_NORM)], dim=1).to(dtype)
            offsets = tuple(accumulate((each.end - each.first for each in segments), initial=0))
            own_rotation = rotation[0][rows], rotation[1][rows]
            drafted.append(self._keys(products, inputs, own_rotation, finding.of(rows), offsets))

    def _embedded(self, batch: HeadBatch) -> Tensor:
        return self._norm(functional.embedding(batch.token_ids, self.target.embedding), names.EMBEDDING_NORM)

    def _features(self, batch: HeadBatch, products: "_Products") -> Tensor:
        """Of the position before each row; 0 at a sequence's start."""
        return _before(products.linear(batch.taps.to(products.dtype), names.FUSE), batch.sequence_starts)

    def _finding(self, batch: HeadBatch, embedded: Tensor) -> _Finding:
        dim = self.target.config.head_dim
        if not num_finding_kv_heads(self.target.config):
            nothing = embedded.new_zeros(len(embedded), 0, dim)
            return _Finding(nothing, nothing)
        with torch.no_grad():
            before = _before(embedded, batch.sequence_starts)
            query = torch.cat([embedded, before], dim=1)
            key = torch.cat([before, _before(before, batch.sequence_starts)], dim=1)
            return _Finding(
                functional.linear(query, self.weight(names.FIND_QUERY)).unflatten(1, (-1, dim)),
                functional.linear(key, self.weight(names.FIND_KEY)).unflatten(1, (-1, dim)),
            )

    def _attend(
        self, query: Tensor, base: _Keys, drafted: Sequence[_Keys], segments: Sequence[Segment], num_before: int
    ) -> Tensor:
        """Attention of one step's rows [n, num_heads, head_dim] -> [n, num_heads * head_dim]."""
        config = self.target.config
        groups = config.num_heads // config.num_kv_heads
        scale = config.head_dim**-0.5
        results: list[Tensor] = []
        offset = 0
        for number, segment in enumerate(segments):
            count = segment.end - segment.first
            if count == 0:
                continue
            own = query[offset : offset + count].unflatten(1, (config.num_kv_heads, groups)).permute(1, 2, 0, 3) * scale
            offset += count
            key = base.key[segment.sequence_start : segment.end - num_before].transpose(0, 1)
            value = base.value[segment.sequence_start : segment.end - num_before].transpose(0, 1)
            num_keys = key.shape[1]
            first_visible = segment.first - num_before - segment.sequence_start
            hidden_from = torch.ones(count, num_keys, dtype=torch.bool).triu_(first_visible + 1)
            scores = (own.flatten(1, 2) @ key.mT).unflatten(1, (groups, count)).masked_fill(hidden_from, -torch.inf)
            # Each step's rows begin one later than those of the step before, so the n-th row here goes on from the
            # n-th row of each.
            recent = [_part(keys, number, count) for keys in drafted]
            extra = [(own * key.transpose(0, 1)[:, None]).sum(-1, keepdim=True) for key, _ in recent]
            shares = torch.cat([scores, *extra], dim=-1).softmax(-1)
            attended = (shares[..., :num_keys].flatten(1, 2) @ value).unflatten(1, (groups, count))
            for index, (_, drafted_value) in enumerate(recent):
                share = shares[..., num_keys + index : num_keys + index + 1]
                attended = attended + share * drafted_value.transpose(0, 1)[:, None]
            results.append(attended.permute(2, 0, 1, 3).reshape(count, -1))
        return torch.cat(results)

    def _keys(
        self,
        products: "_Products",
        inputs: Tensor,
        rotation: tuple[Tensor, Tensor],
        finding: _Finding,
        offsets: tuple[int, ...],
    ) -> _Keys:
        dim = self.target.config.head_dim
        key = products.linear(inputs, names.K_PROJ).unflatten(1, (-1, dim))
        value = products.linear(inputs, names.V_PROJ).unflatten(1, (-1, dim))
        return _Keys(torch.cat([finding.key, _rotate(key, rotation)], dim=1), value, offsets)

    def _query(
        self,
        products: "_Products",
        inputs: Tensor,
        rotation: tuple[Tensor, Tensor],
        finding: _Finding,
        rows: Tensor,
    ) -> Tensor:
        query = products.linear(inputs, names.Q_PROJ).unflatten(1, (-1, self.target.config.head_dim))
        return torch.cat([finding.query[rows], _rotate(query, (rotation[0][rows], rotation[1][rows]))], dim=1)

    def _rotation(self, batch: HeadBatch) -> tuple[Tensor, Tensor]:
        starts = torch.tensor(batch.sequence_starts)
        num_rows = len(batch.token_ids)
        lengths = torch.diff(starts, append=torch.tensor([num_rows]))
        positions = torch.arange(num_rows) - starts.repeat_interleave(lengths)
        angles = positions.float()[:, None] * self.target.inverse_frequencies
        return angles.cos()[:, None], angles.sin()[:, None]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weight(name)
        return functional.rms_norm(x, weight.shape, weight, self.target.config.rms_norm_eps)


class _Products:
    """A head's matrices in the type they are multiplied in, each converted when first used, for all draft steps."""

    def __init__(self, head: DraftHead, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._head = head
        self._matrices: dict[str, Tensor] = {}

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply rows of the matrices' type; returns fp32."""
        if name not in self._matrices:
            self._matrices[name] = self._head.weight(name).to(self.dtype)
        return functional.linear(x, self._matrices[name]).float()


def _key(name: str) -> str:
    return name.removesuffix(".weight")  # a ParameterDict takes no dots


def _rows(segments: Sequence[Segment]) -> Tensor:
    return torch.cat([torch.arange(segment.first, segment.end) for segment in segments])


def _before(x: Tensor, sequence_starts: Sequence[int]) -> Tensor:
    """Of each row what the row before it holds; 0 at a sequence's start."""
    before = torch.cat([x.new_zeros(1, x.shape[1]), x[:-1]])
    is_start = torch.zeros(len(x), 1, dtype=torch.bool)
    is_start[list(sequence_starts)] = True
    return before.masked_fill(is_start, 0.0)


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _part(keys: _Keys, number: int, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` keys and values of a segment."""
    start = keys.offsets[number]
    return keys.key[start : start + count], keys.value[start : start + count]
