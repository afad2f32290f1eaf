"""Kubernetes: a PyTorchJob of Kubeflow's training operator (kubeflow.org/v1), one pod a host.

The operator tells every pod where the first one is (MASTER_ADDR, MASTER_PORT) and its number (RANK); torchrun
starts the ranks in it. run.toml comes along as a ConfigMap.
"""

import re
from collections.abc import Iterator
from typing import Any

from fmlab.planner.launchers.job import CONFIG, Job
from fmlab.planner.launchers.schema import faults, kinds
from fmlab.planner.launchers.yaml_text import yaml_text

FILES = ("pytorchjob.yaml",)

#: what Kubernetes calls a chip of each maker; the number asked for counts chips
RESOURCES = {
    "NVIDIA": "nvidia.com/gpu",
    "AMD": "amd.com/gpu",
    "Google": "google.com/tpu",
    "AWS": "aws.amazon.com/neuron",
}
_SETTINGS = "/etc/fmlab"

_HEAD = """# {title}
#   kubectl apply -f pytorchjob.yaml      the pods read the settings below, not the file {config}
# Queues, node selectors and volumes for checkpoints are your cluster's: add them to both pods' templates.
"""
_SCRIPT = """exec torchrun --nnodes {hosts} --nproc-per-node {ranks} --node-rank "$RANK" \\
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\
  -m {program} --config {folder}/{config}
"""
#: a name that a service may have (RFC 1035); the operator makes one for each pod, with "-worker-0" behind it
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
#: REGISTRY/NAME:TAG or …@sha256:DIGEST, as the OCI distribution specification writes them
_IMAGE = re.compile(
    r"([A-Za-z0-9.-]+(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:[A-Za-z0-9_][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)


def files(job: Job) -> dict[str, str]:
    """pytorchjob.yaml. Raises ValueError for what Kubernetes would not take."""
    settings, training = objects(job)
    if found := [*lint_settings(settings), *lint_job(training)]:
        raise ValueError(f"Kubernetes would refuse pytorchjob.yaml: {'; '.join(found)}")
    head = _HEAD.format(title=job.title, config=CONFIG)
    return {"pytorchjob.yaml": f"{head}{yaml_text(settings)}---\n{yaml_text(training)}"}


def objects(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ConfigMap and the PyTorchJob."""
    named = {"name": job.name}
    replicas = {"Master": _replicas(job, 1)}
    if job.hosts > 1:
        replicas["Worker"] = _replicas(job, job.hosts - 1)
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": named, "data": {CONFIG: job.settings}}
    return settings, {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": named,
        "spec": {"nprocPerNode": str(job.ranks_per_host), "pytorchReplicaSpecs": replicas},
    }


def _replicas(job: Job, number: int) -> dict[str, Any]:
    script = _SCRIPT.format(
        hosts=job.hosts, ranks=job.ranks_per_host, program=job.program, folder=_SETTINGS, config=CONFIG
    )
    container = {
        "name": "pytorch",  # the operator looks for it
        "image": job.image,
        "command": ["bash", "-c"],
        "args": [script.removesuffix("\n")],
        "resources": {"limits": {RESOURCES[job.vendor]: job.chips_per_host}},
        "volumeMounts": [
            {"name": "settings", "mountPath": _SETTINGS},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 (a mount, of Docker's 64 MB)
        ],
    }
    volumes = [
        {"name": "settings", "configMap": {"name": job.name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    pod = {"spec": {"containers": [container], "volumes": volumes}}
    return {"replicas": number, "restartPolicy": "Never", "template": pod}


# region lint
def lint_settings(settings: Any) -> Iterator[str]:
    """What is wrong with a ConfigMap."""
    yield from faults(settings, kinds()["ConfigMap"], "ConfigMap", kinds())


def lint_job(job: Any) -> Iterator[str]:
    """What is wrong with a PyTorchJob: its schema's faults, or else what no schema says."""
    found = list(faults(job, kinds()["PyTorchJob"], "PyTorchJob", kinds()))
    yield from found or _rules(job)


def _rules(job: Any) -> Iterator[str]:
    if (job.get("apiVersion"), job.get("kind")) != ("kubeflow.org/v1", "PyTorchJob"):
        yield f"{job.get('apiVersion')} {job.get('kind')} is no kubeflow.org/v1 PyTorchJob"
    name = job.get("metadata", {}).get("name", "")
    if not _NAME.fullmatch(name):
        yield (
            f"metadata.name: {name!r} must be lower-case letters, digits and hyphens, at most 52, first a "
            "letter and last no hyphen"
        )
    specs = job.get("spec", {}).get("pytorchReplicaSpecs", {})
    if specs.get("Master", {}).get("replicas") != 1:
        yield "spec.pytorchReplicaSpecs: one Master is needed, where all ranks meet"
    for role, replica in specs.items():
        yield from _pod_rules(f"{role}.template.spec", replica.get("template", {}).get("spec", {}))


def _pod_rules(where: str, pod: Any) -> Iterator[str]:
    containers = pod.get("containers", [])
    if [each["name"] for each in containers].count("pytorch") != 1:
        yield f"{where}.containers: the operator looks for one called pytorch"
    volumes = {each["name"] for each in pod.get("volumes", [])}
    for each in containers:
        if not _IMAGE.fullmatch(each.get("image", "")):
            yield f"{where}: image {each.get('image', '')!r} is no REGISTRY/NAME:TAG"
        for mount in each.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{where}: there is no volume {mount['name']!r}, which {each['name']} mounts"


# endregion
