# The trainer of compose.yaml: supervisor, rollout runner and learner. Context: the repository.
# Any Debian with Python 3.11, the Python of the locks.
ARG BASE=python:3.11.14-slim-bookworm
# Where Node.js comes from, for agents from npm. An image without one (BASE, say) leaves agents such as pyagent.
ARG NODE=node:22.21.1-bookworm-slim

# Thrown away, and with it all that pip is told: an index, wheels, a certificate.
FROM ${BASE} AS packages
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH_INDEX_URL
# "no": /opt/venv/packages stays empty, for whoever mounts packages there.
ARG INSTALL_PACKAGES=yes
COPY docker/extra docker/install-packages requirements/project.txt /build/
RUN /build/install-packages --torch torch==2.13.0 --lock /build/project.txt pip

FROM ${NODE} AS node
USER 0
RUN mkdir -p /node/bin /node/lib && if [ -e /usr/local/bin/node ]; then \
        cp -a /usr/local/bin/node /node/bin/ && cp -a /usr/local/lib/node_modules /node/lib/ && \
        ln -s ../lib/node_modules/npm/bin/npm-cli.js /node/bin/npm && \
        ln -s ../lib/node_modules/npm/bin/npx-cli.js /node/bin/npx; fi

FROM ${BASE} AS program
COPY pyproject.toml docker/metadata.py /opt/harness-trainer/
RUN cd /opt/harness-trainer && python3 metadata.py && rm metadata.py
COPY capture_proxy /opt/harness-trainer/capture_proxy
COPY sandboxes /opt/harness-trainer/sandboxes
COPY jobs /opt/harness-trainer/jobs
COPY harness_trainer /opt/harness-trainer/harness_trainer
COPY examples /opt/harness-trainer/examples
RUN python3 -m compileall -q /opt/harness-trainer

FROM ${BASE}
COPY docker/prepare /tmp/prepare
RUN /tmp/prepare && rm /tmp/prepare
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/home/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /home/app
COPY --from=node /node /usr/local
COPY --from=packages /opt/venv/packages /opt/venv/packages
COPY --from=program /opt/harness-trainer /opt/harness-trainer
USER 10001:10001
ENTRYPOINT ["python", "-m", "harness_trainer.cli.in_compose"]
