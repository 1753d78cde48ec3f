"""A cluster's address is tried by a plain connection before Ray, which would try for minutes."""

import socket
import time

import pytest
from rlhf_core import ConfigError, ResourceError
from rlhf_launch.placement.ray_address import check_address


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


def test_an_address_without_a_cluster_is_refused_in_a_moment(closed_port):
    begin = time.monotonic()
    with pytest.raises(ResourceError, match=f"nothing answers at 127.0.0.1:{closed_port}"):
        check_address(f"127.0.0.1:{closed_port}")
    assert time.monotonic() - begin < 5


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
