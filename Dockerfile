# Images that serve; they hold no PyTorch. Models come from the store, which is the volume /models. All packages are
# installed by hash from requirements/, which `make hashes` writes.
#
#   docker build --target cpu -t ingot:cpu .
#   docker run --rm -p 127.0.0.1:8000:8000 -p 127.0.0.1:8001:8001 -e INGOT_INSECURE=1 -v "$HOME/.ingot:/models:ro" ingot:cpu serve digits:1
#
# INGOT_INSECURE serves every client that reaches the ports; docs/serving.md has the command with TLS and API keys.

FROM python:3.11-slim AS wheel
WORKDIR /src
COPY requirements/build.txt requirements/
RUN pip install --no-cache-dir --require-hashes -r requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY ingot ingot
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .


FROM python:3.11-slim AS cpu-packages
COPY --from=wheel /wheels /wheels
COPY requirements/cpu.txt /wheels/
RUN python -m venv /opt/ingot \
    && /opt/ingot/bin/pip install --no-cache-dir --require-hashes -r /wheels/cpu.txt \
    && /opt/ingot/bin/pip install --no-cache-dir --no-deps --no-index /wheels/ingot_serve-*.whl \
    && /opt/ingot/bin/pip check


FROM python:3.11-slim AS cpu
COPY --from=cpu-packages /opt/ingot /opt/ingot
RUN useradd --uid 10001 --create-home ingot \
    && install -d -o ingot -g ingot /models
ENV PATH=/opt/ingot/bin:$PATH \
    INGOT_HOST=0.0.0.0 \
    INGOT_HOME=/models
USER 10001
WORKDIR /home/ingot
VOLUME /models
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s CMD ["python", "-c", "import os, ssl, urllib.request as r; e = os.environ.get; r.build_opener(r.ProxyHandler({}), r.HTTPSHandler(context=ssl._create_unverified_context())).open(('https' if e('INGOT_TLS_CERT') else 'http') + '://127.0.0.1:' + e('INGOT_HTTP_PORT', '8000') + '/v2/health/ready', timeout=2)"]
ENTRYPOINT ["ingot"]
CMD ["--help"]


# The virtual environment must find the same Python in both GPU stages: the distribution's, 3.12.
FROM ubuntu:24.04 AS gpu-packages
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
COPY requirements/gpu.txt /wheels/
RUN python3 -m venv /opt/ingot \
    && /opt/ingot/bin/pip install --no-cache-dir --require-hashes -r /wheels/gpu.txt \
    && /opt/ingot/bin/pip install --no-cache-dir --no-deps --no-index /wheels/ingot_serve-*.whl \
    && /opt/ingot/bin/pip check


FROM nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04 AS gpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=gpu-packages /opt/ingot /opt/ingot
RUN useradd --uid 10001 --create-home ingot \
    && install -d -o ingot -g ingot /models
ENV PATH=/opt/ingot/bin:$PATH \
    INGOT_HOST=0.0.0.0 \
    INGOT_HOME=/models
USER 10001
WORKDIR /home/ingot
VOLUME /models
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s CMD ["python", "-c", "import os, ssl, urllib.request as r; e = os.environ.get; r.build_opener(r.ProxyHandler({}), r.HTTPSHandler(context=ssl._create_unverified_context())).open(('https' if e('INGOT_TLS_CERT') else 'http') + '://127.0.0.1:' + e('INGOT_HTTP_PORT', '8000') + '/v2/health/ready', timeout=2)"]
ENTRYPOINT ["ingot"]
CMD ["--help"]
