"""From logits to token ids: the one sampling path and the noise it is keyed by."""
