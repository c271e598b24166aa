"""Both cluster profiles, without a cluster: what is planned, what is asked for, what Kubernetes would be sent."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SNAKEMAKE = [sys.executable, "-m", "snakemake"]
ASKED = [sys.executable, ROOT / "validation/pipeline/asked.py"]
PROFILES = ROOT / "workflow/profiles"
SLURM, KUBERNETES = (("--profile", f"workflow/profiles/{name}") for name in ("slurm", "kubernetes"))
REPORT = "results/gap/FINDINGS.md"
TEXTS = "calib/corpus/texts.parquet"
MEASURING = {"measure_float32"}  # the quick parameters have no other dtype
ON_HF = {"capture_engine", "choice_layers", "ladder_jobs", "ladder_facts"}
ENGINES_RUN = {"measure_hf_mechanisms", "measure_vllm_mechanisms"} | ON_HF | MEASURING


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A folder with the quick parameters, and two parts for the model in vLLM."""
    place = tmp_path_factory.mktemp("cluster") / "workspace"
    made = subprocess.run([sys.executable, ROOT / "workflow/scripts/workspace.py", "quick", "--at", place])
    assert made.returncode == 0
    params = yaml.safe_load((place / "params.yaml").read_text())
    params["models"][0]["tensor_parallel"] = 2
    (place / "params.yaml").write_text(yaml.safe_dump(params))
    return place


@pytest.fixture
def run(workspace):
    """Run a command there, on a machine that has no GPU unless the environment says otherwise."""

    def run(*command, **environment) -> subprocess.CompletedProcess:
        given = {name: value for name, value in os.environ.items() if name != "SNAKEMAKE_PROFILE"}
        given |= {"KVLAB_GPUS": "0"} | environment
        return subprocess.run(
            list(map(str, command)), cwd=workspace, env=given, capture_output=True, text=True, timeout=300
        )

    return run


@pytest.fixture
def asked(run):
    """What each planned job asks for, as a list of dicts."""

    def asked(*arguments, **environment) -> list[dict]:
        answer = run(*ASKED, "--json", *arguments, **environment)
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)

    return asked


def planned(output: str) -> Counter:
    """Jobs by rule, from the table of a dry run."""
    table = output.partition("Job stats:")[2].partition("total")[0]
    return Counter({name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)})


@pytest.mark.nightly
def test_on_slurm_every_job_is_planned_with_memory_and_time(run, asked):
    here = run(*SNAKEMAKE, "-n", REPORT)
    jobs = asked(*SLURM, REPORT)
    assert Counter(job["rule"] for job in jobs) == planned(here.stdout) != Counter()
    assert all(job["mem_mb"] >= 500 and job["runtime"] >= 5 for job in jobs)
    assert {job["rule"] for job in jobs if job["cores"] != 1} == {"capture_engine"}  # which folds up beside its engine
    assert not any(job["gpu"] for job in jobs)


@pytest.mark.nightly
def test_where_nodes_have_gpus_engines_ask_for_one_per_part_of_their_model(asked):
    jobs = asked(*SLURM, REPORT, KVLAB_GPUS="1")
    counts = {(job["rule"], job["gpu"]) for job in jobs}
    assert {rule for rule, gpus in counts if gpus} == ENGINES_RUN
    assert {gpus for rule, gpus in counts if rule in ON_HF} == {1}
    assert {gpus for rule, gpus in counts if rule in MEASURING} == {2}  # a part of vLLM's model on each


@pytest.mark.nightly
def test_memory_and_time_can_be_overridden(asked):
    changes = ["corpus_texts:mem_mb=64000", "corpus_texts:runtime=1440"]
    (corpus,) = asked(*SLURM, "--set-resources", *changes, "--", TEXTS)
    assert (corpus["mem_mb"], corpus["runtime"]) == (64000, 1440)


@pytest.mark.nightly
def test_an_unknown_answer_about_gpus_is_one_line(run):
    refused = run(*SNAKEMAKE, "-n", REPORT, KVLAB_GPUS="yes")
    lines = [line for line in refused.stderr.splitlines() if "profile" not in line]
    assert refused.returncode == 2
    assert lines == ["error: KVLAB_GPUS is 'yes'; allowed: 0, 1"]


