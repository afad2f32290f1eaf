"""Write fmlab/planner/launchers/kubernetes_schema.json: what a PyTorchJob and its pods may say.

    pip download --no-deps kubernetes-validate kubeflow-training
    unzip each, then: python scripts/kubernetes_schema.py KUBERNETES_VALIDATE KUBEFLOW_TRAINING

The first has the API's own JSON schemas, the second the PyTorchJob's fields as classes of its client. Kept
are names, types, required fields and legal words of the kinds in KEPT; what lies below others is open.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "fmlab" / "planner" / "launchers" / "kubernetes_schema.json"
VERSION = "v1.37.0"
KEPT = [
    *("ConfigMap", "ObjectMeta", "PodTemplateSpec", "PodSpec", "Container", "ContainerPort", "EnvVar"),
    *("Volume", "VolumeMount", "ConfigMapVolumeSource", "EmptyDirVolumeSource", "Quantity"),
    *("PersistentVolumeClaimVolumeSource", "ResourceRequirements"),
]
JOB = {
    "PyTorchJob": "py_torch_job",
    "PyTorchJobSpec": "py_torch_job_spec",
    "RunPolicy": "run_policy",
    "ElasticPolicy": "elastic_policy",
    "ReplicaSpec": "replica_spec",
}
#: constants of kubeflow/training-operator, pkg/apis/kubeflow.org/v1/common_types.go
WORDS = {
    ("ReplicaSpec", "restartPolicy"): ["Always", "OnFailure", "Never", "ExitCode"],
    ("RunPolicy", "cleanPodPolicy"): ["", "All", "Running", "None"],
}
REQUIRED = {"PyTorchJobSpec": ["pytorchReplicaSpecs"]}
REPLICAS = ("Master", "Worker")
_TYPES = {"str": "string", "int": "integer", "bool": "boolean"}


def core(folder: Path) -> dict[str, Any]:
    """The kept kinds of the API, by their short names."""
    file = (
        folder / "kubernetes_validate" / "kubernetes-json-schema" / f"{VERSION}-local" / "_definitions.json"
    )
    found = json.loads(file.read_text())["$defs"]
    kinds = {
        name.rpartition(".")[2]: kind
        for name, kind in found.items()
        if ".core.v1." in name or ".meta.v1." in name
    }
    kinds["Quantity"] = {"type": ["string", "number"]}
    return {name: bare(kinds[name]) for name in KEPT}


def bare(schema: dict[str, Any]) -> dict[str, Any]:
    """Without texts; null is left out, and a reference to a kind that is not kept becomes any object."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition(".")[2]
        return {"$ref": f"#/$defs/{name}"} if name in KEPT else {}
    kept: dict[str, Any] = {}
    if "type" in schema:
        words = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        words = [word for word in words if word != "null"]
        kept["type"] = words[0] if len(words) == 1 else words
    for name in ("required", "enum"):
        if schema.get(name):
            kept[name] = [word for word in schema[name] if word is not None]
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            kept[name] = bare(schema[name])
    if "properties" in schema:
        kept["properties"] = {name: bare(each) for name, each in schema["properties"].items()}
        kept["additionalProperties"] = False
    return kept


def job(folder: Path) -> dict[str, Any]:
    """The kinds of the training operator, from the tables of its client's classes."""
    kinds = {}
    for name, module in JOB.items():
        text = (folder / "kubeflow" / "training" / "models" / f"kubeflow_org_v1_{module}.py").read_text()
        types, names = (
            dict(re.findall(r"'(\w+)': '([^']+)'", re.search(rf"{table} = {{(.*?)}}", text, re.S)[1]))  # type: ignore[index]
            for table in ("openapi_types", "attribute_map")
        )
        properties = {names[each]: of(kind) for each, kind in types.items()}
        for (where, what), words in WORDS.items():
            if where == name:
                properties[what]["enum"] = words
        kinds[name] = {"type": "object", "properties": properties, "additionalProperties": False}
        if name in REQUIRED:
            kinds[name]["required"] = REQUIRED[name]
    replica = {"$ref": "#/$defs/ReplicaSpec"}
    kinds["PyTorchJobSpec"]["properties"]["pytorchReplicaSpecs"] = {
        "type": "object",
        "properties": dict.fromkeys(REPLICAS, replica),
        "additionalProperties": False,
    }
    return kinds


def of(kind: str) -> dict[str, Any]:
    """The schema of a type as the client's classes write it."""
    name = re.sub("^(KubeflowOrgV1|V1)", "", kind)
    if name in _TYPES:
        return {"type": _TYPES[name]}
    return {"$ref": f"#/$defs/{name}"} if name in JOB or name in KEPT else {}


def main(argv: list[str]) -> int:
    kubernetes, kubeflow = map(Path, argv)
    (version,) = (path.name.split("-")[1].removesuffix(".dist") for path in kubeflow.glob("*.dist-info"))
    found = {
        "source": f"Kubernetes {VERSION} (API schemas of kubernetes-validate), the training operator's "
        f"client kubeflow-training {version}; both Apache-2.0; written by scripts/kubernetes_schema.py",
        "$defs": {**job(kubeflow), **core(kubernetes)},
    }
    TARGET.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
