# Untested: chunkgraph and Megatron-LM on NVIDIA's PyTorch image, which has Transformer Engine.
#
#   docker build -t chunkgraph .
#   docker run --gpus all --ipc host chunkgraph chunkgraph doctor
ARG IMAGE=nvcr.io/nvidia/pytorch:25.10-py3
FROM ${IMAGE}

# For pretrain_gpt.py and its like; megatron-core itself comes from the package index.
ARG MEGATRON_LM=core_v0.19.0
RUN git clone --depth 1 --branch ${MEGATRON_LM} https://github.com/NVIDIA/Megatron-LM /opt/megatron-lm

COPY pyproject.toml README.md LICENSE /opt/chunkgraph/
COPY chunkgraph /opt/chunkgraph/chunkgraph
RUN pip install --no-cache-dir '/opt/chunkgraph[megatron]'

WORKDIR /opt/megatron-lm
CMD ["chunkgraph", "doctor"]
