# The engine of compose.yaml on a GPU: vLLM's own image, and of this project what runs beside it. Context: the repository.
ARG BASE=vllm/vllm-openai:v0.32.0

# Thrown away, and with it all that pip is told: an index, wheels, a certificate.
FROM ${BASE} AS packages
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# "no": /opt/venv/packages stays empty, for whoever mounts packages there.
ARG INSTALL_PACKAGES=yes
COPY docker/extra docker/install-packages /build/
# The one library of `serve engine` that vLLM does not bring; and pip, without which vLLM does not answer /server_info.
USER 0
RUN /build/install-packages orjson==3.13.0 pip

FROM ${BASE} AS program
COPY pyproject.toml docker/metadata.py /opt/harness-trainer/
USER 0
RUN cd /opt/harness-trainer && python3 metadata.py && rm metadata.py
COPY capture_proxy /opt/harness-trainer/capture_proxy
COPY sandboxes /opt/harness-trainer/sandboxes
COPY harness_trainer /opt/harness-trainer/harness_trainer
RUN python3 -m compileall -q /opt/harness-trainer

FROM ${BASE}
USER 0
COPY docker/prepare /tmp/prepare
RUN /tmp/prepare --system-packages && rm /tmp/prepare
ENV PATH=/opt/venv/bin:${PATH} \
    HOME=/home/app PYTHONUNBUFFERED=1 HARNESS_TRAINER_ENGINE_PYTHON=/opt/venv/bin/python
WORKDIR /home/app
COPY --from=packages /opt/venv/packages /opt/venv/packages
COPY --from=program /opt/harness-trainer /opt/harness-trainer
USER 10001:10001
ENTRYPOINT ["python", "-m", "harness_trainer.supervision.part_host"]
