"""`kvrelay bench spec`: what speculative decoding gains, by kind of task and by drafter."""
