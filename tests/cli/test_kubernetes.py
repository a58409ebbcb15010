"""The example of a Kubernetes Job: its arguments run on two machines, with what Kubernetes would set."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from tests.cli.test_multi_node import CONFIG, RECIPE, linux_only
from tests.helpers import warm
from tests.helpers.cold import ROOT, Finished
from tests.helpers.launch import free_port

DOCUMENTS: list[Any] = list(
    yaml.safe_load_all((ROOT / "examples/kubernetes/full_finetune.yaml").read_text("utf-8"))
)


def test_the_pods_find_pod_0_under_the_name_of_the_endpoint() -> None:
    service, job = DOCUMENTS
    pod, (container,) = job["spec"]["template"]["spec"], job["spec"]["template"]["spec"]["containers"]
    # A pod of an Indexed Job is called JOB-INDEX; with a headless service, JOB-INDEX.SUBDOMAIN resolves.
    (endpoint,) = (each for each in container["args"] if each.startswith("--rdzv-endpoint="))
    assert endpoint.partition("=")[2].startswith(f"{job['metadata']['name']}-0.{pod['subdomain']}:")
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert f"--nnodes={job['spec']['completions']}" in container["args"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nproc-per-node={gpus}" in container["args"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pod["volumes"]}
    for key in ("model.path", "data.source", "output_dir"):
        (path,) = (each.partition("=")[2] for each in container["args"] if each.startswith(f"{key}="))
        assert path.startswith(f"{mounts['shared']}/"), key


@linux_only
def test_its_arguments_run_on_two_machines_numbered_by_their_index(tmp_path: Path) -> None:
    (container,) = DOCUMENTS[1]["spec"]["template"]["spec"]["containers"]
    (tmp_path / "toy.py").write_text(RECIPE)
    (tmp_path / "toy.yaml").write_text(CONFIG)
    changed = {"--nproc-per-node": "1", "--rdzv-endpoint": f"127.0.0.1:{free_port()}", "--config": "toy.yaml"}
    dropped = ("model.path", "data.source", "checkpoint.every_minutes")
    arguments = ["run"]
    for argument in container["args"]:
        name, _, value = argument.partition("=")
        if name == "full_finetune":
            arguments.append("toy.py")
        elif name not in dropped:
            arguments.append(f"{name}={'done' if name == 'output_dir' else changed.get(name, value)}")

    def pod(index: int) -> Finished:
        return warm.lptune(arguments, folder=tmp_path, environment={"JOB_COMPLETION_INDEX": str(index)})

    assert "JOB_COMPLETION_INDEX" not in os.environ
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(pod, (0, 1))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "rank 0 of 2" in first.stdout
    assert "rank 1 of 2" in (tmp_path / "done/logs/rank-1.log").read_text()
