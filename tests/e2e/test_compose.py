"""docker-compose.yml: what it promises, read from the file; and on an engine, where DILOCO_CI_DOCKER=1 asks for it."""

import ipaddress
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_node.cli.start import node_spec, trainer_settings
from diloco_node.config.resolve import NodeConfig, load_config
from diloco_node.lab.wan.container import load_attachment
from diloco_node.lab.wan.topology import load_topology
from tests.kit.compose_engine import OUTAGES, PORTS
from tests.kit.compose_engine import main as run_engine
from tests.kit.engine_kit import CACHE, SKIPPED, compose_commands, make_compose_v2, missing
from tests.kit.repository import ROOT, module_command

DOCUMENT: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = DOCUMENT["services"]
NAMES = sorted(set(SERVICES) - {"certs"})
WALLS = ["no-new-privileges:true"]


@pytest.fixture(scope="module")
def config() -> NodeConfig:
    return load_config(ROOT / "docker" / "run.toml")


def test_there_is_one_container_for_each_region_of_the_run_and_of_the_topology(config: NodeConfig) -> None:
    assert NAMES == sorted(config.regions) == sorted(load_topology(ROOT / "netem" / "us-4.toml").names)
    assert len(NAMES) == 4
    for name in NAMES:
        service = SERVICES[name]
        assert service["command"] == ["diloco-node", "start", "--region", name, "--config", "/config/run.toml"]
        assert service["environment"]["WAN_REGION"] == name
        assert service["container_name"] == f"diloco-{name}"


def test_addresses_are_those_of_run_toml_and_lie_in_their_networks(config: NodeConfig) -> None:
    subnets = {
        name: ipaddress.ip_network(network["ipam"]["config"][0]["subnet"])
        for name, network in DOCUMENT["networks"].items()
    }
    for name in NAMES:
        networks, region = SERVICES[name]["networks"], config.regions[name]
        assert region.address == f"{networks['wan']['ipv4_address']}:7400"
        assert region.admin_host == networks["admin"]["ipv4_address"]
        for network, entry in networks.items():
            # The first address is the network's own.
            assert ipaddress.ip_address(entry["ipv4_address"]) in list(subnets[network].hosts())[1:]
    assert not subnets["wan"].overlaps(subnets["admin"])


def test_the_status_port_is_published_on_loopback_only_and_regions_do_not_reach_it(config: NodeConfig) -> None:
    for name in NAMES:
        assert SERVICES[name]["ports"] == [f"127.0.0.1:{PORTS[name]}:{config.regions[name].admin_port}"]
    assert DOCUMENT["networks"]["wan"]["internal"] is True
    assert DOCUMENT["networks"]["admin"]["driver_opts"] == {"com.docker.network.bridge.enable_icc": "false"}
    assert len(set(PORTS.values())) == len(PORTS), "also of the region that is added"


def test_a_region_gets_its_own_certificate_and_never_the_authority_s_key() -> None:
    for name in NAMES:
        sources = dict(volume.split(":", 1) for volume in SERVICES[name]["volumes"])
        assert sources.pop(f"certs-{name}") == f"/certs/{name}:ro"
        assert sources.pop(f"state-{name}") == "/state"
        assert sources == {"./docker/run.toml": "/config/run.toml:ro", "./netem": "/config/netem:ro"}
        assert SERVICES[name]["depends_on"] == {"certs": {"condition": "service_completed_successfully"}}
    made = [volume for volume in SERVICES["certs"]["volumes"] if not volume.startswith("./")]
    assert sorted(made) == sorted(["authority:/certs", *(f"certs-{name}:/certs/{name}" for name in NAMES)])
    assert sorted(DOCUMENT["volumes"]) == sorted(
        ["authority", *(f"{kind}-{name}" for kind in ("certs", "state") for name in NAMES)]
    )


