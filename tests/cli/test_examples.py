"""The examples for Kubernetes, Kubeflow Trainer and SkyPilot: their arguments run on two machines, with what
each would set. They were checked against the published schemas (docs/log.md, 2026-11-28); here they are held
to each other.
"""

import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import CONFIG, Command, linux_only
from tests.cli.test_multi_node import RECIPE
from tests.helpers import warm
from tests.helpers.cold import ROOT, Finished
from tests.helpers.launch import free_port

EXAMPLES = ROOT / "examples"


def _documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text("utf-8")))


DOCUMENTS = _documents("kubernetes/full_finetune.yaml")
RUNTIME, TRAINJOB = _documents("kubernetes/trainjob.yaml")
(TASK,) = _documents("skypilot/full_finetune.yaml")


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


def _arguments_of_job(_: dict[str, str]) -> list[str]:
    (container,) = DOCUMENTS[1]["spec"]["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]][1:]


def _arguments_of_trainjob(_: dict[str, str]) -> list[str]:
    trainer = TRAINJOB["spec"]["trainer"]
    return [*trainer["command"], *trainer["args"]][1:]


def _arguments_of_task(environment: dict[str, str]) -> list[str]:
    """As a shell with SkyPilot's variables gives them to `lptune`."""
    script = f"lptune() {{ printf '%s\\0' \"$@\"; }}\n{TASK['run']}"
    said = subprocess.run(
        ["bash", "-euc", script], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return said.stdout.split("\0")[:-1]


def test_the_three_examples_start_one_run() -> None:
    environment = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_IPS": "a\nb"}
    job, trainjob, task = (
        of(environment) for of in (_arguments_of_job, _arguments_of_trainjob, _arguments_of_task)
    )
    pet = ("--nnodes", "--nproc-per-node", "--rdzv-endpoint")  # PET_… says these
    assert trainjob == [each for each in job if not each.startswith(pet)]
    assert [each.replace("=a:", "=lptune-0.lptune:") for each in task] == job
    trainer = TRAINJOB["spec"]["trainer"]
    container = DOCUMENTS[1]["spec"]["template"]["spec"]["containers"][0]
    assert trainer["numNodes"] == TASK["num_nodes"] == DOCUMENTS[1]["spec"]["completions"]
    assert trainer["resourcesPerNode"] == container["resources"]
    assert TASK["resources"]["accelerators"].endswith(
        f":{container['resources']['limits']['nvidia.com/gpu']}"
    )
    assert TRAINJOB["spec"]["runtimeRef"] == {"kind": RUNTIME["kind"], "name": RUNTIME["metadata"]["name"]}
    # Kubeflow's controller finds the container that trains by these names, and gives it the PET_… variables.
    (replicated,) = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    policy, of_trainjob = (
        str(spec["podFailurePolicy"]).replace("'lptune'", "'node'")
        for spec in (DOCUMENTS[1]["spec"], replicated["template"]["spec"])
    )
    assert policy == of_trainjob
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert replicated["name"] == pod["containers"][0]["name"] == "node"
    of_job = DOCUMENTS[1]["spec"]["template"]["spec"]
    assert pod["volumes"] == of_job["volumes"]
    assert pod["containers"][0]["volumeMounts"] == container["volumeMounts"]
    for key in ("terminationGracePeriodSeconds", "restartPolicy", "securityContext"):
        assert pod[key] == of_job[key]


def test_the_arguments_can_be_checked_without_a_launch(command: Command) -> None:
    assert command("validate", *_arguments_of_job({})[1:])[0] == 0
    code, _, stderr = command("validate", *_arguments_of_job({})[1:], "micro_batch_size=3")
    assert code == 2
    assert "micro_batch_size" in stderr
    more = ("-v", "--log-dir=logs", "--redirects=3", "--tee", "3", "--local-ranks-filter=0")
    more += ("--master-port=1", "--master_addr", "a", "--rdzv-backend=static")
    assert command("validate", *more, *_arguments_of_job({})[1:])[0] == 0


@pytest.mark.parametrize(
    ("launch", "code", "said"),
    [
        ("--nnodes=1:2 --nproc-per-node=4 --rdzv-endpoint=a:1", 0, ""),
        ("--nnodes=2:3 --nproc-per-node=4 --rdzv-endpoint=a:1", 2, "12 data ranks"),
        ("--nnodes=3:2", 2, "--nnodes: 3:2"),
        ("--nnodes=2", 0, "--rdzv-endpoint"),
        ("--nproc-per-node=gpu", 0, "--nproc-per-node: gpu"),
        ("--rdzv-backend=c10d", 2, "--rdzv-backend"),
    ],
)
def test_what_only_a_launch_knows_is_checked_as_far_as_it_is_said(
    command: Command, launch: str, code: int, said: str
) -> None:
    found, stdout, stderr = command("validate", *launch.split(), "llama3_2/1b", "data.source=builtin")
    assert found == code
    notes = [line for line in stdout.splitlines() if line.startswith("note: --")]
    assert (said in stderr) if code else (bool(notes) == bool(said) and said in "".join(notes))


@linux_only
@pytest.mark.parametrize(
    ("of", "number"),
    [
        (_arguments_of_job, "JOB_COMPLETION_INDEX"),
        # The same arguments, by the test above.
        pytest.param(_arguments_of_trainjob, "PET_NODE_RANK", marks=pytest.mark.slow),
        pytest.param(_arguments_of_task, "SKYPILOT_NODE_RANK", marks=pytest.mark.slow),
    ],
)
def test_its_arguments_run_on_two_machines_numbered_by_their_index(
    tmp_path: Path, of: Callable[[dict[str, str]], list[str]], number: str
) -> None:
    port = free_port()
    environment = {
        "JOB": {},
        "PET": {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1",
                "PET_MASTER_PORT": str(port)},
        "SKYPILOT": {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1",
                     "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"},
    }[number.partition("_")[0]]  # fmt: skip
    (tmp_path / "toy.py").write_text(RECIPE)
    (tmp_path / "toy.yaml").write_text(CONFIG)
    changed = {"--nproc-per-node": "1", "--rdzv-endpoint": f"127.0.0.1:{port}", "--config": "toy.yaml"}
    dropped = ("model.path", "data.source", "checkpoint.every_minutes")
    arguments = []
    for argument in of(environment):
        name, _, value = argument.partition("=")
        if name == "full_finetune":
            arguments.append("toy.py")
        elif not value:
            arguments.append(name)
        elif name not in dropped:
            arguments.append(f"{name}={'done' if name == 'output_dir' else changed.get(name, value)}")

    def pod(index: int) -> Finished:
        return warm.lptune(arguments, folder=tmp_path, environment={**environment, number: str(index)})

    assert number not in os.environ
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(pod, (0, 1))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "rank 0 of 2" in first.stdout
    assert "rank 1 of 2" in (tmp_path / "done/logs/rank-1.log").read_text()
