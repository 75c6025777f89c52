"""hosts.toml: what is wrong is named, with an example; and nothing in it can become an option or a second command."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_node.cli.deploy.hosts import SshHost, read_hosts
from diloco_node.errors import ConfigError


def test_hosts_are_read_in_the_order_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts.toml"
    file.write_text(
        '[hosts.us]\naddress = "10.0.0.1"\nuser = "t"\nport = 2222\ncommand = ["python", "a b.py"]\n'
        '[hosts.eu]\naddress = "fd00::1"\nuser = "t"\n'
    )
    found = read_hosts(file)
    assert list(found) == ["us", "eu"]
    assert found["us"] == SshHost(address="10.0.0.1", user="t", port=2222, command=("python", "a b.py"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hosts = 3", "hosts: "),
        ("[hosts]", "hosts: "),
        ("[hosts.us]\nuser = 't'", r"hosts\.us\.address: Field required"),
        ("[hosts.us]\naddress = '-oProxyCommand=x'\nuser = 't'", r"hosts\.us\.address: "),
        ("[hosts.us]\naddress = 'a'\nuser = 'a b'", r"hosts\.us\.user: "),
        ("[hosts.us]\naddress = 'a'\nuser = 't'\nfolder = 'x; rm'", r"hosts\.us\.folder: "),
        ("[hosts.us]\naddress = 'a'\nuser = 't'\nport = 0", r"hosts\.us\.port: "),
        ("[hosts.us]\naddress = 'a'\nuser = 't'\nusers = 1", r"hosts\.us\.users: "),
        ("[hosts", "is no TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "hosts.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_hosts(file)


def test_a_file_that_is_not_there_comes_with_an_example(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't be read[^\n]*\n\[hosts.us-east\]\naddress"):
        read_hosts(tmp_path / "hosts.toml")
