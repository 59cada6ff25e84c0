# The engine of compose.yaml without a GPU: vLLM for CPUs, and of this project what runs beside it. Context: the repository.
# Any Debian with Python 3.11, the Python of the locks.
ARG BASE=python:3.11.14-slim-bookworm

# Thrown away, and with it all that pip is told: an index, wheels, a certificate.
FROM ${BASE} AS packages
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH_INDEX_URL
# "no": /opt/venv/packages stays empty, for whoever mounts packages there.
ARG INSTALL_PACKAGES=yes
COPY docker/extra docker/install-packages requirements/engine-cpu.txt /build/
# pip, because vLLM answers /server_info only where it can list packages, and there we read whether weights can be updated.
RUN /build/install-packages --torch torch==2.13.0 --lock /build/engine-cpu.txt orjson==3.13.0 pip

FROM ${BASE} AS program
COPY pyproject.toml docker/metadata.py /opt/harness-trainer/
RUN cd /opt/harness-trainer && python3 metadata.py && rm metadata.py
COPY capture_proxy /opt/harness-trainer/capture_proxy
COPY sandboxes /opt/harness-trainer/sandboxes
COPY harness_trainer /opt/harness-trainer/harness_trainer
RUN python3 -m compileall -q /opt/harness-trainer

FROM ${BASE}
# vLLM's kernels for CPUs link against it.
RUN apt-get update -q && apt-get install -qy --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
COPY docker/prepare /tmp/prepare
RUN /tmp/prepare && rm /tmp/prepare
# Nothing is compiled at run time: a run on a CPU is eager anyway, and a compiler would be most of this image.
ENV TORCHDYNAMO_DISABLE=1
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/home/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HARNESS_TRAINER_ENGINE_PYTHON=/opt/venv/bin/python
WORKDIR /home/app
COPY --from=packages /opt/venv/packages /opt/venv/packages
COPY --from=program /opt/harness-trainer /opt/harness-trainer
USER 10001:10001
ENTRYPOINT ["python", "-m", "harness_trainer.supervision.part_host"]
