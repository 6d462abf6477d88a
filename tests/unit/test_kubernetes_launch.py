"""The manifest of a run for Kubernetes: valid in the schemas of its releases, its rules, and mistakes in settings."""

import re
import signal
import sys
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions, major_minor

from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from rlhf.launch.kubernetes import pod_ranks
from rlhf.launch.kubernetes.__main__ import main
from rlhf.launch.kubernetes.job_manifest import USER_ID, WORK, default_name
from rlhf.launch.kubernetes.pod_ranks import PodRanks
from tests.support.refusals import says

ROOT = Path(__file__).parents[2]
IMAGE = ("--image=registry/rlhf:cuda", "--claim=work")
VERSIONS = [version for version in all_versions() if tuple(map(int, version.split("."))) >= (1, 31, 0)]
ALL_OPTIONS = ("--name=run", "--namespace=team", "--env-from-secret=hub", "--env-from-secret=wandb", "--cpus=8")
ALL_OPTIONS += ("--memory", "64Gi", "--shm-size=16Gi", "--backoff-limit=5")
JOBSET_FIELDS = {
    "spec": {"network", "failurePolicy", "replicatedJobs"},
    "network": {"enableDNSHostnames", "subdomain"},
    "failurePolicy": {"maxRestarts", "rules"},
    "rules": {"name", "action", "onJobFailureReasons", "onJobFailureMessagePatterns"},
    "replicatedJobs": {"name", "replicas", "template"},
}
"""The fields that the manifest uses, as in JobSet's API reference (v1alpha2, release 0.10)."""


def written(capsys, *words: str) -> dict:
    assert main([*IMAGE, *words]) == EXIT_DONE
    return yaml.safe_load(capsys.readouterr().out)


def job_of(document: dict) -> dict:
    """The Job itself, or the Job that JobSet would create."""
    if document["kind"] == "Job":
        return document
    (replicated,) = document["spec"]["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": document["metadata"], **replicated["template"]}


def pod_of(document: dict) -> dict:
    return job_of(document)["spec"]["template"]["spec"]


def container_of(document: dict) -> dict:
    (container,) = pod_of(document)["containers"]
    return container


def test_there_are_schemas_of_several_releases():
    assert {"1.31", "1.34"} < {major_minor(version) for version in VERSIONS}


@pytest.mark.parametrize("words", [(), ALL_OPTIONS, ("trainer.device=cpu",)], ids=["defaults", "all", "cpu"])
@pytest.mark.parametrize("nnodes", [1, 3])
def test_manifests_are_valid(capsys, nnodes, words):
    document = written(capsys, f"trainer.nnodes={nnodes}", *words)
    assert document["kind"] == ("Job" if nnodes == 1 else "JobSet")
    for version in VERSIONS:
        assert kubernetes_validate.validate(job_of(document), version, strict=True) == major_minor(version)


