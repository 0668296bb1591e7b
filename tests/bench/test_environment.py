"""Where a run took place, without names of hosts, users or folders."""

import getpass
import json
import re
import socket
from pathlib import Path

import numpy as np
import torch

import trueup
from trueup.bench.environment import environment


def test_environment_has_no_names_of_hosts_users_or_folders() -> None:
    found = environment()
    text = json.dumps(found)
    for secret in (str(Path.cwd()), str(Path.home()), str(Path(trueup.__file__).parents[2])):
        assert secret not in text
    for secret in (getpass.getuser(), socket.gethostname()):
        assert not re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text)
    assert not [value for value in found.values() if isinstance(value, str) and value.startswith(("/", "~"))]


def test_environment_says_versions_and_threads() -> None:
    found = environment()
    assert (found["torch"], found["numpy"]) == (str(torch.__version__), np.__version__)
    assert (found["trueup"], found["threads"]) == (trueup.__version__, torch.get_num_threads())