def test_privileges_are_what_shaping_needs_and_the_region_itself_has_none() -> None:
    for name in NAMES:
        service = SERVICES[name]
        assert service["cap_drop"] == ["ALL"]
        assert sorted(service["cap_add"]) == ["KILL", "NET_ADMIN", "SETGID", "SETUID"]
        assert service["security_opt"] == WALLS
        assert not {"privileged", "network_mode", "pid", "ipc", "devices"} & set(service)
        entry = service["entrypoint"]
        assert entry == ["python", "-m", "diloco_node.lab.wan.container", "--user", "diloco", "--"]
    certs = SERVICES["certs"]
    assert (certs["cap_drop"], certs["cap_add"], certs["security_opt"]) == (["ALL"], ["CHOWN"], WALLS)
    assert certs["network_mode"] == "none"


def test_every_file_that_is_mounted_is_there_and_the_link_of_each_region_can_be_read(config: NodeConfig) -> None:
    for name in NAMES:
        environment = SERVICES[name]["environment"]
        assert environment["WAN_CONFIG"] == "/config/run.toml"
        local = {
            "WAN_REGION": environment["WAN_REGION"],
            "WAN_CONFIG": str(ROOT / "docker" / "run.toml"),
            "WAN_TOPOLOGY": str(ROOT / environment["WAN_TOPOLOGY"].removeprefix("/config/")),
        }
        attachment = load_attachment(local)
        assert f"{attachment.address}:7400" == config.regions[name].address
        assert sorted(attachment.peers) == [other for other in NAMES if other != name]


def test_a_fifth_region_joins_by_a_file_beside_it(config: NodeConfig) -> None:
    document = yaml.safe_load((ROOT / "docker" / "us-north.yml").read_text())
    region, admission = document["services"]["us-north"], document["services"]["us-north-admission"]
    assert region["entrypoint"] == ["diloco-node", "start", "--region", "us-north"]
    words = dict(word.removeprefix("--").split("=", 1) for word in region["command"])
    address = words["advertise"]
    assert words["join"] in {line.address for line in config.regions.values()}
    assert address == f"{region['networks']['wan']['ipv4_address']}:7400"
    assert address not in {line.address for line in config.regions.values()}
    assert words["set"] == f"regions.us-north.admin_host={region['networks']['admin']['ipv4_address']}"
    assert region["ports"] == ["127.0.0.1:7415:7401"]
    assert sorted(region["volumes"]) == ["certs-us-north:/certs/us-north:ro", "state-us-north:/state"], "and no key"
    assert (region["cap_drop"], region["security_opt"]) == (["ALL"], WALLS)
    assert region["depends_on"] == {"us-north-admission": {"condition": "service_completed_successfully"}}
    made = {volume.split(":")[0] for volume in admission["volumes"] if not volume.startswith("./")}
    assert made == {"authority", "certs-us-north", *(f"state-{name}" for name in NAMES)}
    assert made <= {*DOCUMENT["volumes"], *document["volumes"]}
    (script,) = admission["command"]
    assert f"members add us-north $$folder --address {address}" in script
    assert all(f" {name}" in script for name in NAMES)


def test_settings_of_the_run_fit_a_container(config: NodeConfig) -> None:
    for name in NAMES:
        spec = node_spec(config, name, config.state_dir(name))
        assert (spec.listen_host, spec.listen_port) == ("0.0.0.0", 7400)
        assert spec.state_dir == Path("/state") / name
        assert spec.identity_dir == Path("/certs") / name
    assert trainer_settings(config)["data"]["paths"] == []


def test_nothing_in_it_is_newer_than_docker_compose_1_29() -> None:
    assert set(DOCUMENT) == {"x-region", "x-settings", "services", "networks", "volumes"}
    known = {
        *("image", "build", "depends_on", "user", "cap_drop", "cap_add", "security_opt", "entrypoint", "sysctls"),
        *("restart", "stop_grace_period", "logging", "container_name", "hostname", "command", "environment"),
        *("networks", "ports", "volumes", "network_mode", "healthcheck"),
    }
    for service in SERVICES.values():
        assert set(service) <= known


