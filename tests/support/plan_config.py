"""A small configuration for ``chunkgraph plan``."""

CONFIG = """\
model:
  {num_layers: 8, hidden_size: 64, ffn_hidden_size: 256, num_attention_heads: 4, seq_length: 32}
pipeline: {pipeline_model_parallel_size: 2, virtual_pipeline_model_parallel_size: 2}
train: {num_microbatches: [4, 6, 2]}
"""
