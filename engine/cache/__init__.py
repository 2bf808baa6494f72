"""Block bookkeeping: the block pool, the prefix index and the KV layout. Torch-free."""
