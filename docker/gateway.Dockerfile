# The capture gateway of compose.yaml, without torch and all else that only a trainer needs. Context: the repository.
# Any Debian with Python 3.11, the Python of the locks.
ARG BASE=python:3.11.14-slim-bookworm

# Thrown away, and with it all that pip is told: an index, wheels, a certificate.
FROM ${BASE} AS packages
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH_INDEX_URL
# "no": /opt/venv/packages stays empty, for whoever mounts packages there.
ARG INSTALL_PACKAGES=yes
COPY docker/extra docker/install-packages requirements/project.txt docker/gateway-packages.txt /build/
RUN /build/install-packages --constraints /build/project.txt --names /build/gateway-packages.txt

FROM ${BASE} AS program
COPY pyproject.toml docker/metadata.py /opt/harness-trainer/
RUN cd /opt/harness-trainer && python3 metadata.py && rm metadata.py
COPY capture_proxy /opt/harness-trainer/capture_proxy
COPY sandboxes /opt/harness-trainer/sandboxes
COPY harness_trainer /opt/harness-trainer/harness_trainer
RUN python3 -m compileall -q /opt/harness-trainer

FROM ${BASE}
COPY docker/prepare /tmp/prepare
RUN /tmp/prepare && rm /tmp/prepare
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/home/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /home/app
COPY --from=packages /opt/venv/packages /opt/venv/packages
COPY --from=program /opt/harness-trainer /opt/harness-trainer
USER 10001:10001
ENTRYPOINT ["python", "-m", "harness_trainer.supervision.part_host"]
