"""A cluster's address is tried by a plain connection before Ray, which would try for minutes."""

import os
import socket

import pytest
from rlhf_algos import PlacementSection
from rlhf_core import ConfigError, ResourceError
from rlhf_launch.placement.ray_address import check_address, cluster_address, worker_env_vars


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "localhost:{}"])
def test_an_address_that_answers_is_taken(listener, form):
    check_address(form.format(listener))


@pytest.mark.parametrize(
    "address", ["head", "head:", "head:port", "http://head:1", "head:99999", "", "a b:1", "head:0"]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match=r"no address of a Ray cluster.*host:port"):
        check_address(address)


def test_an_address_without_a_cluster_is_refused(closed_port):
    with pytest.raises(ResourceError, match=f"nothing answers at 127.0.0.1:{closed_port}"):
        check_address(f"127.0.0.1:{closed_port}")


def test_an_unknown_host_is_refused():
    with pytest.raises(ResourceError, match=r"nothing answers at no-such-host\.invalid:6379"):
        check_address("no-such-host.invalid:6379")


def test_auto_looks_where_ray_does(monkeypatch, tmp_path, listener, closed_port):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{listener}")
    check_address("auto")
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("rlhf_launch.placement.ray_address._PROCESSES", tmp_path / "proc")
    with pytest.raises(ResourceError, match="no Ray cluster runs on this host"):
        check_address("auto")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{closed_port}")
    with pytest.raises(ResourceError, match="nothing answers"):
        check_address("auto")


def test_auto_finds_a_cluster_with_a_folder_of_its_own_by_its_raylet(monkeypatch, tmp_path, listener):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("rlhf_launch.placement.ray_address._PROCESSES", tmp_path)
    for number, command in enumerate(
        ["/usr/bin/less\0--gcs-address=1.2.3.4:5\0", f"/ray/raylet\0--x=1\0--gcs-address=127.0.0.1:{listener}\0"]
    ):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "cmdline").write_text(command)
    check_address("auto")


@pytest.fixture
def no_variables(monkeypatch):
    for name in os.environ:
        if name.startswith(("NCCL_", "GLOO_", "HF_", "RLHF_", "RAY_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("configured", "variable", "joined"),
    [
        (None, None, None),
        (None, "10.0.0.1:6379", "10.0.0.1:6379"),  # as `ray job submit` starts a command
        ("head:6379", "10.0.0.1:6379", "head:6379"),
        ("auto", None, "auto"),
        (None, "local", None),
        (None, "", None),
    ],
)
def test_the_variable_of_ray_is_joined_where_the_configuration_names_no_cluster(
    no_variables, monkeypatch, configured, variable, joined
):
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert cluster_address(configured) == joined


def test_workers_of_a_joined_cluster_get_variables_of_networks_and_hubs_and_those_that_are_named(
    no_variables, monkeypatch
):
    kept = {"NCCL_IB_HCA": "mlx5", "GLOO_X": "1", "HF_HOME": "/models", "RLHF_SANDBOX_TOKEN": "t", "WANDB_KEY": "k"}
    for name, value in {**kept, "OTHER": "x", "RLHF_HOST_ADDRESS": "10.0.0.9", "RLHF_LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    placement = PlacementSection(forward_env=("WANDB_KEY",))
    assert worker_env_vars(placement, joined=True) == kept
    assert worker_env_vars(placement, joined=False) == {}


def test_the_interface_of_the_configuration_reaches_every_worker(no_variables, monkeypatch):
    monkeypatch.setenv("RLHF_INTERFACE", "eth0")
    placement = PlacementSection(interface="10.1.0.0/16")
    assert worker_env_vars(placement, joined=False) == {"RLHF_INTERFACE": "10.1.0.0/16"}
    assert worker_env_vars(placement, joined=True) == {"RLHF_INTERFACE": "10.1.0.0/16"}


def test_a_variable_that_is_named_and_not_set_is_refused(no_variables):
    with pytest.raises(ConfigError, match="forward_env names NOT_SET_HERE, which is not set here"):
        worker_env_vars(PlacementSection(forward_env=("NOT_SET_HERE",)), joined=True)