def test_the_image_runs_as_a_user_of_its_own_and_asks_the_daemon_for_its_health() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    words = [line.split(maxsplit=1) for line in lines if line and line[0].isupper()]
    users = [rest for instruction, rest in words if instruction == "USER"]
    assert users == ["diloco"]
    assert any(instruction == "HEALTHCHECK" for instruction, _ in words)
    assert "/livez" in (ROOT / "Dockerfile").read_text()
    # BuildKit is not asked for: docker-compose 1.29 builds without it.
    assert not any("--mount" in line for line in lines)
    # The authority's key and the state of earlier runs are no part of the image.
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert "*" in ignored
    assert {line for line in ignored if line.startswith("!")} == {
        *("!diloco_node", "!pyproject.toml", "!constraints.txt", "!README.md", "!LICENSE", "!wheels")
    }


@pytest.fixture(scope="module")
def composes() -> dict[str, list[str]]:
    """Every Compose there is; v2 is fetched where the tests on an engine are asked for, which fetch it too."""
    if os.environ.get("DILOCO_CI_DOCKER") == "1" and not missing():
        CACHE.mkdir(parents=True, exist_ok=True)
        make_compose_v2(CACHE)
    return compose_commands()


@pytest.mark.system
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("compose", ["v2", "1.29"])
def test_each_compose_that_is_here_reads_it(composes: dict[str, list[str]], compose: str) -> None:
    if compose not in composes:
        pytest.skip(f"Compose {compose} is missing: its reading is NOT tested")
    done = subprocess.run(
        [*composes[compose], "--file", str(ROOT / "docker-compose.yml"), "config"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Compose v2 warns of what it ignores.
    assert "warn" not in done.stderr.lower()
    assert sorted(yaml.safe_load(done.stdout)["services"]) == ["certs", *NAMES]


@pytest.fixture(scope="module")
def on_engine() -> dict[str, Any]:
    """What `tests.kit.compose_engine` found. It ends, and undoes everything, when this process is interrupted."""
    if why := missing():
        pytest.skip(f"docker-compose.yml is NOT tested on an engine: {why}")
    command = ["setpriv", "--pdeathsig", "TERM", *module_command(run_engine)]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True) as running,
    ):
        try:
            answer, _ = running.communicate()
        finally:
            running.terminate()
        said.seek(0)
        log = said.read()
    if running.returncode == SKIPPED:
        pytest.skip(f"docker-compose.yml is NOT tested on an engine: {json.loads(answer)['skipped']}")
    print(log)
    assert running.returncode == 0, log[-8000:]
    found: dict[str, Any] = json.loads(answer)
    return found


@pytest.mark.system
# Four regions and an engine leave nothing of two cores for other tests.
@pytest.mark.alone
@pytest.mark.timeout(2400)
@pytest.mark.skipif(
    os.environ.get("DILOCO_CI_DOCKER") != "1",
    reason="docker-compose.yml is NOT tested on an engine: set DILOCO_CI_DOCKER=1 (five minutes), as .ci/run does",
)
@pytest.mark.parametrize("compose", ["v2", "1.29"])
def test_four_containers_train_through_outages_and_end_equal(on_engine: dict[str, Any], compose: str) -> None:
    if compose not in on_engine["runs"]:
        pytest.skip(f"Compose {compose} could not be had: it is NOT tested on an engine")
    found = on_engine["runs"][compose]
    assert found["equal_digests"]
    assert found["tokens"]["balanced"]
    is_first = compose == max(on_engine["runs"])
    kinds = [one["kind"] for one in found["outages"]]
    assert kinds == list(OUTAGES[0] if is_first else OUTAGES[1])
    assert all(one["commits_of_others"] >= 4 for one in found["outages"])
