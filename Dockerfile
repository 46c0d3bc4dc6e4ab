# A node, a seed or any other command of blocktrain. See docs/operating.md.
#
#   docker build -t blocktrain .
#   docker run --rm -p 4001:4001 -v blocktrain:/home/blocktrain/.blocktrain blocktrain \
#       blocktrain-bootstrap --publish examples/run.toml --listen /ip4/0.0.0.0/tcp/4001
#
# With CUDA: a base that brings the driver's libraries, and torch's own index for that build.
#
#   docker build -t blocktrain:cuda --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
#   docker run --rm --gpus all …
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# The CUDA bases have no Python; the others have it already.
RUN command -v python3 >/dev/null || (apt-get update && \
    apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*)
RUN useradd --create-home blocktrain && python3 -m venv /opt/blocktrain
ENV PATH=/opt/blocktrain/bin:$PATH

WORKDIR /src
COPY . .
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -c constraints.txt '.[demo]'

USER blocktrain
VOLUME /home/blocktrain/.blocktrain
# The first process must pass SIGTERM on: commands stop in order when they get it.
STOPSIGNAL SIGTERM
CMD ["blocktrain-node", "--help"]