def test_fields_of_jobset_are_those_of_its_reference(capsys):
    document = written(capsys, "trainer.nnodes=2", "trainer.max_restarts=7")
    spec = document["spec"]
    assert (document["apiVersion"], document["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert spec.keys() == JOBSET_FIELDS["spec"]
    for name in ("network", "failurePolicy"):
        assert spec[name].keys() == JOBSET_FIELDS[name]
    assert spec["failurePolicy"]["maxRestarts"] == 7
    assert all(rule.keys() <= JOBSET_FIELDS["rules"] for rule in spec["failurePolicy"]["rules"])
    assert spec["replicatedJobs"][0].keys() == JOBSET_FIELDS["replicatedJobs"]


def test_exit_codes_of_a_job_decide_about_its_pods(capsys):
    spec = job_of(written(capsys))["spec"]
    rules = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in spec["podFailurePolicy"]["rules"][:2]}
    assert rules == {EXIT_REQUEUE: "Ignore", EXIT_USER_ERROR: "FailJob"}
    assert spec["podFailurePolicy"]["rules"][2]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert spec["backoffLimit"] == 3
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "what a policy for failures needs"


@pytest.mark.parametrize(
    ("code", "action"), [(EXIT_USER_ERROR, "FailJobSet"), (EXIT_REQUEUE, "RestartJobSetAndIgnoreMaxRestarts")]
)
def test_exit_codes_in_a_jobset_decide_about_all_pods(capsys, code, action):
    """The message is the one that Kubernetes' Job controller writes into the condition of a failed Job."""
    document = written(capsys, "trainer.nnodes=2")
    rules = job_of(document)["spec"]["podFailurePolicy"]["rules"]
    index = next(i for i, rule in enumerate(rules) if rule["onExitCodes"]["values"] == [code])
    assert rules[index]["action"] == "FailJob"
    message = f"Container train for pod team/run failed with exit code {code} matching FailJob rule at index {index}"
    of_set = document["spec"]["failurePolicy"]["rules"]
    assert all(rule["onJobFailureReasons"] == ["PodFailurePolicy"] for rule in of_set)
    patterns = {rule["action"]: rule.get("onJobFailureMessagePatterns", [""]) for rule in of_set}
    first = next(name for name, each in patterns.items() if any(re.search(pattern, message) for pattern in each))
    assert first == action
    assert job_of(document)["spec"]["backoffLimit"] == 0, "any other failure fails the Job, and starts all pods again"


def test_a_pod_has_what_its_ranks_need(capsys):
    words = ("trainer.nproc=4", "trainer.preempt_grace_s=100", *ALL_OPTIONS)
    pod = pod_of(document := written(capsys, *words))
    container = container_of(document)
    assert pod["terminationGracePeriodSeconds"] == 160
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4, "cpu": "8", "memory": "64Gi"}
    assert container["args"][-1] == "trainer.preempt_grace_s=100"
    assert "trainer.nproc=4" in container["args"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounted["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert mounted["/work"]["persistentVolumeClaim"] == {"claimName": "work"}
    assert pod["securityContext"]["fsGroup"] == USER_ID, "the images' user may write to a new volume"
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}, {"secretRef": {"name": "wandb"}}]
    assert document["metadata"] == {"name": "run", "namespace": "team"}
    assert "resources" not in container_of(written(capsys, "trainer.device=cpu"))
    servers = ("rollout=vllm_server", "rollout.servers.count=2", "rollout.tensor_model_parallel_size=2")
    assert container_of(written(capsys, *servers))["resources"]["limits"] == {"nvidia.com/gpu": 5}


def test_pods_of_a_jobset_find_the_first_one(capsys):
    document = written(capsys, "trainer.nnodes=3", "trainer.nproc=8", "--name=run")
    job = job_of(document)["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 3, 3)
    environment = {each["name"]: each.get("value") for each in container_of(document)["env"]}
    # JobSet's names: <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>
    assert environment["MASTER_ADDR"] == "run-node-0-0.run"
    assert document["spec"]["network"] == {"enableDNSHostnames": True, "subdomain": "run"}
    assert (environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("24", "8")
    assert container_of(document)["command"][-1] == pod_ranks.__name__


def test_the_command_of_the_page_is_valid(capsys):
    page = (ROOT / "docs" / "clusters.md").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^python -m rlhf\.launch\.kubernetes (.*) \| kubectl apply -f -$", page, re.MULTILINE)
    assert main(command.split()) == EXIT_DONE
    assert yaml.safe_load(capsys.readouterr().out)["kind"] == "JobSet"


def test_names_and_arguments_reach_the_pod_as_they_were_meant(capsys):
    document = written(capsys, "trainer.experiment_name='A b$(X) $$x'", "--config-dir=conf")
    assert document["metadata"]["name"] == "rlhf-a-b-x-x"
    assert container_of(document)["args"][:2] == ["--config-dir=conf", "trainer.experiment_name='A b$$(X) $$$$x'"]
    assert default_name("x" * 100, 40) == "rlhf-" + "x" * 35


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["trainer.nproq=2"], ["trainer.nproq=2", "trainer.nproc"]),
        (["trainer.default_local_dir=/data/runs"], ["trainer.default_local_dir=/data/runs", "--claim", "/work"]),
        (["trainer.default_local_dir=../runs"], ["trainer.default_local_dir=../runs"]),
        (["trainer.default_local_dir=~/runs"], ["trainer.default_local_dir=~/runs"]),
        (["--name=Run"], ["--name", "Run", "lower-case"]),
        (["--claim="], ["--claim", "lower-case"]),
        (["--image=a b"], ["--image", "a b"]),
        (["--env-from-secret=Hub"], ["--env-from-secret", "Hub"]),
        (["--memory=64GB"], ["--memory", "64GB", "64Gi"]),
        (["--gpus=8"], ["--gpus=8"]),
        (["trainer.nnodes=2", "trainer.callbacks=[{folder}/mine.py:follow]"], ["trainer.callbacks", "supervisor"]),
        (["reward.kwargs.api_key=sk-abcdefghijklmnopqrstuvwx"], ["reward.kwargs.api_key", "--env-from-secret"]),
        (["checkpoint.remote=s3://user:password@bucket/x"], ["checkpoint.remote", "secret"]),
    ],
)
def test_a_mistake_is_one_message(capsys, tmp_path, words, facts):
    (tmp_path / "mine.py").write_text("def follow(step, metrics):\n    pass\n")
    try:
        code = main([*IMAGE, *(word.format(folder=tmp_path) for word in words)])
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr()
    assert (code, shown.out) == (EXIT_USER_ERROR, "")
    says(shown.err, *facts)
    assert "sk-abc" not in shown.err
    assert "password" not in shown.err


