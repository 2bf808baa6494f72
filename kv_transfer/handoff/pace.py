"""Decides how many bytes a frame waits for before it leaves, from measured costs.

Streaming hides the transfer behind compute but pays a fixed cost per frame, on cores that compute may want; whatever
waits for company leaves after the last layer. Frames of `g` bytes, `n` bytes in all, cost `n / g` frames and leave the
time of `g` bytes uncovered; the sum is least at `g = sqrt(n * frame / byte)`. A short transfer goes at the end in any
case. Both costs are fitted to what past frames took. Owns no clock and no I/O.
"""

import math

DECAY = 0.98
"""Weight of a past observation per new one: about the last 50 frames count."""
MIN_OBSERVATIONS = 8.0
"""Weight of observations below which the prior stands."""
PRIOR_FRAME_S = 100e-6
PRIOR_BYTE_S = 1 / 2e9
SHORT_TRANSFER_S = 5e-3
"""What takes no longer than this is not worth streaming. Where both tiers share the cores, sending 60 tokens' KV while
they were computed shortened what came after the last layer by 4 ms and lengthened compute by 5."""
NUM_SIDES = 2
"""A frame is handled on both sides; what is measured is the sender's part."""


class FrameCost:
    """Fits `seconds = per_frame + per_byte * bytes` to the frames of one link by least squares with decay."""

    def __init__(self) -> None:
        self._weight = self._bytes = self._seconds = self._bytes_squared = self._product = 0.0
        self.per_frame_s = PRIOR_FRAME_S
        self.per_byte_s = PRIOR_BYTE_S

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Take in one frame: its payload size and the time from reading its blocks until the transport took it."""
        size = float(num_bytes)
        self._weight = self._weight * DECAY + 1.0
        self._bytes = self._bytes * DECAY + size
        self._seconds = self._seconds * DECAY + seconds
        self._bytes_squared = self._bytes_squared * DECAY + size * size
        self._product = self._product * DECAY + size * seconds
        if self._weight < MIN_OBSERVATIONS:
            return
        spread = self._weight * self._bytes_squared - self._bytes * self._bytes
        if spread > 1e-3 * self._weight * self._bytes_squared:
            slope = (self._weight * self._product - self._bytes * self._seconds) / spread
            self.per_byte_s = max(slope, 0.0)
            self.per_frame_s = max((self._seconds - self.per_byte_s * self._bytes) / self._weight, 0.0)
        elif self._bytes > 0:
            # Frames of one size cannot tell the two apart: keep the frame cost, attribute the rest to the bytes.
            self.per_byte_s = max((self._seconds - self.per_frame_s * self._weight) / self._bytes, 0.0)

    def frame_bytes(self, num_bytes: int) -> int | None:
        """Return how large a frame had best be at least, of a hand-off of `num_bytes`; None = all leave at the end."""
        if num_bytes * self.per_byte_s <= SHORT_TRANSFER_S:
            return None
        return min(num_bytes, round(math.sqrt(num_bytes * NUM_SIDES * self.per_frame_s / self.per_byte_s)))
