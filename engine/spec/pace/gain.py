"""How much speculation gains: the time that a token takes at present, over that of plain decoding."""

_DECAY = 0.95
"""Weight of a past step per new one: about the last 20 steps count."""
_LEAST = 0.1


class Gain:
    """A running ratio of times. Owns no clock."""

    def __init__(self) -> None:
        self._plain = self._actual = 0.0

    def observe(self, plain_seconds: float, seconds: float) -> None:
        """Take in one step.

        Args:
            plain_seconds: What its tokens would have taken without speculation.
            seconds: What it took, drafting included.
        """
        self._plain = self._plain * _DECAY + plain_seconds
        self._actual = self._actual * _DECAY + seconds

    @property
    def factor(self) -> float:
        """Time of a token over its time in plain decoding, at most 1: plain decoding can be had at any time."""
        if self._plain <= 0.0:
            return 1.0
        return min(max(self._actual / self._plain, _LEAST), 1.0)
