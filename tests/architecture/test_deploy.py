"""What deploy/ shows to start is what the command takes, on every machine of it."""

import re
from pathlib import Path

import pytest
import yaml
from tests.fakes.http import routes_of

from drumline.cli.flags import assemble, read_arguments
from drumline.cli.verbs import Serve
from drumline.core.model_files import find_model
from drumline.core.settings import settings_of
from drumline.frontend.text.load import load_tokenizer
from drumline.launcher.nodes import check_nodes

DEPLOY = Path(__file__).parents[2] / "deploy"
SET, SERVICE = yaml.safe_load_all((DEPLOY / "leaderworkerset.yaml").read_text())
TEMPLATE = SET["spec"]["leaderWorkerTemplate"]
PODS = [TEMPLATE["leaderTemplate"]] + [TEMPLATE["workerTemplate"]] * (TEMPLATE["size"] - 1)
FLAGS = settings_of(Serve)


def container(pod):
    (only,) = pod["spec"]["containers"]
    return only


def config_of(pod, index):
    """Return what a pod's command asks for, with what the set puts into its environment."""
    given = {
        "LWS_GROUP_SIZE": str(TEMPLATE["size"]),
        "LWS_WORKER_INDEX": str(index),
        "LWS_LEADER_ADDRESS": "drumline-0.drumline.default",
    }
    words = [
        re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], word)
        for word in container(pod)["args"]
    ]
    assert words[0] == "serve"
    arguments = read_arguments(FLAGS, words[1:])
    assert not arguments.notes
    assert arguments.positionals == ["/models/model"]
    return assemble(Serve, FLAGS, arguments, {}).config


@pytest.mark.parametrize("index", range(TEMPLATE["size"]))
def test_every_pod_starts_its_part_of_one_engine(index):
    config = config_of(PODS[index], index)
    check_nodes(config)
    assert (config.parallel.nodes, config.parallel.node) == (TEMPLATE["size"], index)
    assert config.parallel.dist_init_addr == "drumline-0.drumline.default:29500"
    assert container(PODS[index])["args"] == container(PODS[0])["args"]


def test_what_others_reach_is_where_the_leader_answers_and_asks_for_keys():
    server = config_of(PODS[0], 0).server
    (port,) = container(PODS[0])["ports"]
    (served,) = SERVICE["spec"]["ports"]
    assert server.port == port["containerPort"]
    assert served["targetPort"] == port["name"]
    assert server.api_key_file
    assert config_of(PODS[0], 0).parallel.dist_secret_file
    labels = TEMPLATE["leaderTemplate"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"].items() <= labels.items()


def test_probes_ask_routes_that_there_are():
    paths = {
        container(PODS[0])[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert paths <= {entry.path for entry in routes_of(load_tokenizer(find_model(None)))}


def test_files_that_the_command_reads_are_mounted_in_every_pod():
    for index, pod in enumerate(PODS):
        mounts = [mount["mountPath"] for mount in container(pod)["volumeMounts"]]
        config = config_of(pod, index)
        for file in (config.server.api_key_file, config.parallel.dist_secret_file):
            assert any(file.startswith(f"{mount}/") for mount in mounts)
        assert {mount["name"] for mount in container(pod)["volumeMounts"]} == {
            volume["name"] for volume in pod["spec"]["volumes"]
        }
