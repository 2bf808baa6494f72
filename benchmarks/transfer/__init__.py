"""`kvrelay bench transfer`: how fast KV travels, beside what memory and a bare socket can do in the same minutes."""