def test_a_variable_of_a_secret_need_not_be_set_here(capsys, monkeypatch):
    monkeypatch.setenv("OF_THE_POD", "")  # pytest removes it in the end, although the command sets it
    monkeypatch.delenv("OF_THE_POD")
    secret = "reward.kwargs.api_key='${oc.env:OF_THE_POD}'"
    functions = f"reward.functions=[{ROOT}/tests/support/graded.py:graded]"
    assert main([*IMAGE, secret]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, "OF_THE_POD")
    arguments = container_of(written(capsys, "--env-from-secret=hub", functions, secret))["args"]
    assert secret.replace("$", "$$") in arguments  # Kubernetes reads $$ as $


def test_a_name_that_looks_like_a_number_is_quoted(capsys):
    assert main([*IMAGE, "--claim=1e3"]) == EXIT_DONE
    assert "claimName: '1e3'" in capsys.readouterr().out


def test_models_and_data_are_in_the_pod_and_not_here(capsys):
    arguments = [f"model.path={WORK}/models/mine", f"data.train_files={WORK}/train.jsonl", "rollout=vllm"]
    assert container_of(written(capsys, "recipes=null", *arguments))["args"][1:4] == arguments


def run_pod(*codes: int | str, stop: bool = False) -> tuple[int, float]:
    """Run ranks that end with `codes` (a text is Python code), and return the pod's exit code and its seconds."""
    script = "import os, signal, sys, time\n" + "".join(
        f"if os.environ['RANK'] == '{rank + len(codes)}': {code if isinstance(code, str) else f'sys.exit({code})'}\n"
        for rank, code in enumerate(codes)
    )
    environment = {"LOCAL_WORLD_SIZE": str(len(codes)), "JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "9"}
    handlers = {number: signal.getsignal(number) for number in pod_ranks.STOP_SIGNALS}
    begin = time.monotonic()
    try:
        ranks = PodRanks([sys.executable, "-S", "-c", script], environment)
        if stop:
            signal.raise_signal(signal.SIGTERM)
        return ranks.wait(), time.monotonic() - begin
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((0, 0), EXIT_DONE),
        ((0, 75), EXIT_REQUEUE),
        ((75, 2), EXIT_USER_ERROR),
        ((0, 1), EXIT_CRASHED),
        ((0, "os.kill(os.getpid(), signal.SIGKILL)"), EXIT_CRASHED),
        ((1, "time.sleep(1000)"), EXIT_CRASHED),
    ],
)
def test_one_rank_decides_about_its_pod(monkeypatch, codes, code):
    monkeypatch.setattr(pod_ranks, "CRASH_WAIT_S", 0.3)
    monkeypatch.setattr(pod_ranks, "PEERS_S", 0.3)
    found, seconds = run_pod(*codes)
    assert found == code
    assert seconds >= 0.3 or code != EXIT_CRASHED, "a crash waits for a mistake on another pod"


def test_a_stop_signal_reaches_all_ranks(monkeypatch):
    monkeypatch.setattr(pod_ranks, "PEERS_S", 0.3)
    waits = "signal.pause()"
    assert run_pod(waits, waits, stop=True)[0] == EXIT_REQUEUE
