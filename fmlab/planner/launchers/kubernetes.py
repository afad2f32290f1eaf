"""Kubernetes: a PyTorchJob of Kubeflow's training operator (kubeflow.org/v1), one pod a host.

The operator tells every pod where the first one is (MASTER_ADDR, MASTER_PORT) and its number (RANK); torchrun
starts the ranks in it. run.toml comes along as a ConfigMap.
"""

import json
from textwrap import indent

from fmlab.planner.launchers.job import CONFIG, Job

FILES = ("pytorchjob.yaml",)

#: what Kubernetes calls a chip of each maker; the number asked for counts chips
RESOURCES = {
    "NVIDIA": "nvidia.com/gpu",
    "AMD": "amd.com/gpu",
    "Google": "google.com/tpu",
    "AWS": "aws.amazon.com/neuron",
}

_JOB = """# {title}
#   kubectl apply -f pytorchjob.yaml      the pods read the settings below, not the file {config}
# Queues, node selectors and volumes for checkpoints are your cluster's: add them to both pods' templates.
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
data:
  {config}: |
{settings}---
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: {name}
spec:
  nprocPerNode: "{ranks}"
  pytorchReplicaSpecs:
    Master:
      replicas: 1
{pod}"""

_WORKERS = """    Worker:
      replicas: {others}
{pod}"""

_POD = """      restartPolicy: Never
      template:
        spec:
          containers:
            - name: pytorch
              image: {image}
              command: ["bash", "-c"]
              args:
                - >-
                  exec torchrun --nnodes {hosts} --nproc-per-node {ranks} --node-rank "$RANK"
                  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
                  -m {program} --config /etc/fmlab/{config}
              resources:
                limits:
                  {resource}: {chips}
              volumeMounts:
                - name: settings
                  mountPath: /etc/fmlab
                - name: shared-memory
                  mountPath: /dev/shm
          volumes:
            - name: settings
              configMap:
                name: {name}
            - name: shared-memory
              emptyDir:
                medium: Memory
"""


def files(job: Job) -> dict[str, str]:
    """pytorchjob.yaml."""
    pod = _POD.format(
        image=json.dumps(job.image),
        hosts=job.hosts,
        ranks=job.ranks_per_host,
        config=CONFIG,
        resource=RESOURCES[job.vendor],
        chips=job.chips_per_host,
        program=job.program,
        name=job.name,
    )
    text = _JOB.format(
        title=job.title,
        name=job.name,
        config=CONFIG,
        settings=indent(job.settings, "    "),
        ranks=job.ranks_per_host,
        pod=pod,
    )
    workers = _WORKERS.format(others=job.hosts - 1, pod=pod) if job.hosts > 1 else ""
    return {"pytorchjob.yaml": text + workers}
