"""Writes the manifest of a run: a Job for one machine, a JobSet for several.

A pod's exit code decides what follows. After 75 the run starts again, any number of times. After 2 the run ends. Other
nonzero codes count as failures. In a Job, the supervisor restarts crashed ranks, so pods rarely fail, and Kubernetes
replaces a failed pod. In a JobSet, one failed pod fails the Job of all pods, and JobSet (0.10 or later) starts all pods
again.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from rlhf.config.schema.trainer import TrainerConfig
from rlhf.errors import EXIT_REQUEUE, EXIT_USER_ERROR, UserError
from rlhf.launch.scheduler_times import stop_notice_s
from rlhf.ranks.parent import LAUNCH
from rlhf.ranks.world import LOCAL_WORLD_SIZE

SHM_SIZE = "8Gi"
POD_FAILURES = 3
"""Default of --backoff-limit for a Job: the number of failed pods to replace."""
WORK = "/work"
"""Working directory of the images."""
USER_ID = 1000
"""User and group of the images."""
CONTAINER, NODES = "train", "node"
"""Names of the container in a pod, and of the Job in a JobSet."""
MASTER_PORT = 29500
LAUNCH_NAME = "kubernetes-$(LAUNCH_UID)"
"""Value of LAUNCH. Kubernetes replaces $(LAUNCH_UID)."""
UID_OF_JOB = "batch.kubernetes.io/controller-uid"
UID_OF_JOBSET = "jobset.sigs.k8s.io/jobset-uid"
"""Labels of a pod that stay the same when the pod is started again."""


@dataclass(frozen=True)
class Pod:
    """Settings of each pod."""

    image: str
    claim: str
    """PersistentVolumeClaim for run directories and the Hub's cache."""
    arguments: Sequence[str]
    """Arguments of `python -m rlhf.train`."""
    gpus: int
    secrets: Sequence[str] = field(default_factory=list)
    """Secrets whose entries become environment variables."""
    cpus: str | None = None
    memory: str | None = None
    shm_size: str = SHM_SIZE


def manifest(pod: Pod, trainer: TrainerConfig, name: str, namespace: str | None, backoff_limit: int | None) -> str:
    """Return the manifest as YAML.

    Args:
        backoff_limit: failures after which the run ends; None for the default of a Job or JobSet.
    """
    metadata = {"name": name} | ({} if namespace is None else {"namespace": namespace})
    if trainer.nnodes == 1:
        limit = POD_FAILURES if backoff_limit is None else backoff_limit
        container = _container(pod, {LAUNCH: LAUNCH_NAME}, UID_OF_JOB)
        job = _job_spec(pod, trainer, limit, container, after_stop="Ignore")
        document: dict[str, Any] = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job}
    else:
        restarts = trainer.max_restarts if backoff_limit is None else backoff_limit
        document = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": _jobset_spec(pod, trainer, name, restarts),
        }
    head = "# Written by python -m rlhf.launch.kubernetes, for kubectl apply -f -.\n"
    return head + yaml.dump(document, Dumper=_Quoting, sort_keys=False, width=120)


class _Quoting(yaml.SafeDumper):
    """Quotes strings such as 1e3, which kubectl reads as numbers but PyYAML does not."""


_Quoting.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_.]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def default_name(experiment: str, longest: int) -> str:
    """Return a name for Kubernetes, with at most `longest` characters, from the name of the experiment."""
    plain = re.sub("[^a-z0-9]+", "-", f"rlhf-{experiment}".lower())
    return plain[:longest].strip("-")


def check_run_dir(trainer: TrainerConfig) -> None:
    """Raise UserError if the run directory is not on the volume at WORK: it would be lost with its pod."""
    folder = PurePosixPath(trainer.default_local_dir)
    if ".." in folder.parts or str(folder).startswith("~") or not (PurePosixPath(WORK) / folder).is_relative_to(WORK):
        raise UserError(
            f"trainer.default_local_dir={folder}: not on the volume of --claim, which the pod mounts at {WORK}. Set a "
            f"relative path, or a folder in {WORK}."
        )


def _jobset_spec(pod: Pod, trainer: TrainerConfig, name: str, restarts: int) -> dict[str, Any]:
    """Return the specification of a JobSet with one indexed Job, whose pods find the first pod by its host name."""
    environment = {
        LAUNCH: LAUNCH_NAME,
        "MASTER_ADDR": f"{name}-{NODES}-0-0.{name}",
        "MASTER_PORT": str(MASTER_PORT),
        "WORLD_SIZE": str(trainer.nnodes * trainer.ranks),
        LOCAL_WORLD_SIZE: str(trainer.ranks),
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    container = _container(pod, environment, UID_OF_JOBSET)
    container["command"] = ["tini", "--", "python", "-m", "rlhf.launch.kubernetes.pod_ranks"]
    job = _job_spec(pod, trainer, 0, container, after_stop="FailJob")
    job |= {"completionMode": "Indexed", "completions": trainer.nnodes, "parallelism": trainer.nnodes}
    reason = {"onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "network": {"enableDNSHostnames": True, "subdomain": name},
        "failurePolicy": {
            "maxRestarts": restarts,
            # The first rule of the Job's policy matches user errors, the others match stops. The message of a failed
            # Job ends with the number of the rule that matched.
            "rules": [
                {"name": "mistake", "action": "FailJobSet", **reason, "onJobFailureMessagePatterns": ["index 0$"]},
                {"name": "stopped", "action": "RestartJobSetAndIgnoreMaxRestarts", **reason},
            ],
        },
        "replicatedJobs": [{"name": NODES, "replicas": 1, "template": {"spec": job}}],
    }


def _job_spec(
    pod: Pod, trainer: TrainerConfig, backoff_limit: int, container: dict[str, Any], *, after_stop: str
) -> dict[str, Any]:
    """Return the specification of a Job. `after_stop` is the action after exit code 75, and after a lost node."""
    return {
        "backoffLimit": backoff_limit,
        # A new pod must not start before its predecessor has left the run directory.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                _on_exit("FailJob", EXIT_USER_ERROR),
                _on_exit(after_stop, EXIT_REQUEUE),
                {"action": after_stop, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": stop_notice_s(trainer),
                # The images' user is not root. Without this group, only root may write to most new volumes.
                "securityContext": {"fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch"},
                "containers": [container],
                "volumes": [
                    {"name": "work", "persistentVolumeClaim": {"claimName": pod.claim}},
                    {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pod.shm_size}},
                ],
            }
        },
    }


def _on_exit(action: str, code: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [code]}}


def _container(pod: Pod, environment: dict[str, str], uid_label: str) -> dict[str, Any]:
    """Return the container. `environment` may use $(LAUNCH_UID), the value of the pod's label `uid_label`."""
    uid = {"name": "LAUNCH_UID", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{uid_label}']"}}}
    limits: dict[str, Any] = {} if pod.gpus == 0 else {"nvidia.com/gpu": pod.gpus}
    limits |= {name: size for name, size in (("cpu", pod.cpus), ("memory", pod.memory)) if size is not None}
    return {
        "name": CONTAINER,
        "image": pod.image,
        # Kubernetes replaces $(NAME) in arguments, and reads each $$ as a plain $.
        "args": [text.replace("$", "$$") for text in pod.arguments],
        "env": [uid, *({"name": name, "value": value} for name, value in environment.items())],
        **({"envFrom": [{"secretRef": {"name": name}} for name in pod.secrets]} if pod.secrets else {}),
        **({"resources": {"limits": limits}} if limits else {}),
        "volumeMounts": [{"name": "work", "mountPath": WORK}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
