"""The KV cache: blocks, storage, plans. Knows slots and dtypes, no model."""
