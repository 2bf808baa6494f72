"""Decides whether a hand-off streams layer by layer or goes as one frame set, from measured costs.

Streaming hides the transfer behind compute but pays a fixed cost per frame on a core that compute may want; one frame
set pays few frames but all of its bytes come after the last layer. The break-even is where the bytes' time equals the
extra frames' time, so both costs are fitted to what past frames took. Owns no clock and no I/O.
"""

DECAY = 0.98
"""Weight of a past observation per new one: about the last 50 frames count."""
MIN_OBSERVATIONS = 8.0
"""Weight of observations below which the prior stands."""
PRIOR_FRAME_S = 100e-6
PRIOR_BYTE_S = 1 / 2e9


class FrameCost:
    """Fits `seconds = per_frame + per_byte * bytes` to sent frames by least squares with decay."""

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

    def is_layerwise(self, num_bytes: int, num_layers: int) -> bool:
        """Return whether sending `num_bytes` after the last layer would cost more than a frame per layer."""
        return num_bytes * self.per_byte_s > num_layers * self.per_frame_s
