"""The reference engine: a small sparse-attention model on CPU, written to be read.

It has the shape of DeepSeek-V3.2 (one 512 + 64 row per token and layer, a lightning indexer whose
selection several layers share, top-k sparse attention) with seeded random weights, so that the
whole path through kvd can be run and compared bit for bit where no such model fits.

Read in this order: `config` (sizes), `cache` (where rows live), `tiles` (why the results do not
depend on chunking), `indexer` (which rows a query reads), `attention`, `model`, `generate`.
Only `hashing`, `drafts` and `bytes_tokenizer` work without torch.
"""