@pytest.mark.nightly
def test_a_plan_that_there_is_not_is_no_empty_table(run):
    refused = run(*ASKED, "results/nosuch.md")
    assert refused.returncode == 1 and "nosuch" in refused.stderr and not refused.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["slurm", "kubernetes"])
def test_the_default_profile_takes_nothing_away_from_a_cluster(name):
    """It wins key by key, so a key of both would be lost; and its limits are for one machine."""
    default, cluster = (yaml.safe_load((PROFILES / part / "config.yaml").read_text()) for part in ("default", name))
    assert not default.keys() & cluster.keys()
    assert {f"{resource}=local" for resource in default["resources"]} == set(cluster["set-resource-scopes"])


@pytest.mark.nightly
def test_dvc_reaches_the_profile_through_the_environment(run):
    through = run(*SNAKEMAKE, "-n", "corpus", SNAKEMAKE_PROFILE=SLURM[1])
    assert through.returncode == 0, through.stderr
    assert f"Using profiles {SLURM[1]} and workflow specific profile profiles/default" in through.stderr


@pytest.fixture(scope="module")
def bucket(s3_server):
    """An S3 server's bucket with what docs/pipeline.md puts there, and the environment that leads Snakemake to it."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=s3_server,
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    client.create_bucket(Bucket="kvlab")
    sources = [path for part in ("models", "src") for path in (ROOT / part).rglob("*") if path.is_file()]
    for path in sources:  # a plan looks at names only
        client.put_object(Bucket="kvlab", Key=str(path.relative_to(ROOT)), Body=b"")
    names = {"ENDPOINT_URL": s3_server, "ACCESS_KEY": "key", "SECRET_KEY": "secret"}
    return client, {f"SNAKEMAKE_STORAGE_S3_{name}": value for name, value in names.items()}


def names_in(client) -> set[str]:
    """Everything in the bucket."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="kvlab")
    return {entry["Key"] for page in pages for entry in page["Contents"]}


@pytest.mark.nightly
def test_on_kubernetes_every_job_is_planned_and_the_bucket_stays_as_it_was(run, bucket):
    client, storage = bucket
    before = names_in(client)
    there = run(*SNAKEMAKE, *KUBERNETES, "-n", REPORT, **storage)
    assert there.returncode == 0, there.stderr + there.stdout
    assert planned(there.stdout) == planned(run(*SNAKEMAKE, "-n", REPORT).stdout) != Counter()
    assert names_in(client) == before


class Api(BaseHTTPRequestHandler):
    """As much of Kubernetes' API as the executor talks to. Every job that it is sent is refused."""

    sent: list[dict]

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/jobs"):
            self.sent.append(body)
            self.answer(403, {"kind": "Status", "reason": "only a test"})
        else:
            self.answer(201, body)

    def do_DELETE(self):
        self.answer(200, {"kind": "Status", "status": "Success"})

    def answer(self, code, body):
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def kubernetes(tmp_path):
    """What a stand-in for the API was sent, and the environment that leads Snakemake to it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Api", (Api,), {"sent": []}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    yield server.RequestHandlerClass.sent, {"KUBECONFIG": str(tmp_path / "kubeconfig")}
    server.shutdown()


@pytest.mark.nightly
@pytest.mark.parametrize(("gpus", "limit"), [("0", None), ("1", "1")])
def test_kubernetes_is_asked_for_what_the_rule_asks(run, bucket, kubernetes, workspace, gpus, limit):
    """The job of the texts stands for those without a GPU; made into an engine's, it asks for what such a job would."""
    sent, cluster = kubernetes
    extra = ["--set-resources", f"corpus_texts:gpu={gpus}"] if gpus == "1" else []
    run(*SNAKEMAKE, *KUBERNETES, *extra, "--", TEXTS, **bucket[1], **cluster, KVLAB_GPUS=gpus)
    (container,) = sent[0]["spec"]["template"]["spec"]["containers"]
    profile = yaml.safe_load((PROFILES / "kubernetes/config.yaml").read_text())
    resources = container["resources"]
    assert container["image"] == profile["container-image"]
    assert profile["precommand"] in container["args"][1]
    assert resources["limits"]["memory"] == resources["requests"]["memory"] == "2000M"
    assert resources["limits"].get("nvidia.com/gpu") == resources["requests"].get("nvidia.com/gpu") == limit
